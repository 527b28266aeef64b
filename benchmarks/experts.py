"""How fast is the expert op on this CPU, forward and backward, beside other ways to write it?

    python benchmarks/experts.py --threads 1 2 --dtype float32 bfloat16 --rounds 20

Every round draws a routing, as every training step does, and runs each form once, so that whatever else the machine
does falls on all of them. A line gives our median in milliseconds and, for the others, their median over ours; a line
below says where these ratios are required. Forms that need more memory than `--gigabytes` are left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads ruin a shared machine

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from smelt_budget.model.experts import experts, experts_definition
from smelt_budget.model.swiglu import swiglu

SHAPES = (  # N, H, F, E, K
    (2048, 96, 48, 32, 4),
    (2048, 80, 40, 47, 4),
    (2048, 128, 64, 32, 4),
    (1024, 512, 256, 64, 8),
    (2048, 768, 384, 128, 8),
    (4096, 256, 128, 64, 4),
)
REQUIRED = {"hf eager": (SHAPES[-1:], 5.0), "grouped_mm": (SHAPES, 0.95), "grouped_mm index_add": (SHAPES, 0.95)}
"""At which shapes a form takes at least how many times as long as ours. `hf eager` is the usual loop over experts,
whose `weight[e]` makes a gradient of full size for each: E^2."""
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def grouped(x: Tensor, w_gate_up: Tensor, w_down: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    """grouped_mm under autograd, summed in a fixed order."""
    out, order = grouped_rows(x, w_gate_up, w_down, idx, weight)
    return out[order.argsort()].view(*idx.shape, -1).sum(1)


def grouped_index_add(x: Tensor, w_gate_up: Tensor, w_down: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    """grouped_mm under autograd, summed as most people write it."""
    out, order = grouped_rows(x, w_gate_up, w_down, idx, weight)
    return torch.zeros_like(x).index_add(0, order // idx.shape[1], out)


def grouped_rows(x: Tensor, w_gate_up: Tensor, w_down: Tensor, idx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted rows sorted by expert, and which choice each is."""
    keys, order = idx.flatten().sort(stable=True)
    ends = torch.bincount(keys, minlength=len(w_down)).cumsum(0).int()
    pre = torch.nn.functional.grouped_mm(x[order // idx.shape[1]], w_gate_up.mT, offs=ends)
    h = swiglu(pre, None) * weight.flatten()[order, None].to(x.dtype)
    return torch.nn.functional.grouped_mm(h, w_down.mT, offs=ends), order


def transformers_form(name: str, w_gate_up: Tensor, w_down: Tensor) -> Form:
    """Qwen3MoeExperts under one of its implementations, on our weights."""
    E, H, F = w_down.shape
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E)
    config._experts_implementation = name
    module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(w_gate_up), torch.nn.Parameter(w_down)

    def form(x: Tensor, _up: Tensor, _down: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        return module(x, idx, weight.to(x.dtype))

    return form


def once(form: Form, inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Seconds forward, and both ways."""
    for tensor in inputs:
        tensor.grad = None
    start = time.perf_counter()
    y = form(*inputs)
    middle = time.perf_counter()
    y.backward(grad)
    return middle - start, time.perf_counter() - start


def compare(shape: tuple[int, ...], dtype: torch.dtype, rounds: int, gigabytes: float, only: list[str] | None) -> str:
    """One line of the table, and what is required of it."""
    N, H, F, E, K = shape
    x, w_gate_up, w_down = torch.randn(N, H), torch.randn(E, 2 * F, H) * H**-0.5, torch.randn(E, H, F) * F**-0.5
    x, w_gate_up, w_down = (t.to(dtype).requires_grad_() for t in (x, w_gate_up, w_down))
    forms: dict[str, Form] = {"ours": experts, "definition": experts_definition, "grouped_mm": grouped}
    forms["grouped_mm index_add"] = grouped_index_add
    forms["torch path"] = functools.partial(experts, asked="torch")
    forms |= {
        f"hf {name}": transformers_form(name, w_gate_up, w_down) for name in ("eager", "batched_mm", "grouped_mm")
    }
    if gigabytes * 1e9 < 4 * N * K * 3 * H * F * 3:  # batched_mm gathers one expert a row, and so does its gradient
        del forms["hf batched_mm"]
    forms = {name: form for name, form in forms.items() if only is None or name in only or name == "ours"}
    grad = torch.randn_like(x)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for round_ in range(rounds + 1):
        weight, idx = torch.randn(N, E).softmax(1).topk(K)
        for name, form in forms.items():
            spent = once(form, [x, w_gate_up, w_down, idx, weight.requires_grad_()], grad)
            if round_:
                seconds[name].append(spent)
    forward, both = ({name: median(s[i] for s in all_) for name, all_ in seconds.items()} for i in (0, 1))
    ours = f"{1e3 * forward['ours']:.1f} + {1e3 * (both['ours'] - forward['ours']):.1f} ms"
    ratios = {name: both[name] / both["ours"] for name in forms if name != "ours"}
    others = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return f"N={N} H={H} F={F} E={E} K={K}: ours {ours}   {others}{judged(shape, ratios)}"


def judged(shape: tuple[int, ...], ratios: dict[str, float]) -> str:
    """A line for the ratios that REQUIRED names."""
    words = [
        f"{name} / ours {ratios[name]:.2f}x, at least {least:g}x: {'met' if ratios[name] >= least else 'not met'}"
        for name, (shapes, least) in REQUIRED.items()
        if name in ratios and shape in shapes
    ]
    return f"\n    {'; '.join(words)}" if words else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="places in SHAPES")
    parser.add_argument("--only", nargs="*", help="forms beside ours")
    parser.add_argument("--gigabytes", type=float, default=4)
    options = parser.parse_args()
    for threads, dtype in itertools.product(options.threads, options.dtype):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        print(f"{dtype}, {threads} thread{'s' * (threads > 1)}, forward + backward; others as multiples of ours")
        for place in options.shapes:
            print(compare(SHAPES[place], getattr(torch, dtype), options.rounds, options.gigabytes, options.only))


if __name__ == "__main__":
    main()
