"""The routing plan is a stable sort by expert that no id leads astray, and the table picks the tiles it says it picks.

The sort is numpy's. Sizes go over the plan's own: 128 choices a round, 32 chunks a step of the scan, 512 chunks.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import NO_EXPERT, Outputs, in_margin, planned

INT64 = st.integers(-(2**63), 2**63 - 1)


def sorted_by_numpy(idx, E, tile_rows):
    """offs, tile0, choice and slot."""
    ids = idx.reshape(-1)
    key = np.where((ids >= 0) & (ids < E), ids, E)
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=E + 1)[:E]
    routed = counts.sum()
    slot = np.full(len(ids), -1)
    slot[order[:routed]] = np.arange(routed)
    choice = np.where(np.arange(len(ids)) < routed, order, -1)
    offs, tile0 = (np.concatenate([[0], sizes.cumsum()]) for sizes in (counts, -(-counts // tile_rows)))
    return offs, tile0, choice, slot.reshape(idx.shape)


def agrees(library, idx, E, tile_rows=64):
    outputs = Outputs()
    got = planned(library, in_margin(torch.from_numpy(idx)), E, tile_rows, outputs)
    for name, tensor, want in zip(
        ("offs", "tile0", "choice", "slot"), got, sorted_by_numpy(idx, E, tile_rows), strict=True
    ):
        np.testing.assert_array_equal(tensor.numpy(), want, err_msg=name)
    assert outputs.intact()


@st.composite
def routings(draw):
    E, N, K = draw(st.integers(1, 40)), draw(st.integers(0, 90)), draw(st.integers(1, 5))
    names_one = st.integers(0, E - 1)
    ids = st.one_of(names_one, names_one, st.sampled_from([*NO_EXPERT, E, -E]), INT64)
    return np.array(draw(st.lists(ids, min_size=N * K, max_size=N * K)), dtype=np.int64).reshape(N, K), E


@settings(max_examples=60, deadline=None)
@given(routing=routings(), tile_rows=st.sampled_from([64, 128]), seed=st.integers(0, 2**64 - 1))
def test_any_routing_is_sorted_stably(emulated, routing, tile_rows, seed):
    emulated.emulator_seed(seed)
    agrees(emulated, *routing, tile_rows)


@pytest.mark.parametrize(
    ("N", "K", "E"),
    [
        (0, 2, 3),
        (1, 1, 1),
        (300, 1, 1),
        (64, 2, 512),
        (5, 22, 512),  # vLLM PR43599
        (40, 3, 5),  # LightLLM PR1369: 5 experts, vectors of 4
        (40, 3, 83),  # sglang PR8777: E % 16 != 0
        (30, 2, 5000),
        (4500, 1, 7),  # more than 32 chunks
        (35_000, 2, 9),  # more than 512 chunks of one round
    ],
)
def test_sizes(library, N, K, E):
    agrees(library, np.random.default_rng(N).integers(-1, E + 1, (N, K)), E)


@pytest.mark.parametrize("bad", [*NO_EXPERT, 7, 8])
def test_without_any_expert_all_slots_are_spare(library, bad):
    """TransformerEngine PR3019: sum(tokens) == 0."""
    agrees(library, np.full((70, 2), bad, dtype=np.int64), 7)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129])
def test_tiles_of_one_expert(library, count):
    """Between two others; the same id in all rows of a round is the longest rank."""
    ids = np.repeat([0, 1, 2], [3, count, 2])[:, None]
    agrees(library, ids, 3, 64)
    agrees(library, ids[::-1].copy(), 3, 128)


@pytest.mark.parametrize(
    ("N", "K", "E", "tile_rows"), [(2**31 - 1, 2, 3, 64), (3, 2, 0, 64), (3, 2, 4, 0), (-1, 2, 4, 64)]
)
def test_what_cannot_be_planned_is_refused(library, N, K, E, tile_rows):
    with pytest.raises(Exception, match="out of range"):
        library.plan(None, N, K, E, tile_rows, *[None] * 5, 0)


WIDTHS = (8, 48, 64, 72, 96, 128, 256, 1056, 1536, 2048)


@pytest.mark.parametrize(
    ("stage", "columns"),
    [  # of WIDTHS as H or F: 0 up, 1 down, 2 dact, 3 dx, 4 dw_gate_up, 5 dw_down
        (0, (64, 128, 128, 64, 64, 256, 256, 64, 256, 256)),
        (1, (64, 64, 64, 96, 96, 128, 128, 96, 128, 128)),
        (2, (64, 64, 64, 96, 96, 128, 128, 96, 128, 128)),
        (3, (64, 64, 64, 96, 96, 128, 128, 96, 128, 128)),
        (4, (64, 64, 64, 96, 96, 128, 128, 96, 128, 128)),
        (5, (64, 64, 64, 96, 96, 128, 128, 96, 128, 128)),
    ],
)
def test_the_widest_of_the_tiles_that_pad_least(library, stage, columns):
    """1056 = 11 x 96; F = 128 makes gate and up one tile of 256."""
    assert tuple(library.tile_columns(80, stage, 4096, 8, width, width) for width in WIDTHS) == columns


def test_rows_of_a_tile(library):
    """128 where padding costs an eighth at most: 512 slots an expert (8192 tokens, top-8: up to 128 experts)."""
    assert [library.tile_rows(80, 8192 * 8, E, 1056, 128) for E in (64, 128, 129, 512)] == [128, 128, 64, 64]
    assert library.tile_rows(80, 0, 4, 64, 64) == 64


@pytest.mark.parametrize(("tier", "stage"), [(70, 0), (80, 6), (80, -1)])
def test_no_tile_where_there_is_no_such_tier_or_stage(library, tier, stage):
    assert library.tile_columns(tier, stage, 4096, 8, 64, 64) == 0
