"""The cache changes nothing: however a sequence is cut, each token's logits are those of the full forward.

The right values are full forwards without a cache, fp32 on both sides.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.model import Cache, Transformer
from smelt_budget.spec.model import checked

CUTS = ([7, 1, 1, 1], [3, 4, 1, 2])


def draw(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def cut(model, sizes, ids, **beside):
    """Logits of the pieces, one after another, through one cache exactly as long as the sequence."""
    cache, parts = Cache(ids.shape[1]), []
    for ids_BT, *rest in zip(ids.split(sizes, 1), *(x.split(sizes, 1) for x in beside.values()), strict=True):
        parts.append(model(ids_BT, cache=cache, **dict(zip(beside, rest, strict=True))).logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def test_however_a_prompt_is_cut(model, close):
    """Prefill and single tokens, and pieces that cross the rings of windowed layers."""
    ids = draw(2, 10)
    want = model(ids).logits
    assert float(want.std()) > 0.1
    for sizes in CUTS:
        close(cut(model, sizes, ids), want)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["grouped", "sinks", "windows", "windows of 1", "chunks", "latent windows"])
def test_a_prefix_has_the_logits_it_has_in_the_whole(build, fields_of, close, kind):
    """Nothing depends on what comes later: prompts of every length, about the window's too, in one piece."""
    model, ids = build(fields_of(kind, "two visits")).eval(), draw(1, 10)
    want = model(ids).logits
    for length in range(1, 10):
        close(model(ids[:, :length]).logits, want[:, :length])
        close(model(ids[:, :length], cache=Cache(10)).logits, want[:, :length])


@torch.no_grad()
def test_rows_padded_and_packed_are_rows_alone(model, close):
    """Left padding and documents of 1 to 4 tokens, whole and cut so that some pieces are padding only."""
    ids, pad = draw(4, 10), (0, 2, 6, 6)
    padding = torch.arange(10)[None] < torch.tensor(pad)[:, None]
    document = torch.zeros(4, 10, dtype=torch.long)
    document[0], document[3, 7:] = torch.tensor([7] * 4 + [5] + [6] * 3 + [9] * 2), 1
    beside = {"padding_BT": padding, "document_BT": document}
    alone = [model(ids[i : i + 1, p:], document_BT=document[i : i + 1, p:]).logits[0] for i, p in enumerate(pad)]
    for logits in (model(ids, **beside).logits, *(cut(model, sizes, ids, **beside) for sizes in ([5, 4, 1], [1] * 10))):
        assert bool(logits.isfinite().all())
        for got, want, p in zip(logits, alone, pad, strict=True):
            close(got[p:], want)


def test_bytes_are_the_ledgers(model, fields):
    """Two sequences, one slot per executed layer, windows capped (rule C10); fp32 has 4 bytes an element."""
    cache, context = Cache(10), 10
    with torch.no_grad():
        model(draw(2, 2), cache=cache)
    spec = checked(fields)
    assert len(cache.slots) == spec.effective_depth
    setting = Setting.of(spec, context=context, attention_length=1)
    assert cache.bytes == 2 * 4 * Ledger(spec, setting).kv_elements_at_context


@torch.no_grad()
def test_a_full_cache_refuses_and_stays_as_it_was(build, fields_of, close):
    """A token too many is a clear error, and the cache still takes what fits."""
    model, ids = build(fields_of("chunks", "two visits")).eval(), draw(2, 8)
    cache = Cache(8)
    model(ids[:, :6], cache=cache)
    for _ in range(2):
        with pytest.raises(BadInput, match="9 tokens do not fit into a cache of 8 positions"):
            model(draw(2, 3), cache=cache)
    close(model(ids[:, 6:], cache=cache).logits, model(ids).logits[:, 6:])


@torch.no_grad()
def test_documents_are_not_forgotten(build, fields_of):
    """A cache that holds documents cannot tell to which of them a new token belongs, so it asks."""
    model, ids = build(fields_of("grouped", "once")).eval(), draw(1, 8)
    cache = Cache(8)
    model(ids[:, :6], document_BT=torch.tensor([[0, 0, 0, 1, 1, 1]]), cache=cache)
    with pytest.raises(BadInput, match="document_BT"):
        model(ids[:, 6:], cache=cache)


@torch.no_grad()
def test_positions_count_tokens_and_not_padding(build, fields_of):
    """A row whose first piece is padding begins at position 0, so its blocks of chunked attention do too."""
    model = build(fields_of("chunks", "once"))
    cache = Cache(6)
    padding = torch.tensor([[True] * 3 + [False] * 3, [False] * 6])
    for piece in padding.split(3, 1):
        model(draw(2, 3), padding_BT=piece, cache=cache)
    assert cache.position.tolist() == [[3], [6]]


@st.composite
def specs(draw):
    """Attention of any kind, windows of any size, cores anywhere."""
    layers, kv, group = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kinds = st.sampled_from(["full_attention", "sliding_attention", "chunked_attention"])
    fields = {
        "hidden_size": draw(st.integers(3, 20)),
        "num_hidden_layers": layers,
        "vocab_size": 61,
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": 2 * draw(st.integers(1, 5)),
        "num_experts": draw(st.integers(1, 5)),
        "moe_intermediate_size": draw(st.integers(1, 9)),
        "layer_types": tuple(draw(st.lists(kinds, min_size=layers, max_size=layers))),
        "sliding_window": draw(st.integers(1, 9)),
        "attention_chunk_size": draw(st.integers(1, 9)),
        "qk_norm": draw(st.sampled_from(["none", "head", "full"])),
        "attention_sinks": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_interleave": draw(st.booleans()),
    }
    fields["num_experts_per_tok"] = draw(st.integers(1, fields["num_experts"]))
    if draw(st.booleans()):
        ranks = {"kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}
        fields |= ranks | {"qk_norm": "none", "attention_sinks": False, "head_dim": None}
        fields["q_lora_rank"] = draw(st.sampled_from([None, 3]))
    if draw(st.booleans()):
        start = draw(st.integers(0, layers - 1))
        stop = draw(st.integers(start + 1, layers))
        fields["loop"] = {"start": start, "stop": stop, "visits": draw(st.integers(1, 3))}
    return fields


@settings(max_examples=40, deadline=None, derandomize=True)
@given(fields=specs(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), padded=st.integers(0, 8))
def test_any_spec_cut_anywhere(build, close, fields, sizes, padded):
    """Two rows, the second padded on the left, cut into random pieces."""
    model: Transformer = build(fields).eval()
    length = sum(sizes)
    padding = torch.arange(length)[None] < torch.tensor([[0], [min(padded, length - 1)]])
    ids = draw(2, length)
    with torch.no_grad():
        alone = model(ids[1:, min(padded, length - 1) :]).logits[0]
        got = cut(model, sizes, ids, padding_BT=padding)
        close(got[0], model(ids[:1]).logits[0])
        close(got[1, min(padded, length - 1) :], alone)
