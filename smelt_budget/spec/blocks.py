"""Which blocks does a spec hold? The strict parent of all of them, the bounds of a number, and the nested mappings.

Loop and core say how a looped model differs from a plain one; rope scaling says how its rotary positions are stretched.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Sanity bounds, far above any published model. They keep every count of a valid spec below 2**63 per row
# and every search array exact in float64, and they turn a typed-in phone number into a clear message.
MOST_WIDE = 10_000_000
Width = Annotated[int, Field(ge=1, le=MOST_WIDE)]
Heads = Annotated[int, Field(ge=1, le=65_536)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Positive = Annotated[float, Field(gt=0)]


class Frozen(BaseModel):
    """Strict (no "3", no true for 1), closed (no unknown key) and immutable."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


class Loop(Frozen):
    """Layers `[start, stop)`, counted from 0, run `visits` times as one block (SMELT, section 1)."""

    start: Annotated[int, Field(ge=0)]
    """First core layer, 0-based."""
    stop: Annotated[int, Field(ge=1)]
    """One past the last core layer."""
    visits: Annotated[int, Field(ge=1, le=1000)]
    """How many times the block runs."""
    residual_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on both branch outputs of every core layer, on every visit; the paper's is 1 / visits."""

    @model_validator(mode="after")
    def _core_is_not_empty(self) -> Loop:
        if self.stop <= self.start:
            raise ValueError(f"the core [start, stop) = [{self.start}, {self.stop}) holds no layer")
        return self


class Core(Frozen):
    """Where the core of a sectioned model differs from its prelude and coda; `None` means "the same"."""

    num_key_value_heads: Heads | None = None
    num_experts: Count | None = None
    kv_lora_rank: Width | None = None


class RopeScaling(Frozen):
    """How rotary frequencies are stretched past the context they were trained at; Hugging Face's `rope_scaling`."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """All frequencies alike; by wavelength (Llama 3.1); by turns within the trained context (arXiv:2309.00071)."""
    factor: Positive
    """How many times longer the context became."""
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """The context before stretching; llama3 and yarn need it."""
    low_freq_factor: Positive | None = None
    """llama3: wavelengths above original / low_freq_factor are stretched whole."""
    high_freq_factor: Positive | None = None
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    beta_fast: Positive = 32.0
    """yarn: frequencies with more turns than this in the original context are left alone."""
    beta_slow: Positive = 1.0
    """yarn: frequencies with fewer turns than this are stretched whole."""
    attention_factor: Positive | None = None
    """yarn: factor on the rotary cosines and sines; left out it follows from mscale, mscale_all_dim and factor."""
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    """yarn: latent attention also multiplies its softmax scale by (0.1 * this * ln(factor) + 1) squared."""
    truncate: bool = True
    """yarn: whether the two corner dimensions are rounded outward to whole ones (gpt-oss does not)."""

    @model_validator(mode="after")
    def _fields_suit_the_type(self) -> RopeScaling:
        kind = self.rope_type
        if kind != "linear" and self.original_max_position_embeddings is None:
            raise ValueError(f"rope_type {kind} needs original_max_position_embeddings")
        low, high = self.low_freq_factor, self.high_freq_factor
        if kind == "llama3" and (low is None or high is None or low > high):
            raise ValueError(f"rope_type llama3 needs low_freq_factor at most high_freq_factor, not {low} and {high}")
        if kind == "yarn" and self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} is above beta_fast {self.beta_fast}")
        yarn = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
        foreign = {"llama3": yarn, "yarn": {"low_freq_factor", "high_freq_factor"}}.get(
            kind, yarn | {"low_freq_factor", "high_freq_factor"}
        )
        fields = type(self).model_fields
        stray = [name for name in fields if name in foreign and getattr(self, name) != fields[name].default]
        if stray:
            raise ValueError(f"{', '.join(stray)} set, which rope_type {kind} does not use")
        return self
