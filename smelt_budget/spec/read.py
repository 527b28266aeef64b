"""Where does a model come from? A file, a directory with a config.json, a built-in name, or `-`; to one spec.

A mapping with `model_type` is a Hugging Face config and is read by its family; words with `--num-layers`, and their
YAML forms, are Megatron's arguments; one with `d_model` and `n_layers` is OLMo-core's. Any other mapping is own YAML,
whose keys are the fields of `ModelSpec`.
`smelt.yaml#twin` is one arm of a solved pair.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.spec import builtin, megatron_arguments, olmo_core
from smelt_budget.spec.config import Config
from smelt_budget.spec.families import FAMILIES, REFUSED
from smelt_budget.spec.functions import SILU
from smelt_budget.spec.keys import FUNCTIONS, NOTED, is_harmless, sort_leftovers
from smelt_budget.spec.model import ModelSpec, checked
from smelt_budget.spec.text import parse, read_text

WRAPPERS = ("text_config", "llm_config", "language_config", "thinker_config")
NUMBER = re.compile(r"\d{1,18}(\.\d{1,18}|/[1-9]\d{0,17})?")
SETTING = {
    "convention": lambda v: v in (None, "smelt", "megatron", "torchtitan", "full-square"),
    "context": lambda v: v is None or (type(v) is int and 1 <= v <= 10**12),
    "attention_length": lambda v: v is None or NUMBER.fullmatch(str(v)) is not None,
    "bytes_per_element": lambda v: v is None or NUMBER.fullmatch(str(v)) is not None,
}
"""What a pair's setting may hold; it was written by `Setting.as_dict`."""
LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Reading:
    """A spec, and what its reader should tell the user."""

    spec: ModelSpec
    origin: str
    """What to call it: a path, a built-in name, or standard input."""
    notes: tuple[str, ...] = ()
    """Said always: wrappers opened, what is not counted."""
    harmless: tuple[str, ...] = ()
    """Keys that change no count; listed on -v."""
    functions: tuple[str, ...] = ()
    """Functions without weights that the torch model does otherwise; listed on -v, and by `verify`."""
    setting: Mapping[str, Any] = field(default_factory=dict)
    """What it is counted under unless the user says otherwise: its paper's attention length, its pair's setting."""


def read(source: str) -> Reading:
    """The model named by `source`.

    Raises:
        BadInput: unreadable, not exactly countable, or not found; nothing is guessed.
    """
    path, _, arm = source.partition("#")
    exists = path not in ("", "-") and on_disk(path)
    if arm and (not exists or Path(path).is_dir()):
        raise BadInput(f"{path!r:.200} is no file of a solved pair, so it has no {arm!r:.40}")
    if not exists and builtin.has(path):
        model = builtin.load(path)
        length = model.get("attention_length")
        reading = read_mapping(model["config"], path)
        return reading if length is None else replace(reading, setting={"attention_length": length})
    if path == "-":
        return read_any(read_text("-"), "standard input")
    if not exists:
        near = difflib.get_close_matches(path.lower(), builtin.names(), 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `smelt-budget models` for the built-in ones"
        raise BadInput(f"no file and no built-in model is called {path!r:.200}", f"fix: {hint}")
    if Path(path).is_dir():
        inside = Path(path) / "config.json"
        if not inside.is_file():
            raise BadInput(f"the directory {path} holds no config.json")
        return read_mapping(parse(read_text(str(inside)), str(inside)), str(inside))
    return read_file(path, arm)


def on_disk(path: str) -> bool:
    """Whether there is such a file or directory; a name the system cannot hold is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def read_file(path: str, arm: str) -> Reading:
    """A file: a model, or with `#baseline` / `#twin` one arm of a solved pair."""
    text = read_text(path)
    if megatron_arguments.recognised(text) and not arm:
        return read_any(text, path)
    data = parse(text, path)
    if {"baseline", "twin"} <= data.keys():
        if arm not in ("baseline", "twin"):
            raise BadInput(f"{path} holds a solved pair", f"fix: {path}#baseline or {path}#twin")
        inner = data[arm].get("spec") if isinstance(data[arm], dict) else None
        if not isinstance(inner, dict):
            raise BadInput(f"{path}: {arm} has no spec")
        setting = data.get("setting", {})
        if not isinstance(setting, dict) or not all(SETTING[name](setting.get(name)) for name in SETTING):
            raise BadInput(f"{path}: setting is {setting!r:.120}, not one that solve wrote", "fix: solve it again")
        return replace(read_mapping(inner, f"{path}#{arm}"), setting=setting)
    if arm:
        raise BadInput(f"{path} is no solved pair, so it has no {arm!r}")
    return read_mapping(data, path)


def read_any(text: str, origin: str) -> Reading:
    """Text of one model: words for Megatron's parser, or a mapping."""
    if megatron_arguments.recognised(text):
        return read_arguments(megatron_arguments.flags_of_text(text, origin), origin)
    return read_mapping(parse(text, origin), origin)


def read_arguments(flags: megatron_arguments.Flags, origin: str) -> Reading:
    """Megatron's flags, read by their own rules."""
    found = megatron_arguments.spec_of(flags, origin)
    return Reading(found.spec, origin, tuple(found.notes), found.harmless, found.functions)


def read_mapping(data: dict[str, Any], origin: str) -> Reading:
    """A mapping read by its family, as Megatron's arguments, as OLMo-core's config, or as own YAML."""
    if megatron_arguments.is_yaml_of_arguments(data):
        return read_arguments(megatron_arguments.flags_of_yaml(data), origin)
    if olmo_core.recognised(data):
        found = olmo_core.spec_of(data, origin)
        return Reading(found.spec, origin, found.notes, found.harmless, found.functions)
    notes: list[str] = []
    data = opened(data, origin, notes)
    if data.get("multi_latent_attention") is False:  # leftovers of a switched-off kind (THUDM/slime PR 1980)
        data = {key: value for key, value in data.items() if key not in (*LATENT_FIELDS, "qk_pos_emb_head_dim")}
    family = data.get("model_type")
    if family is None:
        return read_own(data, origin, notes)
    if family in REFUSED:
        raise BadInput(f"{origin}: {family} cannot be counted exactly: {REFUSED[family]}")
    if family not in FAMILIES:
        raise BadInput(
            f"{origin}: the family {family!r:.60} is not read here, and guessing it would be a wrong count",
            f"read exactly: {', '.join(FAMILIES)}",
            "fix: describe the model in own YAML, without model_type (docs/conventions.md, C1)",
        )
    config = Config(data, origin)
    spec = checked(FAMILIES[family](config), origin)
    said, harmless = told(config.leftover(), spec, origin, notes)
    return Reading(spec, origin, said, tuple(sorted({*harmless, *config.set_aside})), tuple(config.functions))


def read_own(data: dict[str, Any], origin: str, notes: list[str]) -> Reading:
    """Own YAML: the fields of `ModelSpec`, plus keys known to be harmless."""
    if "architectures" in data:
        raise BadInput(f"{origin} looks like a Hugging Face config without model_type", "fix: add model_type")
    if data.get("rope_parameters") is not None:
        fix = "fix: rope_theta, rope_scaling and partial_rotary_factor, each on its own"
        raise BadInput(f"{origin}: rope_parameters is no field of a spec", fix)
    fields = {key: value for key, value in data.items() if key in ModelSpec.model_fields or not is_harmless(key)}
    fields.pop("multi_latent_attention", None)
    spec = checked(fields, origin)
    said, harmless = told({k: v for k, v in data.items() if k not in fields}, spec, origin, notes)
    unread = [key for key in harmless if key in FUNCTIONS and data[key] not in (None, *SILU)]
    unlike = (f"not fields of a spec: {', '.join(unread)}",) if unread else ()
    return Reading(spec, origin, said, harmless, unlike)


def opened(data: dict[str, Any], origin: str, notes: list[str]) -> dict[str, Any]:
    """The language model inside a multimodal wrapper; the outer tie_word_embeddings holds where it has none."""
    family = data.get("model_type")
    if not isinstance(family, (str, type(None))):
        raise BadInput(f"{origin}: model_type is {family!r:.40}, not text")
    if family in FAMILIES:
        return data
    for key in WRAPPERS:
        inner = data.get(key)
        if isinstance(inner, dict):
            notes.append(
                f"{origin}: read {key} of a {data.get('model_type', 'wrapped')} model; the rest is not counted"
            )
            outer = data.get("tie_word_embeddings")
            if outer is not None and inner.get("tie_word_embeddings") is None and "text_config" not in inner:
                inner = inner | {"tie_word_embeddings": outer}
            if inner.get("model_type") is None and "text_config" not in inner:
                raise BadInput(f"{origin}: {key} has no model_type, so its family is not known", "fix: add model_type")
            return opened(inner, origin, notes)
    return data


def told(
    leftover: dict[str, Any], spec: ModelSpec, origin: str, notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Notes and harmless keys; raises where a leftover could change a count."""
    harmless = sort_leftovers(leftover, spec, origin)
    said = [f"{key}: {NOTED[key]}" for key in harmless if key in NOTED and leftover[key]]
    return tuple(notes + said), harmless
