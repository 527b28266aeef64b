"""Is the op the same function when the kernels compute it? On a CPU, through the emulated library, in both tiers.

The oracle is the op's definition in float64 on the same rounded inputs. Tolerance: relative norm 8e-3 end to end
(shared by all kernels; rounding to bf16 once costs 1.7e-3).
"""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from smelt_budget.errors import BadInput
from smelt_budget.model import experts_choice, experts_cuda
from smelt_budget.model.experts import experts, experts_definition

END_TO_END = 8e-3
NAMES = ("x", "w_gate_up", "w_down", "idx", "weight")
SHAPES = {  # N, H, F, E, K
    "few": (50, 24, 16, 6, 3),
    "more than 64 rows an expert": (150, 16, 8, 2, 1),
    "most experts empty": (5, 8, 8, 300, 2),
    "one expert": (7, 8, 8, 1, 1),
    "1056 = 16.5 x 64": (9, 1056, 40, 4, 2),
    "no tokens": (0, 8, 16, 6, 3),
    "no choices": (4, 8, 16, 6, 0),
}
SMALL = SHAPES["few"]


@pytest.fixture(autouse=True)
def kernels(library, monkeypatch):
    """The kernels compute, whatever the rest of the suite was told."""
    monkeypatch.setenv("SMELT_EXPERTS", "emulated")
    caches = (experts_choice.decided, experts_cuda.capability_of)
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(params=[80, 90], ids=["mma.sync", "wgmma"])
def tier(request, monkeypatch):
    """The capability of the emulated GPU, and with it the tier."""
    monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", str(request.param))
    return request.param


def make(N: int, H: int, F: int, E: int, K: int, matrices=torch.bfloat16) -> list[Tensor]:
    """x, w_gate_up, w_down, idx, weight; ids are unsorted, may repeat, and some name no expert."""
    draw = torch.Generator().manual_seed(0)
    idx = torch.randint(-2, E + 3, (N, K), generator=draw)
    tensors = [torch.randn(shape, generator=draw) for shape in ((N, H), (E, 2 * F, H), (E, H, F), (N, K))]
    x, w_gate_up, w_down, weight = tensors
    return [x.bfloat16(), (w_gate_up * H**-0.5).to(matrices), (w_down * F**-0.5).to(matrices), idx, weight]


def floating(inputs) -> dict[str, Tensor]:
    return {name: t for name, t in zip(NAMES, inputs, strict=True) if t.is_floating_point()}


def run(form, inputs) -> dict[str, Tensor]:
    """The output and every gradient, by name, for one fixed gradient of the output."""
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y = form(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    wanted = floating(inputs)
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))


def definition(inputs) -> dict[str, Tensor]:
    """In float64, from what the kernels multiply: matrices rounded to bf16."""
    rounded = [*(t.bfloat16() for t in inputs[:3]), *inputs[3:]]
    return run(experts_definition, [t.double() if t.is_floating_point() else t for t in rounded])


def far(got, right, tolerance=END_TO_END) -> dict[str, float]:
    """What is further from the oracle than the tolerance, by relative norm; what is not finite is far from all."""
    assert got.keys() == right.keys()
    distance = {n: float((got[n].double() - right[n]).norm() / right[n].norm().clamp(min=1e-300)) for n in right}
    return {name: d for name, d in distance.items() if not d <= tolerance}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_op_equals_its_definition_in_every_gradient(shape, tier):
    """With unsorted, repeated and stray ids, in float64 to 8e-3."""
    inputs = make(*shape)
    got = run(experts, inputs)
    assert not far(got, definition(inputs))
    assert [got[name].dtype for name in ("y", "x", "w_gate_up", "w_down", "weight")] == [torch.bfloat16] * 4 + [
        torch.float32
    ]


@pytest.mark.parametrize("idx", [torch.full((50, 3), -1), torch.full((50, 3), 6), torch.tensor([[2**40, -(2**40), 7]])])
def test_tokens_without_an_expert_come_out_as_zeros(idx, tier):
    """No id names one: output and every gradient are exactly zero."""
    inputs = make(*SMALL)
    inputs[3] = idx.expand(50, 3)
    assert all(not tensor.any() for tensor in run(experts, inputs).values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_dtype_are_taken(dtype):
    """And those with strides: bit by bit what int64 gives."""
    inputs = make(*SMALL)
    inputs[3] = inputs[3].clamp(min=0)
    right = run(experts, inputs)
    inputs[3] = inputs[3].to(dtype).t().contiguous().t()
    got = run(experts, inputs)
    assert all(torch.equal(got[name], right[name]) for name in right)


def test_layout_does_not_matter(tier):
    """Rows further apart than they are long are read where they are, transposed or unaligned ones are copied."""
    inputs = make(*SMALL)
    right = run(experts, inputs)

    def wide(t):
        return torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]] if t.is_floating_point() else t

    def unaligned(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    for other in (wide, lambda t: t.mT.contiguous().mT, unaligned):
        got = run(experts, [other(t) for t in inputs])
        assert all(torch.equal(got[name], right[name]) for name in right)


@pytest.mark.parametrize("shape", ["expanded", "wide", "transposed"])
def test_a_gradient_of_any_layout_is_taken(shape):
    """A sum's gradient is one number with strides of zero; a slice's rows are far apart."""
    inputs = make(*SMALL)
    y, pre = torch.ops.smelt.experts(*inputs, None, None, None)
    grad = {
        "expanded": torch.ones(()).bfloat16().expand(y.shape),
        "wide": torch.randn(50, 48).bfloat16()[:, :24],
        "transposed": torch.randn(24, 50).bfloat16().t(),
    }[shape]
    both = [
        torch.ops.smelt.experts_backward(g, *inputs, None, None, None, pre, [True] * 4 + [False] * 2)
        for g in (grad, grad.contiguous())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("needed", NAMES[:3] + NAMES[4:])
def test_a_gradient_asked_for_alone_is_the_same(needed, tier):
    """Work that is not needed is skipped, what is left does not change: bit by bit."""
    inputs = make(*SMALL)
    everything = run(experts, inputs)
    tensors = [t.detach().requires_grad_(name == needed) for name, t in zip(NAMES, inputs, strict=True)]
    y = experts(*tensors)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(torch.autograd.grad(y, tensors[NAMES.index(needed)], grad)[0], everything[needed])


@pytest.mark.parametrize("needs", [[True] * 4, [True, False, False, True], [False, True, True, False], [False] * 4])
def test_what_is_not_needed_has_no_elements(needs):
    """As the fake says, which opcheck compares."""
    inputs = make(*SMALL)
    y, pre = torch.ops.smelt.experts(*inputs, None, None, None)
    arguments = (torch.ones_like(y), *inputs, None, None, None, pre, [*needs, False, False])
    torch.library.opcheck(torch.ops.smelt.experts_backward.default, arguments)
    grads = torch.ops.smelt.experts_backward(*arguments)
    assert [g.numel() > 0 for g in grads] == [*needs, False, False]


@pytest.mark.parametrize("matrices", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["few", "no tokens"])
def test_torch_finds_nothing_wrong_with_the_registration(shape, matrices):
    """torch.library.opcheck: schema, fake tensors, autograd, AOT dispatch; also with matrices in float32."""
    inputs = make(*SHAPES[shape], matrices=matrices)
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    torch.library.opcheck(torch.ops.smelt.experts.default, (*inputs, None, None, None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing inductor
def test_it_compiles_without_a_graph_break():
    """fullgraph, forward and backward: bit by bit what eager gives."""
    inputs = make(*SMALL)
    right, got = run(experts, inputs), run(torch.compile(experts, fullgraph=True), inputs)
    assert all(torch.equal(got[name], right[name]) for name in right)


def test_under_autocast_gradients_of_float32_matrices_are_not_rounded(tier):
    """float32 master weights: their gradients have float32 accuracy, given pre and dpre in bf16; rows are cast."""
    x, *others = make(*SHAPES["more than 64 rows an expert"], matrices=torch.float32)
    inputs = [x.float(), *others]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(experts, inputs)
    assert got["y"].dtype == torch.bfloat16
    assert {got[name].dtype for name in ("x", "w_gate_up", "w_down", "weight")} == {torch.float32}
    assert not far(got, definition(inputs))
    for name in ("w_gate_up", "w_down"):
        assert not torch.equal(got[name], got[name].bfloat16().float())
        rounded = run(experts, [*(t.bfloat16() for t in inputs[:3]), *inputs[3:]])[name]
        assert torch.equal(got[name].bfloat16(), rounded)


def test_gradients_are_added_to_float32_buffers(tier):
    """Two backward passes into the same buffers: twice the gradient, exact but for one rounding of float32."""
    inputs = make(*SMALL, matrices=torch.float32)
    y, pre = experts_cuda.forward(*inputs, None, None, None)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    needs = [False, True, True, False, False, False]
    once = experts_cuda.backward(grad, *inputs, None, None, None, pre, needs)
    into = (torch.ones_like(inputs[1]), torch.ones_like(inputs[2]))
    for _ in range(2):
        given = experts_cuda.backward(grad, *inputs, None, None, None, pre, needs, into=into)
    assert given[1] is into[0]
    assert given[2] is into[1]
    for buffer, dw in zip(into, once[1:3], strict=True):
        torch.testing.assert_close(buffer, 1 + dw + dw, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="dense float32"):
        experts_cuda.backward(grad, *inputs, None, None, None, pre, needs, into=(into[0].bfloat16(), into[1]))


def test_three_schedules_give_the_same_bits(library, tier):
    """No atomics, no order of arrival: other seeds order threads and copies otherwise. And a second run."""
    inputs = make(*SMALL)
    results = []
    for seed in (1, 2, 3, 3):
        library.emulator_seed(seed)
        results.append(run(experts, inputs))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_both_tiers_and_torch_save_the_same_pre_activations(monkeypatch):
    """Sorted by expert, zero where nothing is routed: other code may compute the backward pass than did the forward."""
    inputs = make(*SMALL)
    saved = []
    for asked, capability in (("emulated", 80), ("emulated", 90), ("torch", 80)):
        monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", str(capability))
        saved.append(torch.ops.smelt.experts(*inputs, None, None, None, asked)[1])
    routed = int(((inputs[3] >= 0) & (inputs[3] < 6)).sum())
    assert saved[0].shape == saved[2].shape == (150, 32)
    assert not any(pre[routed:].any() for pre in saved)
    for pre in saved[:2]:
        assert float((pre - saved[2]).norm() / saved[2].norm()) < 3e-3


def test_the_flop_formula_does_not_depend_on_who_computes():
    """2 * 3 H F a choice and pass, thrice that with the backward pass; exact."""
    N, H, F, _, K = SMALL
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in make(*SMALL)]
    for asked in ("emulated", "torch"):
        with FlopCounterMode(display=False) as counter:
            experts(*inputs, asked=asked).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * N * K * 3 * H * F


# The choice


def at(device="cpu", rows=torch.bfloat16, matrices=torch.float32, shape=(64, 1056, 128), biases=False, clamp=False):
    return experts_choice.Circumstances(torch.device(device), rows, matrices, shape, biases, clamp)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"rows": torch.float32}, "the rows are float32, the kernels take bf16"),
        ({"rows": torch.float16}, "the rows are float16, the kernels take bf16"),
        ({"matrices": torch.float64}, "the matrices are float64"),
        ({"shape": (64, 1052, 128)}, "hidden size 1052 is not a multiple of 8"),
        ({"shape": (64, 1056, 100)}, "expert width 100 is not a multiple of 8"),
        ({"shape": (65_536, 1056, 128)}, "65536 experts are not between 1 and 65535"),
        ({"biases": True}, "the experts have biases"),
        ({"clamp": True}, "the activation is clamped"),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_whatever_the_kernels_do_not_compute_has_a_reason(case, reason, gpu, monkeypatch):
    """auto does not take cuda and says why, all reasons; cuda and emulated are errors with the same words."""
    if gpu:
        monkeypatch.setattr(experts_choice, "of_device", lambda asked, device: ())
    choice = experts_choice.chosen("auto", at(device="cuda" if gpu else "cpu", **case))
    assert choice.name == ("native" if case == {"rows": torch.float32} and not gpu else "torch")
    assert choice.reasons == (reason,) if gpu else {"no CUDA device", reason} <= set(choice.reasons)
    for asked, words in (("emulated", reason), ("cuda", reason if gpu else "no CUDA device")):
        with pytest.raises(BadInput, match=f"the {asked} experts were asked for, but {words}"):
            experts_choice.chosen(asked, at(**case))


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((7, 5), "torch (this GPU has capability 7.5, the kernels need 8.0)"),
        ((8, 0), "cuda (mma.sync)"),
        ((8, 9), "cuda (mma.sync)"),
        ((9, 0), "cuda (wgmma)"),
        ((10, 0), "cuda (mma.sync)"),
        ((12, 0), "cuda (mma.sync)"),
    ],
)
def test_the_capability_picks_the_tier(capability, words, library, monkeypatch):
    """wgmma exists on 9.0 alone. The GPU is pretended; its library is the emulated one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(experts_choice, "load", lambda target: library)
    assert experts_choice.chosen("auto", at(device="cuda:0")).words == words


def test_an_amd_gpu_is_no_cuda_device(monkeypatch):
    """torch calls it cuda all the same."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert experts_choice.chosen("auto", at(device="cuda:0")).words == "torch (this GPU has no CUDA)"


def test_the_environment_is_asked_where_no_option_was_given(monkeypatch):
    """And an option that is given wins; a value nobody knows is an error."""
    assert experts_choice.asked_for(None) == "emulated"
    assert experts_choice.asked_for("torch") == "torch"
    monkeypatch.delenv("SMELT_EXPERTS")
    assert experts_choice.asked_for(None) == "auto"
    monkeypatch.setenv("SMELT_EXPERTS", "gpu")
    with pytest.raises(BadInput, match="SMELT_EXPERTS=gpu is none of auto, cuda, native, torch, emulated"):
        experts_choice.asked_for(None)
