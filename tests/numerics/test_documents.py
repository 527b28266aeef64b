"""Packed documents do not know of each other: each has the losses it has alone.

Rotary positions are relative, so equality holds to rounding wherever a document lies in its row.
"""

import pytest
import torch

LENGTHS = (5, 1, 9, 4, 5)
KINDS = ("grouped", "sinks", "windows", "windows of 1", "part of a head", "neighbours", "latent", "latent windows")
IDS = torch.randint(61, (2, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(0))
DOCUMENT = torch.repeat_interleave(torch.tensor([4, 2, 9, 0, 1]), torch.tensor(LENGTHS))


@pytest.mark.parametrize("arm", ["once", "sectioned"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_losses_are_the_losses_alone(build, fields_of, close, kind, arm):
    """Documents of 1 to 9 tokens in rows of 24, in the second row in the opposite order; windows count inside them."""
    model = build(fields_of(kind, arm))
    targets = IDS[:, 1:]
    document = torch.stack((DOCUMENT, DOCUMENT.flip(0)))
    with torch.no_grad():
        packed = model(IDS[:, :-1], targets, document_BT=document).losses
        for row, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
            parts = zip(*(x[row].split(lengths) for x in (IDS[:, :-1], targets, packed)), strict=True)
            for ids, target, losses in parts:
                close(losses[None], model(ids[None], target[None]).losses)


def test_without_masks_the_losses_differ(build, fields_of):
    """So the test above sees the mask."""
    model = build(fields_of("grouped", "once"))
    with torch.no_grad():
        packed = model(IDS[:, :-1], IDS[:, 1:], document_BT=DOCUMENT.expand(2, -1)).losses
        plain = model(IDS[:, :-1], IDS[:, 1:]).losses
    assert torch.allclose(packed[:, :5], plain[:, :5], atol=1e-5)
    assert float((packed - plain)[:, 5:].abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["grouped", "sinks", "chunks", "latent", "windows"])
def test_no_gradient_crosses_a_document_or_goes_back_in_time(build, fields_of, kind):
    """The loss of one token against the embeddings of all: zero outside its document and after it."""
    model = build(fields_of(kind, "sectioned"))
    ids = torch.arange(24)[None]  # every position has an embedding of its own
    for at in (4, 5, 10, 14, 23):
        model.zero_grad()
        model(ids, document_BT=DOCUMENT[None]).logits[0, at].square().sum().backward()
        touched = model.embed_tokens.weight.grad.abs().sum(-1)[:24] > 0
        allowed = (DOCUMENT[at] == DOCUMENT) & (torch.arange(24) <= at)
        assert not bool((touched & ~allowed).any())
        assert bool(touched[at])
