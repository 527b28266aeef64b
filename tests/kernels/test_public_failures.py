"""What has gone wrong in other expert kernels does not here: the public failures that fit in memory, by source."""

import large
import pytest
import torch
from cases import PUBLIC
from oracle import NAN, Case, Outputs, failures, in_margin, make, planned, relative, run

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", PUBLIC)
def test_shape(library, name):
    case = PUBLIC[name]
    inputs = make(case)
    rows = case.tile_rows or library.tile_rows(80, case.N * case.K, case.E, case.H, case.F)
    assert failures(inputs, run(library, inputs, tile_rows=rows), rows) == [], case.source


def test_a_column_of_zeros_beside_128_tokens(library):
    """DeepGEMM #365."""
    inputs = make(Case(N=128, K=1, E=1, H=64, F=32))
    for tensor in (inputs.x, inputs.grad, inputs.w_gate_up):
        tensor[..., 17] = 0
    assert failures(inputs, run(library, inputs), 64) == []


@pytest.mark.parametrize("tile_rows", [64, 128])
def test_rows_of_nan_that_are_not_routed(library, tile_rows):
    """transformers PR45621, of 8 tokens and top-2: sentinel ids, NaN in the rows, zero weights."""
    inputs = make(Case(N=8, K=2, E=4, H=8, F=8))
    dead = torch.arange(8) % 2 == 0
    inputs.idx[dead] = 4
    clean = run(library, inputs, tile_rows=tile_rows)
    inputs.weight[dead] = 0
    inputs.x[dead] = inputs.grad[dead] = NAN
    got = run(library, inputs, tile_rows=tile_rows)
    for name, tensor in vars(got).items():
        assert torch.equal(tensor, getattr(clean, name)), name
    assert not got.y[dead].any()
    assert not got.dx[dead].any()


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("what", ["tokens", "weights"])
def test_an_expert_of_nan_keeps_it_to_itself(library, what, tile_rows):
    """pytorch #193633 and transformers PR45621: 0 x finite garbage hides what 0 x NaN shows.

    K = 1. All of expert 1 is NaN; its neighbours end in the middle of a tile, of a step along k and of 16 bytes.
    """
    counts = (50, 13, 9, 1, 65)
    inputs = make(Case(N=sum(counts), K=1, E=5, H=72, F=40, counts=counts))
    bad = inputs.idx[:, 0] == 1
    if what == "tokens":
        inputs.x[bad] = inputs.grad[bad] = NAN
    else:
        inputs.w_gate_up[1] = inputs.w_down[1] = NAN
    got = run(library, inputs, tile_rows=tile_rows)
    assert got.y[bad].isnan().all()
    for name in ("y", "dx", "dweight"):
        assert getattr(got, name)[~bad].isfinite().all(), name
    others = torch.arange(5) != 1
    for name in ("dw_gate_up", "dw_down"):
        assert getattr(got, name)[1].isnan().any(), name
        assert getattr(got, name)[others].isfinite().all(), name


@pytest.mark.slow
def test_more_than_65535_tiles_of_rows(library):
    """vLLM #5938, of more than 65,536 tokens, and PR43599, of grid.y past 65,535: tiles of rows lie on grid.x."""
    S, rows = 64 * 65_600, 3
    h, w, out = torch.randn(S, 8).to(BF16), torch.randn(1, 8, 8).to(BF16), Outputs().new(S, 8)
    offs, tile0 = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    library.down(h, w, out, offs, tile0, S, 1, 8, 8, 80, 64, 0)
    assert relative(out[:rows], h[:rows].double() @ w[0].double().T) < 3e-3
    assert not out[rows:].any()


@pytest.mark.parametrize("check", [large.weights, large.gathers, large.slots, large.results])
def test_more_than_2_to_the_31_elements(library, check):
    check(library)


@pytest.mark.parametrize(("rows", "width"), [(1_048_577, 2056), (56_000 * 8, 7168)])
def test_rows_gathered_from_more_than_2_to_the_31_elements(library, rows, width):
    """torchtitan #2430, of 1,048,577 rows, and sglang PR4727."""
    large.gathers(library, rows=rows, width=width)


@pytest.mark.slow
def test_weight_gradients_of_more_than_2_to_the_31_elements(library):
    large.weight_gradients(library)


@pytest.mark.slow
@pytest.mark.parametrize(("E", "H", "F"), [(512, 5120, 1024), (896, 2048, 1024)])
def test_published_numbers_of_weights(library, E, H, F):
    """axolotl PR3865: 512 x 5120 x 2048 and 896 x 2048 x 2048 weights of gate and up."""
    large.weights(library, E=E, H=H, F=F, slots=2)


@pytest.mark.slow
def test_one_row_of_24576_columns(library):
    """DeepGEMM #178 hung on it: groups = 1, m = 1, n = 24576, k = 1536."""
    h, w, out = torch.randn(1, 1536).to(BF16), (torch.randn(1, 24576, 1536) / 39).to(BF16), Outputs().new(1, 24576)
    library.down(h, w, out, *large.last_expert(1, 1), 1, 1, 24576, 1536, 80, 64, 0)
    assert relative(out, h.double() @ w[0].double().T) < 3e-3


def test_44_000_choices_of_512_experts(library):
    """vLLM PR43599's routing, top-22, of 2,000 tokens: the plan alone."""
    idx = torch.stack([torch.randperm(512)[:22] for _ in range(2000)])
    offs, _, choice, slot = planned(library, in_margin(idx), 512, 64, Outputs())
    assert torch.equal(choice[slot.long()].view(-1), torch.arange(44_000).int())
    assert torch.equal(idx.reshape(-1)[choice.long()], idx.reshape(-1).sort().values)
    assert int(offs[-1]) == 44_000
