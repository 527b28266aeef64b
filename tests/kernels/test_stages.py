"""Every stage of the mma.sync tier, with every tile of the table, is what float64 makes of it, under any schedule."""

import pytest
import torch
from cases import TILES
from oracle import Case, bytes_copied, counts, failures, make, run

SEEDS = (1, 2, 3)
WGRAD_UP = 4  # of abi.h
BOTH = pytest.mark.parametrize("tile_rows", [64, 128])


def under(library, seed, *args, **options):
    library.emulator_seed(seed)
    return run(library, *args, **options)


def assert_same_bits(one, other):
    for name, tensor in vars(one).items():
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.view(integers), getattr(other, name).view(integers)), name


@BOTH
@pytest.mark.parametrize("name", TILES)
def test_every_tile_under_three_schedules(library, name, tile_rows):
    """Right, without a bank conflict, and the same bits three times and once more."""
    inputs = make(TILES[name])
    counts(library)
    first = under(library, SEEDS[0], inputs, tile_rows=tile_rows)
    seen = counts(library)
    assert (seen["conflicts"], seen["most"], seen["wgmma"]) == (0, 1, 0)
    assert failures(inputs, first, tile_rows) == []
    for seed in (*SEEDS[1:], SEEDS[0]):
        assert_same_bits(first, under(library, seed, inputs, tile_rows=tile_rows))


def test_the_cases_take_every_tile_of_the_table(library):
    """Computed from the table: a tile that is added without a case fails here."""
    table = [
        {library.tile_columns(80, stage, 64, 1, width, width) for width in range(8, 2049, 8)} for stage in range(6)
    ]
    shapes = [(case.H, case.F) for case in TILES.values()]
    taken = [{library.tile_columns(80, stage, 64, 1, H, F) for H, F in shapes} for stage in range(6)]
    assert taken == table
    products = {(rows, columns) for H, F in shapes for rows, columns in ((2 * F, H), (H, F))}
    tiled = {tuple(library.tile_columns(80, WGRAD_UP, 64, 1, side, 8) for side in sides) for sides in products}
    assert tiled == {(rows, columns) for rows in table[WGRAD_UP] for columns in table[WGRAD_UP]}


@pytest.mark.parametrize("how", [1, 2])
def test_float32_weight_gradients(library, how):
    """As they are, and added to what is there, which an expert without slots leaves alone."""
    inputs = make(Case(N=40, K=2, E=9, H=96, F=40, chosen=4))
    got = run(library, inputs, tile_rows=64, how=how)
    assert failures(inputs, got, 64, how) == []
    if how == 2:
        minus_zero = torch.full_like(got.dw_down, -0.0)
        x, H, F = inputs.x, 96, 40
        library.wgrad(x, x.stride(0), got.choice, got.hw, F, None, 2, minus_zero, 2, got.offs, 80, 9, H, F, 80, 0)
        assert minus_zero[1].signbit().all()


@BOTH
def test_bytes_copied_from_global_memory(library, tile_rows):
    inputs = make(Case(N=97, K=2, E=5, H=136, F=72, chosen=3, dead=0.1))
    counts(library)
    got = run(library, inputs, tile_rows=tile_rows)
    assert counts(library)["copied"] == bytes_copied(library, inputs, got)


def test_published_widths(library):
    """Hidden 1056 = 11 x 96 = 33 x 32 and width 128, the shape this tier's tiles were made for."""
    inputs = make(Case(N=24, K=2, E=2, H=1056, F=128))
    assert failures(inputs, run(library, inputs), 64) == []


def test_what_a_stage_reads_is_left_as_it_was(library):
    """unsloth #3314: a backward that wrote into the wrong tensors."""
    inputs = make(TILES["narrow"])
    before = {name: tensor.clone() for name, tensor in vars(inputs).items()}
    run(library, inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vars(inputs).items())


@pytest.mark.parametrize(
    "wrong",
    [
        {"H": 1025},  # transformers #48644: 1025 columns of bf16 are no multiple of 16 bytes
        {"F": 36},
        {"F": 2**30},
        {"H": 0},
        {"E": 0},
        {"S": 2**31},
        {"tile_rows": 32},
        {"ldx": 60},
        {"ldx": 68},
        {"K": 0},
        {"x": 8},
    ],
)
def test_what_the_tiles_cannot_take_is_refused(library, wrong):
    """Before anything is read: every pointer here is null, or not on 16 bytes."""
    given = {"x": None, "ldx": 64, "S": 8, "K": 2, "E": 4, "H": 64, "F": 32, "tile_rows": 64} | wrong
    sizes = [given[name] for name in ("S", "K", "E", "H", "F")]
    with pytest.raises(Exception, match="out of range"):
        library.up(given["x"], given["ldx"], *[None] * 6, *sizes, 80, given["tile_rows"], 0)


def test_a_tier_that_is_not_there(library):
    with pytest.raises(Exception, match="no kernels of that tier"):
        library.down(*[None] * 5, 8, 4, 64, 32, 70, 64, 0)
