"""Every stage of the wgmma tier, with every tile of the table, is what float64 makes of it, under any schedule."""

import re
import subprocess

import large
import pytest
import torch
from cases import PUBLIC
from oracle import ELEMENT, NAN, STAGE, Case, counts, failures, make, relative, run, worst

from smelt_budget.model import kernel_build

SEEDS = (1, 2, 3)
UP, DOWN, DACT, DX, WGRAD = range(5)
BOTH = pytest.mark.parametrize("tile_rows", [64, 128])
COUNTS = (0, 1, 63, 64, 65, 129)

TILES = {
    "hidden 72, width 40": Case(N=70, K=2, E=3, H=72, F=40, dead=0.1),
    "hidden 40, width 64": Case(N=66, K=1, E=1, H=40, F=64),
    "hidden 1056, width 128": Case(N=20, K=2, E=2, H=1056, F=128),
    "hidden 200, width 256": Case(N=70, K=1, E=1, H=200, F=256),
    "hidden 128, width 72": Case(N=33, K=1, E=2, H=128, F=72),
    "hidden 192, width 136": Case(N=31, K=1, E=1, H=192, F=136),
}
"""Together they take every tile of the table."""


def hopper(library, inputs, tile_rows=64, seed=1, **options):
    library.emulator_seed(seed)
    return run(library, inputs, tier=90, tile_rows=tile_rows, **options)


def assert_right(library, case, tile_rows, how=0):
    inputs = make(case)
    got = hopper(library, inputs, tile_rows, how=how)
    assert failures(inputs, got, tile_rows, how) == []
    return got


def assert_same_bits(one, other):
    for name, tensor in vars(one).items():
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.view(integers), getattr(other, name).view(integers)), name


@pytest.fixture
def threads(emulated):
    """Set how many CPU threads share the blocks; as it was afterwards."""
    from conftest import THREADS

    yield emulated.emulator_threads
    emulated.emulator_threads(THREADS)


@BOTH
@pytest.mark.parametrize("name", TILES)
def test_every_tile_under_three_schedules(library, threads, name, tile_rows):
    """Right, by wgmma alone, and the same bits whatever the order of threads and the number of CPU threads."""
    inputs = make(TILES[name])
    counts(library)
    first = hopper(library, inputs, tile_rows)
    seen = counts(library)
    assert (seen["mma"], seen["phases"]) == (0, 0)
    assert seen["wgmma"] > 0
    assert failures(inputs, first, tile_rows) == []
    for seed, number in zip(SEEDS[1:], (1, 3), strict=True):
        threads(number)
        assert_same_bits(first, hopper(library, inputs, tile_rows, seed))


def test_the_cases_take_every_tile_of_the_table(library):
    """Computed from the table: a tile that is added without a case fails here."""

    def taken(stage, shapes):
        return {library.tile_columns(90, stage, 64, 1, H, F) for H, F in shapes}

    shapes = [(case.H, case.F) for case in TILES.values()]
    for stage in (UP, DOWN, DACT, DX):
        assert taken(stage, shapes) == taken(stage, [(width, width) for width in range(8, 2049, 8)]), stage
    gradients = [(side, 8) for shape in shapes for side in shape]
    assert taken(WGRAD, gradients) == taken(WGRAD, [(width, 8) for width in range(8, 2049, 8)])


@BOTH
def test_ragged_experts(library, tile_rows):
    """0, 1, 63, 64, 65 and 129 rows: around one warpgroup and around two."""
    assert_right(library, Case(N=sum(COUNTS), K=1, E=len(COUNTS), H=72, F=40, counts=COUNTS), tile_rows)


@BOTH
@pytest.mark.parametrize(
    "case",
    [
        Case(N=150, K=1, E=5, H=64, F=32, counts=(0, 0, 150)),
        Case(N=40, K=2, E=16, H=64, F=32, chosen=8),
        Case(N=20, K=2, E=3, H=64, F=32, dead=1.0),
    ],
    ids=["one expert has all tokens", "half the experts have none", "no choice is routed"],
)
def test_unbalanced_experts(library, case, tile_rows):
    assert_right(library, case, tile_rows)


@pytest.mark.parametrize("name", [name for name, case in PUBLIC.items() if case.N <= 200 and case.H <= 512])
def test_public_failures(library, name):
    case = PUBLIC[name]
    assert_right(library, case, case.tile_rows or library.tile_rows(90, case.N * case.K, case.E, case.H, case.F))


@pytest.mark.parametrize("F", [256, 512])
def test_blocks_that_go_on_to_further_columns(library, F):
    """Of H = 1056 a block of `down` has 6 or 3 tiles of columns, one of `dx` 3 or 2, the last of them half empty."""
    assert_right(library, Case(N=5, K=1, E=1, H=1056, F=F), 64)


@pytest.mark.parametrize("how", [1, 2])
def test_float32_weight_gradients(library, how):
    """As they are, and added to what is there, which an expert without slots leaves alone."""
    got = assert_right(library, Case(N=40, K=2, E=9, H=96, F=40, chosen=4), 64, how)
    if how == 2:
        minus_zero, x = torch.full_like(got.dw_down, -0.0), torch.zeros(40, 96, dtype=torch.bfloat16)
        library.wgrad(x, 96, got.choice, got.hw, 40, None, 2, minus_zero, 2, got.offs, 80, 9, 96, 40, 90, 0)
        assert minus_zero[1].signbit().all()


@BOTH
@pytest.mark.parametrize("what", ["tokens", "weights"])
def test_an_expert_of_nan_keeps_it_to_itself(library, what, tile_rows):
    """0 x finite garbage hides what 0 x NaN shows: pytorch #193633, transformers PR45621."""
    sizes = (50, 13, 9, 1, 65)
    inputs = make(Case(N=sum(sizes), K=1, E=5, H=72, F=40, counts=sizes))
    bad, others = inputs.idx[:, 0] == 1, torch.arange(5) != 1
    if what == "tokens":
        inputs.x[bad] = inputs.grad[bad] = NAN
    else:
        inputs.w_gate_up[1] = inputs.w_down[1] = NAN
    got = hopper(library, inputs, tile_rows)
    assert got.y[bad].isnan().all()
    assert got.dw_gate_up[1].isnan().any()
    assert all(getattr(got, name)[~bad].isfinite().all() for name in ("y", "dx", "dweight"))
    assert all(getattr(got, name)[others].isfinite().all() for name in ("dw_gate_up", "dw_down"))


def test_both_tiers_say_the_same(library):
    """Each stage but for roundings: the order of sums differs, and so may the last bit of what the next one reads."""
    inputs = make(TILES["hidden 72, width 40"])
    wgmma, portable = hopper(library, inputs), run(library, inputs, tile_rows=64)
    assert torch.equal(wgmma.choice, portable.choice)
    for name, tensor in vars(wgmma).items():
        if tensor.is_floating_point():
            other = getattr(portable, name).double()
            one, other = (tensor.sum(0), other.sum(0)) if name == "partial" else (tensor, other)
            assert relative(one, other) < STAGE, name
    assert worst(wgmma.pre, portable.pre.double()) < ELEMENT[torch.bfloat16]


@BOTH
def test_bytes_copied_from_global_memory(library, tile_rows):
    """A row is read once for every tile of columns, a weight once for every tile of rows; what is masked, never."""
    case = Case(N=97, K=2, E=5, H=136, F=72, chosen=3, dead=0.1)
    H, F, sizes = case.H, case.F, (case.N * case.K, case.E, case.H, case.F)
    inputs = make(case)
    counts(library)
    got = hopper(library, inputs, tile_rows)
    routed, row_tiles = int(got.offs[-1]), int(got.tile0[-1])

    def column_tiles(stage, width):
        return -(-width // library.tile_columns(90, stage, *sizes))

    want = 0
    for stage, k, columns in ((UP, H, 2 * F), (DOWN, F, H), (DACT, H, F), (DX, 2 * F, H)):
        want += routed * k * column_tiles(stage, columns) + row_tiles * k * columns
    for rows, columns in ((2 * F, H), (H, F)):
        of_columns = -(-columns // library.tile_columns(90, WGRAD, *sizes[:2], columns, 8))
        want += routed * (rows * of_columns + columns * -(-rows // 128))
    assert counts(library)["copied"] == 2 * want


@pytest.mark.parametrize("check", [large.weights, large.gathers, large.slots, large.results])
@pytest.mark.slow
def test_more_than_2_to_the_31_elements(library, check):
    check(library, tier=90)


@pytest.mark.slow
def test_weight_gradients_of_more_than_2_to_the_31_elements(library):
    large.weight_gradients(library, tier=90)


def test_a_gpu_before_hopper_has_no_wgmma(library, monkeypatch):
    """The choice of the tier is the caller's; the emulator refuses what such a GPU would not run."""
    monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", "80")
    with pytest.raises(Exception, match=r"capability|shared memory"):
        hopper(library, make(TILES["hidden 72, width 40"]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["up", "down", "dact", "dx", "wgrad"])
def test_machine_code(tmp_path, stage):
    """ptxas spills nothing, and lets products run while copies are issued: C75xx says that it does not."""
    try:
        nvcc = kernel_build.nvcc().program
    except kernel_build.NoCompiler:
        pytest.skip("nvcc is not installed")
    sources = kernel_build.kernels_folder()
    flags = ["-std=c++17", "-O3", "-arch=sm_90a", "-Xptxas", "-v", f"-I{sources / 'include'}", "-cubin"]
    command = [nvcc, *flags, str(sources / "src" / f"hopper_{stage}.cu"), "-o", str(tmp_path / "cubin")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills
    assert set(spills) == {("0", "0", "0")}
    assert not re.search(r"C75\d\d|serialized", said), said
