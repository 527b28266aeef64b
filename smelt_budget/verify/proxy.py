"""Which small pair stands for the full one? One that two CPU cores train in minutes, matched the same way.

The baseline is shrunk with its traits kept (`smelt_budget.verify.shrink`). Its twin is found by the solver's own search
on a finer lattice: same span, visits and place of the core, same policy, heads and FLOP convention; a few neighbouring
baselines are tried (`smelt_budget.verify.small_pair`). What could not be kept is said in `notes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from smelt_budget.errors import BadInput, Infeasible
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver import Gaps
from smelt_budget.solver.score import Shape
from smelt_budget.spec import ModelSpec
from smelt_budget.verify.pair import Pair
from smelt_budget.verify.small_pair import POINT, STEPS, TINY, TOLERANCE, Found, Wanted, best, gqa, wanted

Size = Literal["tiny", "small", "full"]
ACTIVE = {"tiny": TINY, "small": 2_500_000}
DEPTHS = {"tiny": range(4, 7), "small": range(8, 13)}
"""Physical layers; more than the first where that brings the core's share of them nearer to the full pair's."""
LARGER = 4  # a refused size is tried again at this many times its active parameters


@dataclass(frozen=True)
class Proxy:
    """A pair to train, and how it differs from the one it stands for."""

    baseline: ModelSpec
    twin: ModelSpec
    setting: Setting
    """Counted at the training context; attention over the convention's mean of a whole row, (context + 1) / 2."""
    size: str
    gaps: dict[str, float]
    sparsity: dict[str, float]
    """S of baseline and twin, and of the full pair's."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "size": self.size,
            "setting": self.setting.as_dict(),
            "baseline": {"spec": self.baseline.compact(), "ledger": Ledger(self.baseline, self.setting).as_dict()},
            "twin": {"spec": self.twin.compact(), "ledger": Ledger(self.twin, self.setting).as_dict()},
            "gaps": self.gaps,
            "sparsity": self.sparsity,
            "notes": list(self.notes),
        }


def proxy(
    pair: Pair, size: Size = "tiny", active_parameters: int | None = None, vocab_size: int = 257, context: int = 256
) -> Proxy:
    """The small pair for a full one; `full` is the pair itself, at its own vocabulary and context.

    Args:
        pair: as read from its file.
        size: how many layers and, unless given, active non-embedding parameters.
        active_parameters: another number of active non-embedding parameters of the baseline.
        vocab_size: the training data's.
        context: tokens of a training row.

    Raises:
        BadInput: the baseline has no experts, or the sizes contradict each other.
        Infeasible: no small pair is within tolerance; says what was tried.
    """
    if size == "full":
        if active_parameters is not None:
            raise BadInput(
                "the full pair has the size it has", f"fix: --size small --active-params {active_parameters}"
            )
        return finished(pair, pair.baseline, pair.twin, pair.setting, size, ("no proxy: this is the pair itself",))
    if not pair.baseline.is_moe:
        raise BadInput(f"{pair.origin}#baseline is dense: without experts no twin can be found for it")
    if context < 2 or vocab_size < 2 or (active_parameters is not None and active_parameters < 1):
        raise BadInput("a context, a vocabulary and a size are numbers of two or more")
    target = wanted(pair, active_parameters or ACTIVE[size], DEPTHS[size], vocab_size, context)
    found = best(target)
    if found is None:
        raise refusal(target, size)
    return finished(pair, found.baseline, as_scaled(pair, found.twin), target.setting, size, differences(target, found))


def finished(
    pair: Pair, baseline: ModelSpec, twin: ModelSpec, setting: Setting, size: str, notes: tuple[str, ...]
) -> Proxy:
    """The two arms counted again, from their own specs."""
    arms = [Ledger(spec, setting) for spec in (baseline, twin)]
    full = [Ledger(spec, pair.setting) for spec in (pair.baseline, pair.twin)]
    names = ("baseline", "twin", "full_baseline", "full_twin")
    sparsity = {n: ledger.compute_equivalent_sparsity for n, ledger in zip(names, arms + full, strict=True)}
    return Proxy(baseline, twin, setting, size, Gaps.between(*arms).as_dict(), sparsity, notes)


def as_scaled(pair: Pair, twin: ModelSpec) -> ModelSpec:
    """The twin with the full twin's residual scale, which a hand may have changed; it costs nothing."""
    assert pair.twin.loop is not None
    assert twin.loop is not None
    return twin.replace(loop=twin.loop.model_dump() | {"residual_scale": pair.twin.loop.residual_scale})


def differences(target: Wanted, found: Found) -> tuple[str, ...]:
    """How the small pair differs from the full one, most telling first."""
    pair, small, setting = target.pair, found.baseline, target.setting
    full = pair.baseline
    active = Ledger(small, setting).active_non_embedding, Ledger(full, pair.setting).active_non_embedding
    notes = [
        f"scale: {small.num_hidden_layers} of {full.num_hidden_layers} layers, hidden {small.hidden_size} of "
        f"{full.hidden_size}, {active[0]:,} of {active[1]:,} active parameters",
        f"experts: top-{small.num_experts_per_tok} of {small.num_experts}, each {small.moe_intermediate_size} wide, "
        f"for top-{full.num_experts_per_tok} of {full.num_experts}, each {full.moe_intermediate_size} wide",
        f"counted at {setting.context} tokens, attention over {float(setting.attention_length):g} of them "
        f"({setting.convention.name}); documents packed into a row shorten it in both arms alike",
    ]
    heavier = Shape.of(small).share / target.shape.share
    if not 0.8 <= heavier <= 1.25:
        notes.append(f"attention : FFN work is {heavier:.2f} times the full baseline's")
    if gqa(small) != gqa(full):
        notes.append(f"query heads per KV head: {gqa(small):g}, not {gqa(full):g}")
    notes += [
        f"{name}: {getattr(small, name)}, for {getattr(full, name)} at {pair.setting.context} tokens"
        for name in ("sliding_window", "attention_chunk_size")
        if getattr(full, name) is not None
    ]
    if full.mlp_only_layers:
        notes.append(
            f"dense layers: {len(small.mlp_only_layers)} of {small.num_hidden_layers}, "
            f"for {len(full.mlp_only_layers)} of {full.num_hidden_layers}"
        )
    if (small.n_group, small.topk_group) != (full.n_group, full.topk_group):
        groups = f"{small.topk_group} of {small.n_group}" if small.n_group else "none"
        notes.append(f"expert groups: {groups}, for {full.topk_group} of {full.n_group}")
    if small.attention_multiplier != full.attention_multiplier:
        notes.append(f"attention_multiplier: {small.attention_multiplier:g}, as the head size is smaller")
    if small.rope_scaling != full.rope_scaling:
        notes.append(f"rope_scaling: as if first trained at {setting.context} tokens")
    return (*notes, *plan_differences(target, found))


def plan_differences(target: Wanted, found: Found) -> list[str]:
    """What of the request could not be kept."""
    pair, loop = target.pair, found.twin.loop
    full = pair.twin.loop
    assert loop is not None
    assert full is not None
    notes = []
    layers = found.twin.num_hidden_layers, pair.twin.num_hidden_layers
    share = (loop.stop - loop.start) / layers[0], (full.stop - full.start) / layers[1]
    if abs(share[0] - share[1]) > 0.02:
        notes.append(f"the core is {share[0]:.0%} of the layers, for {share[1]:.0%}")
    if (found.twin.core is None) != (pair.twin.core is None):
        notes.append(f"heads: {found.heads}, because no small twin of the full one's kind is within tolerance")
    if pair.request.keep:
        notes.append(f"not pinned here: {', '.join(pair.request.keep)}")
    return notes


def refusal(target: Wanted, size: str) -> Infeasible:
    """What was tried, and a size that works if one does."""
    pair = target.pair
    details = [
        f"tried: {target.layers} layers, about {target.active:,} active parameters, hidden sizes in steps of 8, "
        + "; ".join(f"heads in {head} and expert widths in {expert}" for _, head, expert in STEPS),
        f"wanted: S of both arms within {100 * POINT:g} point of the full pair's, FLOPs and parameters within "
        f"{TOLERANCE.flops:.0%}, KV cache within {TOLERANCE.kv_cache:.0%}, no width below 8, "
        f"{pair.request.plan.visits} visits",
    ]
    more = target.active * LARGER
    larger = {f"--size {size} --active-params {more}": target.at(more, target.layers)}
    if size == "tiny":
        deeper = wanted(pair, ACTIVE["small"], DEPTHS["small"], target.vocab_size, target.setting.context)
        larger["--size small"] = deeper
    details += [f"fix: {flags}" for flags, other in larger.items() if best(other) is not None]
    return Infeasible(f"no small pair stands for {pair.origin}", *details)
