"""What should the kernels have computed? Every stage in float64 from what it was given, and inputs that find out.

N tokens, K choices each, S = N K slots sorted by expert, E experts, H hidden, F expert width.

Inputs are of unit scale: errors in 16 columns have hidden behind an absolute tolerance (sonic-moe #63). They lie in a
field of NaN, outputs are poisoned, and the rows that no choice owns turn NaN between the stages: a read that a product
with zero would mask shows.

It needs torch only, on any device: the script for a GPU runs the same cases.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STAGE, END_TO_END = 3e-3, 8e-3
"""Relative norms. Rounding to bf16 once makes 1.65e-3."""
ELEMENT = {torch.bfloat16: 2**-8, torch.float32: 1e-4}
"""Of each element of a stage, relative to itself plus the root mean square: two roundings; sums in another order."""

NAN, POISON = float("nan"), -77777
ROWS, COLUMNS, ELEMENTS = 64, 16, 512
"""Of the field: rows above and below, columns beside; and elements before and after what is dense."""
ADDED_TO = 0.5
"""What weight gradients hold before they are added to."""
NO_EXPERT = (-1, -(2**63), 2**63 - 1, 2**32, 2**32 + 1, 1 - 2**32)
"""Ids outside [0, E), the last three inside it when cut to 32 bits (flashinfer #3170, vLLM PR50845)."""


@dataclass(frozen=True)
class Case:
    """A shape and a routing."""

    N: int
    K: int
    E: int
    H: int
    F: int
    counts: tuple[int, ...] | None = None
    """Slots of each expert, where K = 1."""
    chosen: int | None = None
    """All tokens choose among this many experts, spread over [0, E)."""
    dead: float = 0.0
    """Share of the choices that name no expert."""
    tile_rows: int = 0
    """0: as the table says."""
    source: str = ""
    """Whose failure it was."""


@dataclass(frozen=True)
class Inputs:
    """Of forward and backward; rows of x and grad are longer than H."""

    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    idx: Tensor
    weight: Tensor
    grad: Tensor


@dataclass
class Stages:
    """What each stage returned, by the names of `kernels/include/abi.h`; `dx_slots` is of slots, `dx` of tokens."""

    offs: Tensor
    tile0: Tensor
    choice: Tensor
    slot: Tensor
    pre: Tensor
    h: Tensor
    out: Tensor
    y: Tensor
    dpre: Tensor
    hw: Tensor
    partial: Tensor
    dweight: Tensor
    dx_slots: Tensor
    dx: Tensor
    dw_gate_up: Tensor
    dw_down: Tensor


def make(case: Case, seed: int = 0, device: str = "cpu") -> Inputs:
    """Inputs of unit scale in a field of NaN."""
    g = torch.Generator().manual_seed(seed)
    N, K, E, H, F = case.N, case.K, case.E, case.H, case.F

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).bfloat16().to(device)

    return Inputs(
        x=in_field(normal(N, H)),
        w_gate_up=in_margin(normal(E, 2 * F, H, scale=1 / math.sqrt(H))),
        w_down=in_margin(normal(E, H, F, scale=1 / math.sqrt(F))),
        idx=in_margin(routing(case, g).to(device)),
        weight=in_margin((torch.rand(N, K, generator=g) + 0.5).to(device)),
        grad=in_field(normal(N, H)),
    )


def routing(case: Case, g: torch.Generator) -> Tensor:
    """Ids [N, K], those that name experts distinct in each row."""
    N, K, E = case.N, case.K, case.E
    if case.counts is not None:
        return torch.repeat_interleave(torch.tensor(case.counts))[torch.randperm(N, generator=g)].view(N, 1)
    experts = torch.linspace(0, E - 1, case.chosen or E).round().long()
    idx = experts[torch.rand(N, len(experts), generator=g).topk(K, -1).indices]
    none = torch.tensor([*NO_EXPERT, E, E + 1])[torch.randint(len(NO_EXPERT) + 2, (N, K), generator=g)]
    return torch.where(torch.rand(N, K, generator=g) < case.dead, none, idx)


def in_field(rows: Tensor) -> Tensor:
    """The same rows, with NaN above, below and beside."""
    big = rows.new_full((len(rows) + 2 * ROWS, rows.shape[1] + COLUMNS), NAN)
    view = big[ROWS : ROWS + len(rows), : rows.shape[1]]
    return view.copy_(rows)


def in_margin(dense: Tensor) -> Tensor:
    """The same dense tensor, with NaN, or ids that name no expert, before and after."""
    big = dense.new_full((dense.numel() + 2 * ELEMENTS,), NAN if dense.is_floating_point() else POISON)
    return big[ELEMENTS : ELEMENTS + dense.numel()].view(dense.shape).copy_(dense)


class Outputs:
    """Poisoned tensors in a frame of numbers."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self.frames: list[Tensor] = []

    def new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Full of NaN, or of a number that no kernel returns."""
        size = math.prod(shape)
        big = torch.full((size + 2 * ELEMENTS,), POISON, dtype=dtype, device=self.device)
        self.frames += [big[:ELEMENTS], big[ELEMENTS + size :]]
        inside = big[ELEMENTS : ELEMENTS + size].view(shape)
        return inside.fill_(NAN) if dtype.is_floating_point else inside

    def intact(self) -> bool:
        """Nothing was written around any of them."""
        return all(bool((frame == torch.full_like(frame, POISON)).all()) for frame in self.frames)


def planned(
    library: Any, idx: Tensor, E: int, tile_rows: int, outputs: Outputs, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """offs, tile0, choice and slot of the kernel."""
    N, K = idx.shape
    offs, tile0, choice, slot, workspace = (
        outputs.new(*shape, dtype=torch.int32)
        for shape in ((E + 1,), (E + 1,), (N * K,), (N, K), (library.plan_workspace(N * K, E) // 4,))
    )
    library.plan(idx, N, K, E, tile_rows, offs, tile0, choice, slot, workspace, stream)
    return offs, tile0, choice, slot


def run(library: Any, inputs: Inputs, tier: int = 80, tile_rows: int = 0, how: int = 0, stream: int = 0) -> Stages:
    """All stages, forward and backward. `how` is that of the weight gradients: bf16, float32, or added to float32."""
    x, grad, weight = inputs.x, inputs.grad, inputs.weight
    (N, K), (E, H, F) = inputs.idx.shape, inputs.w_down.shape
    S = N * K
    sizes, gathered = (S, E, H, F), (S, K, E, H, F)
    outputs = Outputs(x.device)
    tail = (tier, tile_rows or library.tile_rows(tier, *sizes), stream)
    offs, tile0, choice, slot = place = planned(library, inputs.idx, E, tail[1], outputs, stream)

    pre, h, out, y = (outputs.new(*shape) for shape in ((S, 2 * F), (S, F), (S, H), (N, H)))
    library.up(x, x.stride(0), inputs.w_gate_up, pre, h, choice, offs, tile0, *gathered, *tail)
    library.down(spoilt(h, offs), inputs.w_down, out, offs, tile0, *sizes, *tail)
    library.combine(spoilt(out, offs), slot, weight, y, N, K, H, stream)

    parts = library.partials(tier, *sizes)
    dpre, hw, dx_slots, dx = (outputs.new(*shape) for shape in ((S, 2 * F), (S, F), (S, H), (N, H)))
    partial, dweight = (outputs.new(*shape, dtype=torch.float32) for shape in ((parts, S), (N, K)))
    given = (grad, grad.stride(0), inputs.w_down, spoilt(pre, offs), weight)
    library.dact(*given, dpre, hw, partial, choice, offs, tile0, *gathered, *tail)
    library.dweight(in_margin(spoilt(partial.T, offs).T), parts, slot, dweight, S, stream)
    library.dx(spoilt(dpre, offs), inputs.w_gate_up, dx_slots, offs, tile0, *sizes, *tail)
    library.combine(spoilt(dx_slots, offs), slot, None, dx, N, K, H, stream)

    dtype = torch.float32 if how else torch.bfloat16
    dw_gate_up, dw_down = (outputs.new(*w.shape, dtype=dtype) for w in (inputs.w_gate_up, inputs.w_down))
    if how == 2:
        dw_gate_up.fill_(ADDED_TO), dw_down.fill_(ADDED_TO)
    slots, tokens = (spoilt(dpre, offs), 2 * F, None), (x, x.stride(0), choice)
    library.wgrad(*slots, *tokens, K, dw_gate_up, how, offs, S, E, 2 * F, H, tier, stream)
    tokens, slots = (grad, grad.stride(0), choice), (spoilt(hw, offs), F, None)
    library.wgrad(*tokens, *slots, K, dw_down, how, offs, S, E, H, F, tier, stream)
    assert outputs.intact(), "something was written outside an output"
    return Stages(*place, pre, h, out, y, dpre, hw, partial, dweight, dx_slots, dx, dw_gate_up, dw_down)


def spoilt(rows: Tensor, offs: Tensor) -> Tensor:
    """A copy, in a margin of NaN, whose spare rows are NaN too: no later stage may look at them."""
    copy = in_margin(rows)
    copy[int(offs[-1]) :] = NAN
    return copy


def expected_plan(idx: Tensor, E: int, tile_rows: int) -> dict[str, Tensor]:
    """A stable sort by expert, without those that name none."""
    ids = idx.reshape(-1)
    routed = (ids >= 0) & (ids < E)
    counts = torch.bincount(ids[routed], minlength=E)
    order = torch.where(routed, ids, E).argsort(stable=True)
    number = int(routed.sum())
    slot = torch.full_like(ids, -1)
    slot[order[:number]] = torch.arange(number, device=ids.device)
    starts = counts.new_zeros(1)
    return {
        "offs": torch.cat([starts, counts.cumsum(0)]),
        "tile0": torch.cat([starts, ((counts + tile_rows - 1) // tile_rows).cumsum(0)]),
        "choice": torch.where(torch.arange(len(ids), device=ids.device) < number, order, -1),
        "slot": slot.view(idx.shape),
    }


def expected_stages(inputs: Inputs, got: Stages, how: int = 0) -> dict[str, Tensor]:
    """Each stage's result in float64 from the rounded results of those before it; zero where no choice is."""
    E, K = len(inputs.w_down), inputs.idx.shape[1]
    want = {name: torch.zeros_like(result, dtype=torch.float64) for name, result in vars(got).items()}
    want = {name: zeros for name, zeros in want.items() if name not in ("offs", "tile0", "choice", "slot")}
    want["partial"] = want["partial"].sum(0)
    for name in ("dw_gate_up", "dw_down"):
        want[name] += ADDED_TO if how == 2 else 0
    weight = inputs.weight.double().reshape(-1)
    for e in range(E):
        s = slice(int(got.offs[e]), int(got.offs[e + 1]))
        if s.start == s.stop:
            continue
        choice = got.choice[s].long()
        x, grad = inputs.x[choice // K].double(), inputs.grad[choice // K].double()
        w_gate_up, w_down, w = inputs.w_gate_up[e].double(), inputs.w_down[e].double(), weight[choice, None]
        want["pre"][s] = x @ w_gate_up.T
        gate, up = got.pre[s].double().chunk(2, -1)
        sigma = gate.sigmoid()
        h = want["h"][s] = gate * sigma * up
        want["out"][s] = got.h[s].double() @ w_down.T
        dh = grad @ w_down
        want["dpre"][s] = w * torch.cat([dh * up * (sigma + gate * sigma * (1 - sigma)), dh * gate * sigma], -1)
        want["hw"][s] = w * h
        want["partial"][s] = (dh * h).sum(-1)
        dpre = got.dpre[s].double()
        want["dx_slots"][s] = dpre @ w_gate_up
        want["dw_gate_up"][e] += dpre.T @ x
        want["dw_down"][e] += grad.T @ got.hw[s].double()
    want["y"] = (by_choice(got.out, got.slot) * inputs.weight.double()[..., None]).sum(1)
    want["dx"] = by_choice(got.dx_slots, got.slot).sum(1)
    want["dweight"] = by_choice(got.partial.sum(0), got.slot)
    return want


def by_choice(rows: Tensor, slot: Tensor) -> Tensor:
    """Each choice's row; zero where it has none."""
    return torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows])[slot.long() + 1].double()


def expected(inputs: Inputs) -> dict[str, Tensor]:
    """y, dx, dw_gate_up, dw_down and dweight in float64 with nothing rounded on the way."""
    names = {"x": "dx", "w_gate_up": "dw_gate_up", "w_down": "dw_down", "weight": "dweight"}
    leaves = {name: getattr(inputs, name).double().requires_grad_() for name in names}
    y = torch.zeros_like(leaves["x"])
    for e, (w_gate_up, w_down) in enumerate(zip(leaves["w_gate_up"].unbind(), leaves["w_down"].unbind(), strict=True)):
        token, k = (inputs.idx == e).nonzero(as_tuple=True)
        gate, up = (leaves["x"][token] @ w_gate_up.T).chunk(2, -1)
        out = (gate.sigmoid() * gate * up) @ w_down.T
        y = y.index_add(0, token, out * leaves["weight"][token, k, None])
    gradients = torch.autograd.grad(y, list(leaves.values()), inputs.grad.double())
    return {"y": y.detach()} | dict(zip(names.values(), gradients, strict=True))


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the distance; infinite for a NaN, or for anything where there should be zeros."""
    distance, size = float((got.double() - want).norm()), float(want.norm())
    if math.isnan(distance):
        return math.inf
    return distance / size if size else math.inf if distance else 0.0


def worst(got: Tensor, want: Tensor) -> float:
    """Of any element, relative to itself plus the root mean square."""
    if not want.numel():
        return 0.0
    scale = want.abs() + want.square().mean().sqrt()
    ratio = ((got.double() - want).abs() / scale.clamp(min=1e-300)).nan_to_num(nan=math.inf)
    return float(ratio.max())


def failures(inputs: Inputs, got: Stages, tile_rows: int, how: int = 0) -> list[str]:
    """What is wrong, in words; empty if all is right."""
    found = []
    for name, want in expected_plan(inputs.idx, len(inputs.w_down), tile_rows).items():
        if not torch.equal(getattr(got, name).long(), want):
            found.append(f"plan: {name} is not that of a stable sort")
    for name, want in expected_stages(inputs, got, how).items():
        result = got.partial.sum(0) if name == "partial" else getattr(got, name)
        norm, element = relative(result, want), worst(result, want)
        if norm > STAGE or element > ELEMENT[result.dtype]:
            found.append(f"{name}: relative norm {norm:.1e}, worst element {element:.1e}")
    start = expected(inputs)
    for name, want in start.items():
        norm = relative(getattr(got, name).double() - (ADDED_TO if how == 2 and name.startswith("dw_") else 0), want)
        if norm > END_TO_END:
            found.append(f"{name} from end to end: relative norm {norm:.1e}")
    return found


def counts(library: Any) -> dict[str, int]:
    """Of the emulator since the last call."""
    numbers = (ctypes.c_int64 * 7)()
    library.emulator_counts(numbers, 7)
    names = ("blocks", "mma", "phases", "conflicts", "most", "copied", "wgmma")
    return dict(zip(names, numbers, strict=True))


def bytes_copied(library: Any, inputs: Inputs, got: Stages, tier: int = 80) -> int:
    """What `run` copies to shared memory: a row for every tile of columns, a weight for every tile of rows, no more."""
    (N, K), (E, H, F) = inputs.idx.shape, inputs.w_down.shape
    routed, row_tiles = int(got.offs[-1]), int(got.tile0[-1])

    def tiles(stage: int, width: int) -> int:
        return -(-width // library.tile_columns(tier, stage, N * K, E, width, width if stage else width // 2))

    elements = 0
    for stage, k, columns in ((0, H, 2 * F), (1, F, H), (2, H, F), (3, 2 * F, H)):  # up, down, dact, dx
        elements += routed * k * tiles(stage, columns) + row_tiles * k * columns
    for rows, columns in ((2 * F, H), (H, F)):  # both weight gradients
        elements += routed * (rows * tiles(4, columns) + columns * tiles(4, rows))
    return 2 * elements
