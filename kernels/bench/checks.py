"""Are the results right on this device? The cases of tests/kernels in both tiers, stage by stage, against float64.

Every case runs three times and must give the same bits; its weight gradients are also made in float32, and added to
what is there. Then an expert that is all NaN and must keep it to itself, and what only a GPU can show: a CUDA graph of
both passes, replayed on other inputs and routings, and results of more than 2^31 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import oracle
import torch
from cases import PUBLIC, TILES
from oracle import Case
from problems import Inputs, inputs
from records import Missing, Unit
from shapes import ROUTINGS, Shape
from torch import Tensor

from smelt_budget.model import experts_cuda
from smelt_budget.model.experts import experts_definition

REPEATS = 3
TILE_ROWS = (64, 128)
WIDE = {
    "hidden 1056, width 128": Case(N=2048, K=8, E=64, H=1056, F=128, dead=0.05),
    "hidden 1056, width 256": Case(N=2048, K=8, E=32, H=1056, F=256),
    "hidden 1056, width 768": Case(N=1024, K=8, E=16, H=1056, F=768),
    "hidden 2048, width 768": Case(N=1024, K=8, E=16, H=2048, F=768),
}
"""The widths that are measured, with fewer tokens and experts: more than an emulator multiplies in a minute."""
SPOILT = Case(N=138, K=1, E=5, H=72, F=40, counts=(50, 13, 9, 1, 65))
"""Experts end in the middle of a tile, of a step along k and of 16 bytes."""
CAPTURED = Shape(192, 72, 40, 5, 2)
FAR_ROWS = Shape(140_000, 2048, 64, 16, 8)  # S H = 2.3e9
FAR_MATRICES = Shape(256, 2048, 2048, 600, 2)  # E F H = 2.5e9 (axolotl PR3865 has 3.8e9)
REHEARSED_FAR = Shape(80, 24, 16, 6, 2)
REHEARSED_CASES = ("3 tokens", "no tokens")
"""The tests run all of them on the emulator."""
PROBED = 32
"""Tokens at either end of x that are compared; beyond 2^31 elements float64 for all would not fit."""
NEEDS = [True, True, True, True, False, False]


def units(device: str, _: str) -> Iterator[Unit]:
    """Small cases first, both tiers side by side."""
    library = experts_cuda.library_of(torch.device(device))
    tiers = [80, 90] if library.capability() == experts_cuda.HOPPER else [80]
    for name, case in cases(device).items():
        for rows in (case.tile_rows,) if case.tile_rows else TILE_ROWS:
            for tier in tiers:
                yield f"{name}, tiles of {rows} rows, tier {tier}", functools.partial(staged, case, rows, tier, device)
    for tier in tiers:
        yield f"an expert of NaN, tier {tier}", functools.partial(contained, tier, device)
        yield f"CUDA graph, tier {tier}", functools.partial(captured, tier, device)
        for name, function, shape in (("S H", far_rows, FAR_ROWS), ("E F H", far_matrices, FAR_MATRICES)):
            given = shape if device == "cuda" else REHEARSED_FAR
            yield f"{name} beyond 2^31, tier {tier}", functools.partial(function, given, tier, device)


def cases(device: str) -> dict[str, Case]:
    """Those of the tests and wide ones, by name."""
    if device == "cuda":
        return {**TILES, **WIDE, **PUBLIC}
    return {name: case for name, case in {**TILES, **PUBLIC}.items() if name in REHEARSED_CASES}


def staged(case: Case, tile_rows: int, tier: int, device: str) -> dict[str, Any]:
    """Every stage and every gradient of a case; the emulator takes another schedule each time."""
    library, given = experts_cuda.library_of(torch.device(device)), made(case, device)
    runs = []
    for seed in range(REPEATS):
        if library.emulated:
            library.emulator_seed(seed)
        runs.append(oracle.run(library, given, tier, tile_rows))
    wrong = oracle.failures(given, runs[0], tile_rows)
    for name, first in vars(runs[0]).items():
        if not all(same(first, getattr(run, name)) for run in runs[1:]):
            wrong.append(f"{name} is not the same {REPEATS} times")
    for how in (1, 2):
        wrong += oracle.failures(given, oracle.run(library, given, tier, tile_rows, how), tile_rows, how)
    return verdict(wrong)


@functools.lru_cache(1)
def made(case: Case, device: str) -> oracle.Inputs:
    """Drawn by the CPU, which takes its time, and used for both tiers and both tiles."""
    return oracle.make(case, device=device)


def verdict(wrong: list[str]) -> dict[str, Any]:
    """Right if nothing is wrong."""
    return {"ok": not wrong, "what": "; ".join(wrong)}


def contained(tier: int, device: str) -> dict[str, Any]:
    """Only its own tokens and its own gradients are NaN (pytorch #193633, transformers PR45621)."""
    given, bad = oracle.make(SPOILT, device=device), 1
    tokens = given.idx[:, 0] == bad
    given.x[tokens] = given.grad[tokens] = oracle.NAN
    got = oracle.run(experts_cuda.library_of(torch.device(device)), given, tier)
    others = torch.arange(SPOILT.E, device=device) != bad
    seen = {name: getattr(got, name) for name in ("y", "dx", "dweight", "dw_gate_up", "dw_down")}
    return verdict(
        [
            f"{name} of others is not finite"
            for name, found in seen.items()
            if not found[others if name.startswith("dw_") else ~tokens].isfinite().all()
        ]
    )


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def both(given: Inputs, tier: int) -> tuple[Tensor, ...]:
    """y and the gradients of x, both matrices and weight, as the op calls the kernels."""
    *operands, grad = (tensor.detach() for tensor in given)
    y, pre = experts_cuda.forward(*operands, None, None, None, tier=tier)
    grads = experts_cuda.backward(grad, *operands, None, None, None, pre, NEEDS, tier=tier)
    return y, *grads[:4]


def captured(tier: int, device: str) -> dict[str, Any]:
    """A graph of both passes gives the bits of direct calls, on its own inputs and on others copied over them.

    Raises:
        Missing: no GPU.
    """
    if device != "cuda":
        raise Missing("needs a GPU")
    others = [inputs(CAPTURED, routing, seed, device) for seed, routing in enumerate(ROUTINGS)]
    direct = [both(each, tier) for each in others]
    static = Inputs(*(tensor.detach().clone() for tensor in others[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(static, tier)
    wrong = []
    for number, (other, wanted) in enumerate(zip(others, direct, strict=True)):
        for target, source in zip(static, other, strict=True):
            target.copy_(source.detach())
        graph.replay()
        torch.cuda.synchronize()
        if not all(map(same, results, wanted)):
            wrong.append(f"replay {number} differs from direct calls")
    return verdict(wrong)


def far_rows(shape: Shape, tier: int, device: str) -> dict[str, Any]:
    """More than 2^31 elements in [S, H]: tokens at both ends, and one expert's gradients.

    Raises:
        Missing: not enough memory.
    """
    room(device, 30)
    poison(device, 10)
    return compared(inputs(shape, "balanced", 0, device), tier)


def far_matrices(shape: Shape, tier: int, device: str) -> dict[str, Any]:
    """More than 2^31 elements in [E, H, F]: all tokens go to the last two experts, the others' gradients are zero.

    Raises:
        Missing: not enough memory.
    """
    room(device, 90)
    poison(device, 20)
    given = inputs(shape, "balanced", 0, device)
    idx = given.idx_NK % 2 + shape.E - 2
    idx[:, 1] = 2 * shape.E - 3 - idx[:, 0]
    return compared(given._replace(idx_NK=idx), tier)


def room(device: str, gigabytes: float) -> None:
    """Raises Missing: the GPU has less than this free."""
    if device == "cuda" and (free := torch.cuda.mem_get_info()[0] / 1e9) < gigabytes:
        raise Missing(f"needs {gigabytes} GB of memory; {free:.0f} are free")


def poison(device: str, gigabytes: int) -> None:
    """Fill memory that the allocator gives out next with NaN, so that what is not written shows."""
    if device == "cuda":
        torch.full((gigabytes * 10**9 // 2,), float("nan"), dtype=torch.bfloat16, device=device)


def compared(given: Inputs, tier: int) -> dict[str, Any]:
    """Probed tokens and the last routed expert against float64; experts without rows have gradients of zeros."""
    given = Inputs(*(tensor.detach() for tensor in given))
    y, dx, dw_gate_up, dw_down, dweight = both(given, tier)
    N, E = len(given.x_NH), len(given.w_down_EHF)
    probe = torch.arange(N, device=y.device)[[*range(PROBED), *range(N - PROBED, N)]] if N > 2 * PROBED else slice(None)
    used = given.idx_NK.unique()
    local = torch.searchsorted(used, given.idx_NK)
    few = [given.x_NH[probe], given.w_gate_up_E2FH[used], given.w_down_EHF[used], local[probe], given.weight_NK[probe]]
    wanted = exact(*few, given.grad_NH[probe])
    distances = [oracle.relative(found[probe], want) for found, want in zip((y, dx, dweight), wanted[:3], strict=True)]
    last = used[-1:]
    alone = torch.where(given.idx_NK == last, 0, -1)
    one = [given.x_NH, given.w_gate_up_E2FH[last], given.w_down_EHF[last], alone, given.weight_NK]
    _, _, _, *wanted = exact(*one, given.grad_NH)
    distances += [oracle.relative(found[last], want) for found, want in zip((dw_gate_up, dw_down), wanted, strict=True)]
    empty = torch.ones(E, dtype=torch.bool, device=y.device)
    empty[used] = False
    zeros = all(int(dw[e].count_nonzero()) == 0 for e in empty.nonzero()[:, 0].tolist() for dw in (dw_gate_up, dw_down))
    names = ("y", "dx", "dweight", "dw_gate_up", "dw_down")
    wrong = [
        f"{name} {distance:.1e}"
        for name, distance in zip(names, distances, strict=True)
        if distance > oracle.END_TO_END
    ]
    return verdict(wrong + ([] if zeros else ["an expert without rows has a gradient"]))


def exact(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, idx: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """y, dx, dweight, dw_gate_up and dw_down of the definition in float64."""
    x, w_gate_up, w_down, weight = (each.double().requires_grad_() for each in (x, w_gate_up, w_down, weight))
    y = experts_definition(x, w_gate_up, w_down, idx, weight)
    dx, dweight, dw_gate_up, dw_down = torch.autograd.grad(y, (x, weight, w_gate_up, w_down), grad.double())
    return y.detach(), dx, dweight, dw_gate_up, dw_down
