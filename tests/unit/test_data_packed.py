"""Packing: what each row holds, against the documents laid end to end in plain Python."""

import time

import numpy as np
import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import Bytes, HeldOut, Packed
from smelt_budget.verify.data.documents import held_out, joined, key_of, laid_out

BOS = 256


def documents(sizes, seed=0, domain=0):
    """Random bytes; each document's first two ids tell its number."""
    r = np.random.default_rng(seed)
    texts = [np.append([i // 256, i % 256], r.integers(0, 256, size))[: max(size, 2)] for i, size in enumerate(sizes)]
    tokens = np.concatenate(texts).astype(np.uint8)
    length = [len(text) for text in texts]
    made = laid_out(tokens, length, length, [key_of(text.astype(np.uint8).tobytes()) for text in texts])
    return joined([made], [domain])


def plain_stream(docs, seed, epochs):
    """The definition: BOS document BOS document ..., epoch after epoch."""
    ids, numbers = [], []
    for epoch in range(epochs):
        for which in np.random.default_rng([seed, epoch]).permutation(len(docs)):
            ids += [BOS, *docs[which].tolist()]
            numbers += [numbers[-1] + 1 if numbers else 0] * (1 + len(docs[which]))
    return np.array(ids), np.array(numbers)


@pytest.mark.parametrize(("sizes", "length"), [((3, 50, 2, 7), 5), ((2,) * 40, 16), ((400, 3), 32), ((9, 8, 7), 26)])
def test_rows_are_the_stream_cut_every_t_tokens(sizes, length):
    """Row r is stream[rT .. rT + T], rows in shuffled blocks: short documents, long ones, several epochs."""
    docs = documents(sizes)
    ids, numbers = plain_stream(docs, 7, 12)
    packed = Packed(docs, length, 7, BOS)
    whole = packed.tokens // length
    order = np.concatenate([e * whole + np.random.default_rng([7, e, 1]).permutation(whole) for e in range(6)])
    for step in range(min(3 * whole, 12)):
        row, document = packed.rows(step, 1)
        assert row.dtype == np.int64
        assert document.dtype == np.int32
        first = order[step] * length
        assert row[0].tolist() == ids[first : first + length + 1].tolist()
        expected = numbers[first : first + length + 1]
        assert document[0].tolist() == (expected - expected[0]).tolist()


def test_a_batch_holds_many_documents():
    """Rows of long documents are spread: 8 neighbouring rows of a 4,000-token document would be one sample."""
    packed = Packed(documents([4000] * 200), 64, 0, BOS)
    for step in range(20):
        ids, _ = packed.rows(step, 8)
        assert len({row.tobytes() for row in ids}) == 8
    places = np.array([packed.row(place) for place in range(packed.tokens // 64)])
    assert sorted(places.tolist()) == list(range(packed.tokens // 64))
    assert np.median(np.abs(np.diff(places))) > 1000


def test_an_epoch_has_every_document_exactly_once():
    """And the next one has them in another order."""
    docs = documents(range(2, 60))
    packed = Packed(docs, 8, 1, BOS)
    orders = []
    for epoch in range(3):
        ids = packed.stream(epoch * packed.tokens, packed.tokens).ids
        assert ids[0] == BOS
        starts = np.flatnonzero(ids == BOS)
        numbers = ids[starts + 1] * 256 + ids[starts + 2]
        assert sorted(numbers.tolist()) == list(range(58))
        orders.append(numbers.tolist())
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_together_have_the_single_process_batch(world):
    """In rank order, for steps inside and across epochs."""
    packed = Packed(documents([30, 4, 90, 11, 57]), 16, 5, BOS)
    for step in range(9):
        whole = packed.rows(step, 6)
        shares = [packed.rows(step, 6, rank, world) for rank in range(world)]
        for one in (0, 1):
            assert (np.concatenate([share[one] for share in shares]) == whole[one]).all()


def test_a_step_depends_on_seed_and_step_only():
    """Not on which steps came before, nor on the object; another seed is another order."""
    docs = documents(range(2, 40))
    walked = Packed(docs, 16, 2, BOS)
    for step in range(50):
        walked.rows(step, 4)
    assert (walked.rows(3, 4)[0] == Packed(docs, 16, 2, BOS).rows(3, 4)[0]).all()
    assert (walked.rows(3, 4)[0] != Packed(docs, 16, 3, BOS).rows(3, 4)[0]).any()


def test_the_order_is_pinned():
    """numpy may change `permutation` (NEP 19 promises nothing); then results before and after are not comparable."""
    assert np.random.default_rng([3, 0]).permutation(6).tolist() == [2, 5, 4, 1, 3, 0]


def test_epochs_count_how_often_the_text_was_read():
    """10 documents of 9 tokens and a BOS are 100 tokens; 5 steps of 4 rows of 10 read 200."""
    assert Packed(documents([9] * 10), 10, 0, BOS).epochs(5, 4) == 2.0


def test_documents_from_several_arrays_are_packed_as_from_one():
    """Sources stay where they are mapped."""
    parts = [documents(range(2, 20), seed) for seed in (1, 2, 3)]
    apart = joined(parts, [0, 0, 0])
    flat = np.concatenate([part.parts[0] for part in parts])
    together = laid_out(flat, apart.length, apart.bytes, apart.key)
    for step in range(20):
        assert (Packed(apart, 32, 0, BOS).rows(step, 2)[0] == Packed(together, 32, 0, BOS).rows(step, 2)[0]).all()


def test_too_little_text_is_refused():
    """Less than a row; less than a batch; a batch that ranks cannot share."""
    docs = documents([9] * 10)
    with pytest.raises(BadInput, match="100 tokens are less than one row of 101"):
        Packed(docs, 100, 0, BOS)
    with pytest.raises(BadInput, match="a batch of 5 rows of 20"):
        Packed(docs, 20, 0, BOS).rows(0, 5)
    with pytest.raises(BadInput, match="does not divide among 3"):
        Packed(docs, 10, 0, BOS).rows(0, 4, 0, 3)


def test_a_batch_takes_well_under_a_millisecond():
    """8 rows of 257 of 30 MB: 0.4 ms on an idle core, the best of many; a training step takes 150."""
    length = np.full(1500, 20_000)
    packed = Packed(laid_out(np.zeros(length.sum(), np.uint8), length, length, np.arange(1500)), 256, 0, BOS)
    packed.rows(0, 8)
    best = 1.0
    for step in range(100):
        began = time.perf_counter()
        packed.rows(step, 8)
        best = min(best, time.perf_counter() - began)
    assert best < 1e-3


def test_sides_do_not_depend_on_order_or_company():
    """A document's key decides."""
    docs = documents(range(2, 500))
    held = {int(key) for key in docs.key[held_out(docs)]}
    shuffled = docs.where(np.random.default_rng(0).permutation(len(docs)))
    assert {int(key) for key in shuffled.key[held_out(shuffled)]} == held
    half = docs.where(np.arange(len(docs)) % 2 == 0)
    assert {int(key) for key in half.key[held_out(half)]} == held & {int(key) for key in half.key}


def test_small_domains_are_held_out_too_and_never_wholly():
    """Two documents: one on each side, whatever their keys are."""
    for seed in range(50):
        mask = held_out(joined([documents([5, 6], seed), documents([7, 8], seed + 50)], [0, 1]))
        assert mask[:2].sum() == mask[2:].sum() == 1


def test_held_out_rows_are_fixed_and_distinct():
    """Per domain as many as asked, no target twice, the same every time."""
    docs = joined([documents([300] * 20, 1), documents([40] * 9, 2)], [0, 1])
    held = HeldOut(docs, 16, 10, BOS, Bytes.token_bytes)
    assert held.rows == {0: 10, 1: 10}
    ids = np.concatenate([batch.ids for batch in held.batches(7)])
    assert (ids == HeldOut(docs, 16, 10, BOS, Bytes.token_bytes).whole.ids).all()
    assert len({row.tobytes() for row in ids}) == 20
    assert HeldOut(docs, 16, 10**9, BOS, Bytes.token_bytes).rows == {0: 6020 // 16, 1: 368 // 16}


def test_held_out_bytes_are_those_of_the_targets():
    """Exact: a byte is 1, a BOS 0; shares of a document's bytes add up to the same where tokens are bytes."""
    docs = documents([10] * 30)
    exact = HeldOut(docs, 22, 5, BOS, Bytes.token_bytes)
    targets = exact.whole.ids[:, 1:]
    assert exact.bytes[0] == (targets != BOS).sum()
    assert (exact.whole.target_bytes == (targets != BOS)).all()
    assert HeldOut(docs, 22, 5, BOS).bytes == exact.bytes


def test_each_position_knows_its_whole_documents_length():
    """BOS counted; also where only a piece of it lies in the row."""
    docs = documents([100, 3])
    whole = HeldOut(docs, 20, 5, BOS, Bytes.token_bytes).whole
    for ids, document, length in zip(whole.ids, whole.document, whole.document_length, strict=True):
        for number in np.unique(document):
            (size,) = set(length[document == number].tolist())
            assert size in (101, 4)
            assert (document == number).sum() <= size
        assert ids.shape == length.shape


def test_a_domain_without_a_held_out_row_is_named():
    """Not silently left out."""
    docs = joined([documents([300]), documents([10])], [0, 1])
    with pytest.raises(BadInput, match="prose: 11 held-out tokens are less than one row of 33"):
        HeldOut(docs, 32, 4, BOS, domains=("code", "prose"))
