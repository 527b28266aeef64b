"""Does the expert op compute what its definition says, forward and backward? The definition runs in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from smelt_budget.model import experts_cpu, experts_grouped, experts_native
from smelt_budget.model.experts import experts, experts_definition

NAMES = ("x", "w_gate_up", "w_down", "idx", "weight", "b_gate_up", "b_down")
SHAPES = {  # N, H, F, E, K
    "few": (50, 8, 16, 6, 3),
    "more than 64 rows an expert": (300, 16, 8, 3, 2),
    "most experts empty": (5, 8, 8, 300, 2),
    "one expert": (7, 8, 8, 1, 1),
    "odd widths": (33, 7, 5, 4, 2),
    "no tokens": (0, 8, 16, 6, 3),
    "no choices": (4, 8, 16, 6, 0),
}
TOLERANCE = {  # relative norm; eps of the dtype, and for half precision what rounding h and dpre once costs
    torch.float64: 1e-13,
    torch.float32: 3e-6,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}


def make(N: int, H: int, F: int, E: int, K: int, bias: bool = False, stray: bool = True) -> list[Tensor | None]:
    """Inputs in float64; ids may repeat, and with `stray` some name no expert."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    idx = torch.randint(-2 if stray else 0, E + 3 if stray else E, (N, K), generator=generator)
    biases = [normal(E, 2 * F), normal(E, H)] if bias else [None, None]
    return [normal(N, H), normal(E, 2 * F, H) * H**-0.5, normal(E, H, F) * F**-0.5, idx, normal(N, K), *biases]


def cast(inputs: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in inputs]


def run(form, inputs: list[Tensor | None], limit: float | None, *more: str) -> dict[str, Tensor]:
    """The output and every gradient, by name, for one fixed gradient of the output."""
    inputs = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
    y = form(*inputs, limit, *more)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    wanted = {n: t for n, t in zip(NAMES, inputs, strict=True) if t is not None and t.requires_grad}
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))


def of(module):
    """An implementation by itself, as autograd would call it."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            y, pre = module.forward(*inputs)
            ctx.save_for_backward(*inputs[:-1], pre)
            ctx.limit = inputs[-1]
            return y

        @staticmethod
        def backward(ctx, grad):
            *inputs, pre = ctx.saved_tensors
            needs = [n for place, n in enumerate(ctx.needs_input_grad) if place not in (3, 7)]
            grads = module.backward(grad, *inputs, ctx.limit, pre, needs)
            dx, dup, ddown, dweight, db_up, db_down = (g if n else None for g, n in zip(grads, needs, strict=True))
            return dx, dup, ddown, None, dweight, db_up, db_down, None

    return Function.apply


def distance(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm().clamp(min=1e-300))


def assert_same(got: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == right.keys()
    far = {name: distance(got[name], right[name]) for name in right if not distance(got[name], right[name]) < tolerance}
    assert not far


@pytest.mark.parametrize("limit", [None, 7.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_op_equals_its_definition_in_every_gradient(shape, dtype, bias, limit):
    """Exact up to rounding; the definition gets the same rounded inputs, in float64."""
    inputs = cast(make(*shape, bias=bias), dtype)
    right = run(experts_definition, cast(inputs, torch.float64), limit)
    got = run(experts, inputs, limit, "torch")
    if limit == 0.7 and dtype.itemsize == 2:  # a rounded pre-activation may fall on the other side of the clamp
        got, right = ({n: r[n] for n in ("y", "weight", "w_down")} for r in (got, right))
    assert_same(got, right, TOLERANCE[dtype])
    assert all(got[name].dtype == dtype for name in got)


@pytest.mark.parametrize("E", [255, 256, 65_535, 65_536])
def test_ids_are_sorted_right_where_their_bytes_run_out(E):
    """Expert e's output is e + 1 by construction (silu(20) rounds to 20 in float32): exact."""
    one_E11 = torch.ones(E, 1, 1)
    x, w_gate_up = torch.full((6, 1), 20.0), one_E11.repeat(1, 2, 1)
    w_down = torch.arange(1.0, E + 1).view(E, 1, 1) / 16
    idx = torch.tensor([[0], [E - 1], [E // 2], [E], [-1], [255 % E]])
    y = experts(x, w_gate_up, w_down, idx, torch.ones(6, 1), asked="torch")
    assert (y / 25).flatten().tolist() == [1, E, E // 2 + 1, 0, 0, 255 % E + 1]


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES.values() if s[1] % 8 == 0 and s[0] and s[4]], ids=str)
def test_the_grouped_implementation_equals_the_definition(shape, dtype, bias, limit):
    """The one for CUDA, on the CPU, whose grouped_mm too leaves rows past the last offset unwritten."""
    inputs = cast(make(*shape, bias=bias), dtype)
    right = run(experts_definition, cast(inputs, torch.float64), limit)
    assert_same(run(of(experts_grouped), inputs, limit), right, TOLERANCE[dtype])


@pytest.mark.parametrize("module", [experts_cpu, experts_grouped, experts_native], ids=["cpu", "grouped", "native"])
def test_implementations_save_the_same_pre_activations(module):
    """Rows sorted by expert, stably: x of the sorted choices times their matrix; zero where no expert is named."""
    x, w_gate_up, w_down, idx, weight, *_ = cast(make(*SHAPES["few"]), torch.float32)
    flat = torch.where((idx < 0) | (idx >= len(w_down)), len(w_down), idx).flatten()
    order = flat.argsort(stable=True)
    routed = int((flat < len(w_down)).sum())
    _, pre = module.forward(x, w_gate_up, w_down, idx, weight, None, None, None)
    right = torch.einsum("sfh,sh->sf", w_gate_up[flat[order[:routed]]], x[order[:routed] // idx.shape[1]])
    torch.testing.assert_close(pre[:routed], right)
    assert pre.shape == (idx.numel(), w_gate_up.shape[1])
    assert not pre[routed:].any()


@pytest.mark.parametrize("limit", [None, 0.9])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_the_slopes_of_the_output(bias, limit):
    """torch.autograd.gradcheck, float64: finite differences know nothing of the backward formula."""
    inputs = make(5, 4, 3, 4, 2, bias=bias)
    tensors = [t for t in inputs if t is not None and t.is_floating_point()]

    def function(*floating: Tensor) -> Tensor:
        given = iter(floating)
        full = [next(given) if t is not None and t.is_floating_point() else t for t in inputs]
        return experts(*full, limit)

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_one_expert_sees_reaches_no_other(dtype):
    """Every token of expert 0 is NaN: the others' rows and gradients are finite (no spare row, no stray read)."""
    x, w_gate_up, w_down, _, weight, *_ = cast(make(200, 8, 8, 4, 1), dtype)
    idx = torch.arange(200)[:, None] % 5  # 4 names no expert
    x[(idx == 0)[:, 0]] = torch.nan
    x[(idx == 4)[:, 0]] = torch.inf
    got = run(experts, [x, w_gate_up, w_down, idx, weight, None, None], None)
    fine = (idx > 0)[:, 0]
    assert got["y"][fine].isfinite().all()
    assert not got["y"][(idx == 4)[:, 0]].any()
    assert got["x"][fine].isfinite().all()
    assert got["weight"][fine].isfinite().all()
    assert got["w_gate_up"][1:].isfinite().all()
    assert got["w_down"][1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_does_not_matter(dtype):
    """Transposed and strided inputs give what contiguous ones give; BLAS may round otherwise."""
    inputs = cast(make(*SHAPES["few"], bias=True), dtype)
    strided = [None if t is None else t.mT.contiguous().mT for t in inputs]
    wide = [None if t is None else torch.stack([t, t], -1)[..., 0] for t in inputs]
    right = {name: t.double() for name, t in run(experts, inputs, None).items()}
    assert_same(run(experts, strided, None), right, TOLERANCE[dtype])
    assert_same(run(experts, wide, None), right, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_bitwise_equal(dtype):
    """No atomics, no order of arrival."""
    inputs = cast(make(500, 32, 24, 9, 4, bias=True), dtype)
    first, second = run(experts, inputs, None), run(experts, inputs, None)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def threads():
    """A function that sets torch's number of threads; what was set before comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [2, 3, 7])
def test_many_threads_equal_the_definition_and_give_the_same_bits_each_time(number, dtype, threads):
    threads(number)
    inputs = cast(make(3000, 32, 24, 40, 4, bias=True), dtype)
    first, second = run(experts, inputs, None), run(experts, inputs, None)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_same(first, run(experts_definition, cast(inputs, torch.float64), None), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("idx", ["even", "one", "nearly one", "two far apart"])
def test_chunks_of_any_size_equal_the_definition(idx, dtype, monkeypatch):
    """Many chunks, an expert too large for one, experts without rows between them: none is lost or computed twice."""
    monkeypatch.setattr(experts_cpu, "CHUNK", 2**12)
    inputs = make(600, 16, 8, 50, 2, bias=True, stray=False)
    rows = torch.arange(600)
    inputs[3] = {
        "even": inputs[3],
        "one": torch.full((600, 2), 17),
        "nearly one": torch.stack([torch.full((600,), 3), torch.where(rows % 20 == 0, rows % 50, 3)], 1),
        "two far apart": torch.stack([torch.full((600,), 0), torch.full((600,), 49)], 1),
    }[idx]
    inputs = cast(inputs, dtype)
    right = run(experts_definition, cast(inputs, torch.float64), None)
    assert_same(run(experts, inputs, None, "torch"), right, TOLERANCE[dtype])


@pytest.mark.parametrize("needed", ["x", "w_gate_up", "w_down", "weight", "b_gate_up", "b_down"])
def test_a_gradient_asked_for_alone_is_the_same(needed):
    """Work that is not needed is skipped; what is left does not change, bit by bit."""
    inputs = cast(make(*SHAPES["few"], bias=True), torch.float32)
    everything = run(experts, inputs, None)
    tensor = inputs[NAMES.index(needed)].detach().requires_grad_()
    y = experts(*[tensor if name == needed else t for name, t in zip(NAMES, inputs, strict=True)])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.autograd.grad(y, tensor, grad)[0], everything[needed])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["few", "no tokens", "most experts empty"])
def test_torch_finds_nothing_wrong_with_the_registration(shape, dtype, bias):
    """torch.library.opcheck: schema, fake tensors, autograd, AOT dispatch."""
    inputs = cast(make(*SHAPES[shape], bias=bias), dtype)
    y, pre = torch.ops.smelt.experts(*inputs, None)
    for needs in ([True] * 4 + [bias] * 2, [True, False, False, True, False, False]):
        torch.library.opcheck(torch.ops.smelt.experts_backward.default, (torch.ones_like(y), *inputs, None, pre, needs))
    inputs = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
    torch.library.opcheck(torch.ops.smelt.experts.default, (*inputs, None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing inductor
def test_it_compiles_without_a_graph_break():
    """fullgraph forward and backward equal eager; elementwise neighbours may be fused, so up to rounding."""
    inputs = cast(make(*SHAPES["few"]), torch.float32)

    def function(x: Tensor, *others: Tensor | float | None) -> Tensor:
        return experts(x * 2, *others) + x

    right = {name: t.double() for name, t in run(function, inputs, None).items()}
    assert_same(run(torch.compile(function, fullgraph=True), inputs, None), right, TOLERANCE[torch.float32])


def test_the_flop_formula_equals_the_matrix_products_of_the_definition():
    """FlopCounterMode knows mm; the definition is nothing else. Exact, forward and both ways, op on the meta device."""
    inputs = cast(make(40, 8, 16, 6, 3, stray=False), torch.float32)
    for backward in (False, True):
        counted = []
        for form, device in ((experts_definition, "cpu"), (experts, "meta"), (experts, "cpu")):
            moved = [t if t is None else t.detach().to(device) for t in inputs]
            moved = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in moved]
            with FlopCounterMode(display=False) as counter:
                y = form(*moved)
                if backward:
                    y.sum().backward()
            counted.append(counter.get_total_flops())
        assert counted == [2 * 40 * 3 * 3 * 8 * 16 * (3 if backward else 1)] * 3


def test_autocast_casts_rows_and_matrices_and_leaves_gradients_in_float32():
    """As if cast by hand; backward inside the region, where torch would cast a plain mm, changes nothing."""
    inputs = cast(make(*SHAPES["few"], bias=True), torch.float32)
    right = run(experts, [*cast(inputs[:3], torch.bfloat16), *inputs[3:5], *cast(inputs[5:], torch.bfloat16)], None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(experts, inputs, None)
    assert got["y"].dtype == torch.bfloat16
    assert all(got[name].dtype == torch.float32 for name in got if name != "y")
    assert all(torch.equal(got[name], right[name].to(got[name].dtype)) for name in right)


def test_a_second_derivative_is_refused_by_name():
    """The op has a first derivative only; the definition has all of them."""
    x, *others = cast(make(*SHAPES["few"]), torch.float32)
    (slope,) = torch.autograd.grad(experts(x.requires_grad_(), *others).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="experts_definition"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (1, torch.zeros(6, 30, 8), r"w_gate_up is \[6, 30, 8\]; with w_down \[6, 8, 16\] it is \[6, 32, 8\]"),
        (4, torch.zeros(50, 2), r"weight is \[50, 2\]"),
        (0, torch.zeros(50, 8, dtype=torch.bfloat16), r"x is torch.bfloat16 and w_down torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(place, wrong, message):
    """Shapes and dtypes are compared before anything runs."""
    inputs = cast(make(*SHAPES["few"]), torch.float32)
    inputs[place] = wrong
    with pytest.raises(ValueError, match=message):
        experts(*inputs)
