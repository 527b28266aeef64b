"""A made-up verify.json of the shape a run writes: three counts, a proxy pair, rates, a run for each seed and arm."""

import math

ARMS = ("baseline", "twin")
STEPS = {"baseline": [(layer, 0) for layer in range(4)], "twin": [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (3, 0)]}
LOSSES = {"baseline": 2.04, "twin": 2.14}
DOMAINS = ("code", "prose")


def made(baseline=(2.05, 2.07, 2.06), twin=(2.12, 2.17, 2.14), *, bytes_known=True, moe=True, sinks=False):
    """A result whose held-out losses are given, one a seed; `sinks` are left out because their words need torch."""
    losses = {"baseline": baseline, "twin": twin}
    runs = {
        arm: [run(arm, seed, loss, bytes_known, moe, sinks) for seed, loss in enumerate(losses[arm])] for arm in ARMS
    }
    return {
        "version": "0.2.0",
        "origin": "smelt.yaml",
        "pair": {
            "baseline": {"hidden_size": 1280},
            "twin": {"hidden_size": 1024},
            "gaps": {"flops": 0.0010, "non_embedding_parameters": -0.0002, "kv_cache": 0.0},
            "setting": {"convention": "smelt", "context": 4096, "attention_length": 2048.5, "bytes_per_element": 2},
            "notes": [],
        },
        "counts": counts(),
        "proxy": proxy(),
        "data": data(bytes_known),
        "recipe": {
            "steps": 160, "batch_size": 8, "context": 256, "seeds": len(baseline), "warmup": 10, "decay_share": 0.4,
            "balance": "aux",
        },
        "machine": {"device": "cpu", "threads": 1, "torch": "2.13.0", "python": "3.11.7"},
        "rates": {arm: rates(arm) for arm in ARMS},
        "runs": runs,
    }  # fmt: skip


def counts():
    """All agree."""

    def arm(parameters, flops, cache, slots):
        equal = {"agree": True, "differ": []}
        whole = {"context": 4096, "ledger": 4 * cache, "measured": 4 * cache, "device": "meta"}
        return {
            "parameters": {"ledger": parameters, "measured": parameters, **equal, "device": "meta"},
            "flops": {
                "ledger": flops, "measured": flops, **equal, "device": "meta", "convention": "full-square",
                "context": 4096, "unit": "token",
            },
            "kv_cache": {
                "ledger": cache, "measured": cache, **equal, "tokens": 1024, "bytes_per_element": 4, "slots": slots,
                "at_context": whole,
            },
            "uncounted": [],
        }  # fmt: skip

    return {
        "baseline": arm(3_872_245_760, 830_472_192, 25_165_824, 12),
        "twin": arm(3_871_512_576, 831_258_624, 25_165_824, 18),
        "agree": True,
    }


def proxy():
    """1.9 million parameters."""

    def arm(hidden, parameters, forward):
        return {
            "spec": {"hidden_size": hidden},
            "ledger": {
                "parameters": {"total": parameters + 50_000, "non_embedding": parameters},
                "flops": {"forward_per_token": forward, "training_per_token": 3 * forward},
            },
        }

    return {
        "size": "tiny",
        "setting": {"convention": "smelt", "context": 256, "attention_length": 128.5, "bytes_per_element": 2},
        "baseline": arm(96, 1_890_000, 1_080_000),
        "twin": arm(80, 1_878_660, 1_082_160),
        "gaps": {"flops": 0.0020, "non_embedding_parameters": -0.0060, "kv_cache": 0.0},
        "sparsity": {"baseline": 0.861, "twin": 0.868, "full_baseline": 0.946, "full_twin": 0.949},
        "notes": ["scale: 4 of 12 layers, hidden 96 of 1280"],
    }


def data(bytes_known):
    """Two domains."""
    grams = {"unigram": 3.33, "bigram": 2.46} if bytes_known else {"unigram": None, "bigram": None}
    return {
        "name": "text that came with Python 3.11.7",
        "fingerprint": "9f2c" * 16,
        "domains": {name: {} for name in DOMAINS},
        "yardsticks": {name: {"zlib": 1.78, "xz": 1.29, **grams} for name in DOMAINS},
    }


def rates(arm):
    """Three tried, the middle one taken."""
    centre = 0.75 / {"baseline": 96, "twin": 80}[arm]
    tried = [
        {"factor": factor, "rate": factor * centre, "loss": LOSSES[arm] + 0.4 + extra}
        for factor, extra in ((0.5, 0.05), (1.0, 0.0), (2.0, 0.03))
    ]
    return {"tried": tried, "chosen": {"factor": 1.0, "rate": centre}, "at_edge": False}


def run(arm, seed, loss, bytes_known=True, moe=True, sinks=False):
    """One run."""
    slower = 1.0 if arm == "baseline" else 1.19
    return {
        "seed": seed,
        "rate": rates(arm)["chosen"]["rate"],
        "steps": 160,
        "tokens": 327_680,
        "first_loss": 5.31,
        "last_loss": loss + 0.02,
        "held_out": held_out(loss, bytes_known),
        "routing": routing(arm, seed) if moe else {"load": [], "overlap": []},
        "sink": sink(arm, seed) if sinks else None,
        "recall": recall(seed),
        "seconds": 33.4 * slower,
        "step_seconds": 0.209 * slower,
        "tokens_per_second": 9799 / slower,
        "peak_memory_bytes": 512_000_000,
        "gradient_norm_max": 3.1 + seed,
    }


def held_out(loss, bytes_known=True):
    """Domains, lengths and positions around a mean; 64 rows of each domain."""

    def part(nats, tokens):
        bits = nats / math.log(2) if bytes_known and nats is not None else None
        return {"tokens": tokens, "bytes": tokens * 1.0, "nats_per_token": nats, "bits_per_byte": bits}

    rows = [loss - 0.1 + 0.2 * (i >= 64) + 0.3 * math.sin(7 * i) + 0.05 * math.cos(11 * i * loss) for i in range(128)]
    return {
        **part(loss, 32_768),
        "domains": {name: part(loss + shift, 16_384) for name, shift in zip(DOMAINS, (-0.1, 0.1), strict=True)},
        "document_length": {
            "1-64": part(None, 0),
            "65-256": part(loss + 0.2, 2_048),
            "257-1024": part(loss + 0.05, 10_240),
            "1025+": part(loss - 0.03, 20_480),
        },
        "position": {
            name: part(loss + shift, 8_192)
            for name, shift in (("0-15", 0.6), ("16-63", 0.1), ("64-255", -0.1), ("256+", -0.1))
        },
        "end_of_document": part(loss, 40) | {"bytes": 0.0, "bits_per_byte": None},
        "rows": {
            "nats_per_token": rows,
            "domain": [DOMAINS[i >= 64] for i in range(128)],
            "standard_error": 0.034,
        },
    }


def routing(arm, seed):
    """Loads near even; overlap of the twin's visits above chance."""
    experts = {"baseline": 32, "twin": 47}[arm]
    load = [
        {
            "layer": layer,
            "visit": visit,
            "experts": experts,
            "top_k": 4,
            "tokens": 32_768,
            "entropy": 0.97 - 0.01 * layer - 0.02 * visit - 0.002 * seed,
            "max_share": (1.6 + 0.1 * layer + 0.2 * visit) / experts,
            "max_violation": 0.6 + 0.1 * layer + 0.2 * visit,
            "dead": 0,
        }
        for layer, visit in STEPS[arm]
    ]
    overlap = [
        {"layer": layer, "visits": [0, 1], "overlap": 0.31, "chance": 4 / experts, "chance_given_load": 0.1}
        for layer, visit in STEPS[arm]
        if visit
    ]
    return {"load": load, "overlap": overlap}


def sink(arm, seed, most=0.6):
    """Grows with depth, lower on the second visit."""
    layers = []
    for index, (layer, visit) in enumerate(STEPS[arm]):
        mean = most * (index + 1) / len(STEPS[arm]) * (0.6 if visit else 1.0) * (1 + 0.05 * seed)
        heads = [mean * share for share in (0.7, 0.9, 1.1, 1.3)]
        layers.append(
            {
                "layer": layer,
                "visit": visit,
                "mass_mean": mean,
                "mass_per_head": heads,
                "sink_rate": sum(mass > 0.3 for mass in heads) / 4,
                "visible": 1.0,
                "floor": 0.024,
                "position": {},
            }
        )
    return {"eps": 0.3, "rows": 20, "queries": 5_000, "layers": layers}


def recall(seed):
    """At chance."""
    examples = [
        {
            "examples": k,
            "copying_accuracy": 0.1 if k == 0 else 1 / k + (1 - 1 / k) / 10,
            "tokens": 4 + 5 * k,
            "nats_per_answer": 3.0 + 0.01 * seed,
            "accuracy": 0.1,
            "sink": [],
            "floor": 1 / (4 + 5 * k),
        }
        for k in (0, 1, 2, 4, 8)
    ]
    return {
        "rows": 256,
        "values": 10,
        "chance": {"accuracy": 0.1, "nats_per_answer": math.log(10)},
        "examples": examples,
    }


def metrics(result):
    """Rows of metrics.jsonl for every run of a result, and one of a rate."""
    rows = []
    for arm, runs in result["runs"].items():
        jobs = [(f"seed-{one['seed']}", one["seed"], one["held_out"]["nats_per_token"]) for one in runs]
        for name, seed, end in [*jobs, ("rate-0.5", 1000, 2.5)]:
            rows += [row(arm, name, seed, step, end) for step in range(1, 161)]
    return rows


def row(arm, name, seed, step, end):
    """A falling loss; the noise of a batch is the same in both arms."""
    level = end if math.isfinite(end) else 2.1
    loss = level + (5.55 - level) * math.exp(-step / 25) + 0.1 * math.sin(13 * step + seed)
    line = {
        "arm": arm, "run": name, "seed": seed, "step": step, "tokens": step * 2048, "loss": loss, "rate": 0.008,
        "gradient_norm": 1.0, "seconds": 0.2,
    }  # fmt: skip
    if step % 10 == 0:
        order = STEPS[arm]
        line["router"] = {
            "layer": [layer for layer, _ in order],
            "visit": [visit for _, visit in order],
            "entropy": [0.99 - 0.03 * math.exp(-step / 40) - 0.005 * layer - 0.01 * visit for layer, visit in order],
            "max_share": [0.05 + 0.01 * visit for _, visit in order],
            "dead": [0 for _ in order],
        }
    return line
