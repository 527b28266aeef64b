"""Is a training step fast? Forward and backward of our baseline beside transformers' class of the same shape.

Each variant runs in a process of its own, all of them in turn, several times; a ratio is between medians of one
sitting. Peak memory is the rise of the resident set over what the process held before the model was built.

    python benchmarks/training_step.py [--threads 2] [--shape tiny small wide] [--rounds 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {  # tiny is the default proxy's scale, 1.9 M parameters outside the embedding
    "tiny": {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 24, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 48},
    "small": {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "wide": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
}  # fmt: skip
COMMON = {"vocab_size": 257, "max_position_embeddings": 256, "qk_norm": "head"}
BATCH, CONTEXT = 8, 256
THEIRS = {
    "tiny": ("eager", "batched_mm", "grouped_mm"),
    "small": ("eager", "grouped_mm"),
    "wide": ("eager", "grouped_mm"),
}
"""batched_mm gathers the matrices of an expert for every row: tens of gigabytes past the smallest shape."""


def specs(shape):
    """The baseline's fields, its spec, and the twin's, which is what `solve` finds with its defaults."""
    from smelt_budget.solver import Request, solve
    from smelt_budget.spec.model import checked

    fields = COMMON | SHAPES[shape]
    return fields, checked(fields), solve(checked(fields), Request()).twin


def memory(field):
    """Kilobytes of VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def ours(spec, dtype):
    from smelt_budget.model import Transformer, initialise
    from smelt_budget.verify.place import Place

    model = initialise(Transformer(spec), 0)
    place = Place(precision=dtype)

    def step(ids):
        with place.autocast():
            losses = model(ids[:, :-1], ids[:, 1:]).losses
        losses.mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def theirs(spec, implementation):
    import torch
    import transformers

    fields = {key: value for key, value in spec.items() if key != "qk_norm"}
    config = transformers.Qwen3MoeConfig(**fields, norm_topk_prob=True, experts_implementation=implementation)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).train()

    def step(ids):
        logits = model(ids[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)

    return step


def measured(variant, shape, threads):
    """Median seconds of a step and the peak rise of memory, in this process."""
    import torch

    torch.set_num_threads(threads)
    if variant.startswith("theirs"):
        import transformers  # noqa: F401  the library itself is not the model's memory
    fields, baseline, twin = specs(shape)
    before = memory("VmRSS")
    name, _, how = variant.partition(" ")
    step = theirs(fields, how) if name == "theirs" else ours(twin if name == "twin" else baseline, how)
    ids = torch.randint(257, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        step(ids)
    peak = memory("VmHWM") - before
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        step(ids)
        taken.append(time.perf_counter() - began)
    return {"seconds": statistics.median(taken), "kilobytes": peak}


def row_seconds():
    """Seconds the data pipeline takes for a step's rows of the text on this machine, the median of many."""
    import tempfile

    from smelt_budget.verify.data import load

    with tempfile.TemporaryDirectory() as cache:
        packed = load(None, cache=Path(cache)).packed(CONTEXT, 0)
    taken = []
    for step in range(200):
        began = time.perf_counter()
        packed.rows(step, BATCH)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def compare(shape, threads, rounds):
    """Print a table of every variant, and the ratios."""
    variants = [
        "baseline fp32",
        "twin fp32",
        "baseline bf16",
        "twin bf16",
        *(f"theirs {how}" for how in THEIRS[shape]),
    ]
    found = {variant: [] for variant in variants}
    for turn in range(rounds):
        for variant in variants:
            if variant == "theirs batched_mm" and turn:
                continue  # 10 to 50 times slower: seen once is enough
            command = [sys.executable, __file__, "--variant", variant, "--shape", shape]
            done = subprocess.run(
                [*command, "--threads", str(threads)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                capture_output=True,
                text=True,
                check=True,
            )
            found[variant].append(json.loads(done.stdout.splitlines()[-1]))
    seconds = {v: statistics.median(r["seconds"] for r in runs) for v, runs in found.items()}
    kilobytes = {v: statistics.median(r["kilobytes"] for r in runs) for v, runs in found.items()}
    best = min((f"theirs {how}" for how in THEIRS[shape]), key=seconds.get)
    print(f"{shape}: {BATCH} x {CONTEXT} tokens, {threads} threads, {rounds} rounds")
    for variant in variants:
        print(f"{variant:20} {seconds[variant] * 1e3:8.1f} ms {kilobytes[variant] / 1024:8.0f} MB")
    print(f"transformers ({best}) / ours, fp32:  {seconds[best] / seconds['baseline fp32']:.2f} in time")
    print(f"ours / transformers ({best}), fp32:  {kilobytes['baseline fp32'] / kilobytes[best]:.2f} in memory")
    print(f"twin / baseline, fp32:               {seconds['twin fp32'] / seconds['baseline fp32']:.2f} in time")
    print(f"data pipeline / baseline step:       {row_seconds() / seconds['baseline fp32']:.2%}")
    print(f"bf16 / fp32, baseline:               {seconds['baseline bf16'] / seconds['baseline fp32']:.2f} in time")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.variant:
        print(json.dumps(measured(asked.variant, asked.shape[0], asked.threads)))
        return
    for shape in asked.shape:
        compare(shape, asked.threads, asked.rounds)


if __name__ == "__main__":
    main()
