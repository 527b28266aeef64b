"""Continuations: greedy is the argmax of full forwards, samples follow the stated distribution."""

import pytest
import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import Sampling, generate
from smelt_budget.model.generate import drawn

KINDS = ("grouped", "sinks", "windows", "chunks", "latent", "latent windows", "four norms")
PROMPT = torch.randint(61, (1, 7), generator=torch.Generator().manual_seed(0))
PROBABILITY = torch.tensor([0.05, 0.4, 0.25, 0.0, 0.2, 0.1])


def argmaxes(model, ids, new):
    """Without a cache."""
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    return ids[:, -new:]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_argmax_of_full_forwards(build, fields_of, kind):
    """Eight tokens; and a batch of prompts padded on the left says what each says alone."""
    model = build(fields_of(kind, "sectioned")).eval()
    want = argmaxes(model, PROMPT, 8)
    assert torch.equal(generate(model, PROMPT, 8), want)
    short = PROMPT[:, 4:]
    ids = torch.cat((PROMPT, torch.nn.functional.pad(short, (4, 0), value=3)))
    padding = torch.tensor([[False] * 7, [True] * 4 + [False] * 3])
    assert torch.equal(generate(model, ids, 8, padding_BT=padding), torch.cat((want, argmaxes(model, short, 8))))


def test_draws_depend_on_the_seed_only(build, fields_of):
    """And temperature near 0 is greedy."""
    model = build(fields_of("grouped", "two visits")).eval()
    ids, how = PROMPT.expand(3, -1), Sampling(temperature=1.5)
    first = generate(model, ids, 10, how, seed=1)
    torch.rand(5)
    assert torch.equal(generate(model, ids, 10, how, seed=1), first)
    assert not torch.equal(generate(model, ids, 10, how, seed=2), first)
    assert not torch.equal(first[0], first[1])
    cold = generate(model, ids, 10, Sampling(temperature=1e-6))
    assert torch.equal(cold, generate(model, ids, 10))


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Sampling(temperature=1.0), [0, 1, 2, 4, 5]),
        (Sampling(temperature=1.0, top_k=1), [1]),
        (Sampling(temperature=1.0, top_k=3), [1, 2, 4]),
        (Sampling(temperature=1.0, top_k=60), [0, 1, 2, 4, 5]),
        (Sampling(temperature=1.0, top_p=0.3), [1]),  # the one that crosses is kept
        (Sampling(temperature=1.0, top_p=0.45), [1, 2]),
        (Sampling(temperature=1.0, top_p=0.9), [1, 2, 4, 5]),
        (Sampling(temperature=1.0, top_p=1e-9), [1]),
        (Sampling(temperature=1.0, top_k=2, top_p=0.9), [1, 2]),
        (Sampling(temperature=0.5), [0, 1, 2, 4, 5]),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(how, kept):
    """Support exactly; frequencies of 40,000 draws within 5 standard errors of p^(1/T), normalised over the kept."""
    n = 40_000
    ids = drawn(PROBABILITY.log().expand(n, -1), how, torch.Generator().manual_seed(0))
    want = torch.zeros(6)
    want[kept] = PROBABILITY[kept] ** (1 / how.temperature)
    want /= want.sum()
    got = torch.bincount(ids, minlength=6) / n
    assert got.nonzero().flatten().tolist() == kept
    assert bool(((got - want).abs() <= 5 * (want * (1 - want) / n).sqrt() + 1e-9).all())


def test_a_row_that_stopped_goes_on_with_stop(build, fields_of):
    """Other rows are not moved by it; when all have stopped, generation does."""
    model = build(fields_of("grouped", "once")).eval()
    ids = torch.cat((PROMPT, PROMPT.flip(1)))
    free = generate(model, ids, 12)
    stop = int(free[0, 2])
    first = [row.index(stop) if stop in row else 12 for row in free.tolist()]
    assert first[0] <= 2
    got = generate(model, ids, 12, stop=stop)
    assert got.shape[1] == min(12, max(first) + 1)
    for row, full, end in zip(got.tolist(), free.tolist(), first, strict=True):
        assert row[: end + 1] == full[: min(end + 1, len(row))]
        assert set(row[end + 1 :]) <= {stop}
    assert generate(model, PROMPT, 12, stop=stop).tolist()[0] == free[0, : first[0] + 1].tolist()


def test_the_mode_comes_back(build, fields_of):
    """Training or not; also when generation fails half way."""
    model = build(fields_of("grouped", "once"))
    for mode in (True, False):
        assert generate(model.train(mode), PROMPT, 0).shape == (1, 0)
        assert model.training is mode
    model.train()
    with pytest.raises(IndexError):
        generate(model, PROMPT + 61, 1)
    assert model.training
    assert model.layers[0].mlp.training


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: generate(m, PROMPT[:, :0], 1), "prompt is empty"),
        (lambda m: generate(m, PROMPT, 1, padding_BT=torch.arange(7)[None] > 5), "padded on the right"),
        (lambda m: Sampling(temperature=-1), "temperature -1"),
        (lambda m: Sampling(temperature=float("nan")), "temperature nan"),
        (lambda m: Sampling(top_k=-1), "top-k -1"),
        (lambda m: Sampling(top_p=0.0), "top-p 0"),
        (lambda m: Sampling(top_p=1.1), "top-p 1.1"),
        (lambda m: m(PROMPT[:, :0]), r"no tokens: the ids are \[1, 0\]"),
        (lambda m: m(PROMPT[:0]), r"no tokens: the ids are \[0, 7\]"),
    ],
)
def test_what_cannot_be_continued_is_refused(build, fields_of, call, said):
    """Each by its name."""
    with pytest.raises(BadInput, match=said):
        call(build(fields_of("grouped", "once")))
