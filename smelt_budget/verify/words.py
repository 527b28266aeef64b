"""What may be said of a verdict, and what may not? One sentence each; a table can be misread, a sentence is quoted.

Never a winner from fewer than 3 seeds; never an architecture from a proxy; never the spread of text for that of seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt_budget.verify.interval import quantile

ARMS = ("baseline", "twin")
PUBLISHED = 1e19
"""Training FLOPs of the smallest published SMELT run is 1.3e19 (arXiv:2609.01343)."""
UNEVEN = 0.8
"""Normalised entropy of a load: at 0.8, 64 experts work like 64^0.8 = 28 even ones."""
IDLE = 0.1
"""Share of a layer's experts without a token."""
TELLING = 8192
"""Tokens over which an expert must have had one, or it is called dead: at top-4 of 64, 512 are due to each."""
MANY = 1000
UNIT = "nats/token"
Data = dict[str, Any]


def words(result: Data, found: Data) -> list[str]:
    """All of them, most important first."""
    sentences = list(counted(result["counts"]))
    if "difference" in found:
        sentences += [
            *training(result, found),
            *compared(found),
            scope(found["scale"], found["counts_agree"], all(found["loss_fell"].values())),
            *seeds_wanted(found),
            *rows_are_no_error(found["difference"]),
            *fairness(found),
            *clock(found),
            *loads(found["health"]),
        ]
    return sentences


def counted(counts: Data) -> Iterator[str]:
    """The three counts."""
    if counts["agree"]:
        yield "parameters, FLOPs and KV cache: ledger and model agree exactly, in both arms"
        return
    for arm in ARMS:
        wrong = [name for name in ("parameters", "flops", "kv_cache") if not counts[arm][name]["agree"]]
        wrong += ["operations nobody counts"] if counts[arm].get("uncounted") else []
        if wrong:
            yield f"counts of the {arm} disagree: {', '.join(wrong).replace('_', ' ')}; what follows is not matched"


def training(result: Data, found: Data) -> Iterator[str]:
    """Did both arms learn?"""
    for arm in ARMS:
        runs = result["runs"].get(arm) or []
        if not runs:
            yield f"the {arm} was not trained"
        elif not found["loss_fell"][arm]:
            losses = ", ".join(f"seed {run['seed']}: {run['first_loss']:.3f} to {run['last_loss']:.3f}" for run in runs)
            yield f"the {arm} did not train on every seed (training loss, {losses})"
        elif found["below"][arm]["unigram"] is False:
            yield f"held-out loss of the {arm} is not below what letter frequencies give: it has hardly learned yet"
        elif found["below"][arm]["bigram"] is False:
            yield f"held-out loss of the {arm} is not below what pairs of letters give: context was not used yet"


def compared(found: Data) -> Iterator[str]:
    """The paired difference, as far as the seeds carry it."""
    difference = found["difference"]
    for one in difference["excluded"]:
        yield f"seed {one['seed']} is left out of the comparison: {one['arm']}: {one['why']}"
    nats = difference["nats_per_token"]
    if nats is None:
        yield "no seed was finished by both arms: nothing is compared"
        return
    mean, n = f"{nats['mean']:+.3f}", nats["seeds"]
    if n == 1:
        yield f"paired difference {mean} {UNIT} (twin - baseline, 1 seed): no interval, and no statement about its sign"
        return
    with_width = f"{mean} ± {nats['half_width']:.3f} {UNIT} (95 % t-interval, {n} seeds)"
    if n == 2:
        yield (
            f"paired difference {with_width}: with 2 seeds the t quantile is {quantile(2):.1f}, "
            "so the interval is nearly empty of information, and nothing is said about the sign"
        )
    elif found["resolved"]:
        yield (
            f"looped was {'worse' if nats['mean'] > 0 else 'better'} at this scale by {abs(nats['mean']):.3f} ± "
            f"{nats['half_width']:.3f} {UNIT} (95 % t-interval, {n} seeds, paired): the interval excludes 0"
        )
    else:
        yield f"not resolved: paired difference {with_width} includes 0"


def seeds_wanted(found: Data) -> Iterator[str]:
    """How many seeds a narrower interval takes."""
    nats, needed = found["difference"]["nats_per_token"], found["seeds_needed"]
    if nats is None or nats["sd"] is None:
        if nats is not None:
            yield "how many seeds would resolve it is unknown: an SD takes 2 seeds, and 3 to be worth something"
        return
    n, wanted = nats["seeds"], needed["to_resolve_this_difference"]
    spread = f"SD {nats['sd']:.3f} between {n} seeds, itself an estimate"
    if not found["resolved"]:
        if wanted is None or wanted > MANY:
            yield f"a difference this small would take over {MANY:,} seeds to resolve ({spread})"
        elif wanted > n:
            yield f"about {wanted} seeds would put this difference at the edge of its interval ({spread})"
    finer = [
        f"{seeds if seeds <= MANY else f'over {MANY:,}'} for ±{name.rpartition('_')[2]}"
        for name, seeds in needed.items()
        if name.startswith("for_") and seeds is not None and seeds > n
    ]
    if finer:
        yield f"seeds for a narrower interval: about {', '.join(finer)} {UNIT} ({spread})"


def rows_are_no_error(difference: Data) -> Iterator[str]:
    """What one seed alone would have claimed."""
    rows, nats = difference["rows_standard_error"], difference["nats_per_token"]
    if rows is None or nats is None:
        return
    line = f"over held-out rows, one seed's difference has standard error {rows:.4f}: what other text would change"
    if nats["sd"] is None:
        yield f"{line}; another seed usually changes more, so it is not the error of the comparison"
    else:
        yield f"{line}; seeds differ by SD {nats['sd']:.3f}, and only that is the error of the comparison"


def fairness(found: Data) -> Iterator[str]:
    """Rates, tokens, budgets."""
    rates = found["rates"]
    if all(rates.values()):
        each = ", ".join(f"{arm} {rates[arm]['rate']:.4g} (x{rates[arm]['factor']:g})" for arm in ARMS)
        if min(rates[arm]["tried"] for arm in ARMS) > 1:
            yield f"each arm trained at the best rate of those it tried, on a seed of their own: {each}"
        else:
            yield f"rates were not tried, so each arm's may be off its best: {each}"
        for arm in ARMS:
            if rates[arm]["at_edge"]:
                yield f"the {arm}'s best rate is at the edge of those tried: a better one may lie beyond"
    equal = found["equal"]
    if not equal["tokens"] or not equal["steps"]:
        yield "the arms did not train on equally many tokens in equally many steps: the difference is not at equal cost"


def clock(found: Data) -> Iterator[str]:
    """Equal FLOPs, unequal time."""
    steps = [found["arms"][arm]["step_seconds"] for arm in ARMS]
    if all(steps):
        before, after = (step["mean"] for step in steps)
        yield f"equal FLOPs are not equal time: a step of the twin took {after / before:.2f} times the baseline's here"


def loads(health: Data) -> Iterator[str]:
    """Routers that do not spread their tokens."""
    for arm in ARMS:
        one = health[arm]
        if one["entropy_min"] is None:
            continue
        if one["entropy_min"] < UNEVEN:
            working = one["experts"] ** one["entropy_min"]
            yield (
                f"uneven load in the {arm}: normalised entropy {one['entropy_min']:.2f} in one layer and visit, "
                f"as if {working:.0f} of {one['experts']} experts shared it evenly"
            )
        if one["dead_share"] > IDLE and one["load_tokens"] >= TELLING:
            yield f"the {arm} has a layer where {one['dead_max']} experts got none of {one['load_tokens']:,} tokens"


def scope(scale: Data, agree: bool, learned: bool) -> str:
    """What is verified, and that nothing larger follows."""
    if agree and learned:
        proved = "verified: both arms build, match the ledger and train"
    else:
        proved = "not verified: " + " and ".join(
            words for words, fine in (("the counts disagree", agree), ("an arm did not train", learned)) if not fine
        )
    if scale["tokens"] is None:
        return proved
    kind = "proxy" if scale["proxy"] else "pair"
    size = f"a {kind} of {large(scale['parameters'])} parameters at {scale['tokens_per_parameter']:.2g} tokens each"
    spent = f"{scale['training_flops']:.1e} training FLOPs an arm"
    if scale["training_flops"] >= PUBLISHED:
        return f"{proved}. {size[0].upper()}{size[1:]} ({spent}): one point of one pair, and no scaling law"
    return (
        f"{proved}. {size[0].upper()}{size[1:]} ({spent}) does not predict the results published for 1e19 FLOPs "
        "and above, in either direction"
    )


def large(count: float) -> str:
    """1.9 M, 54 B."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {suffix}"
    return f"{count:g}"
