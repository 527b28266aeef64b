"""Does NVIDIA's compute-sanitizer find faults? Shapes are tiny, since it slows kernels down a hundredfold.

    memcheck    accesses outside of allocations, and misaligned ones
    initcheck   reads of device memory that nothing has written
    racecheck   shared memory written and read without a barrier in between

`python sanitizer.py DEVICE` is the program that they watch. All three run at once.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import step
from records import Missing, Unit
from shapes import ROUTINGS, Shape

TOOLS = ("memcheck", "initcheck", "racecheck")
PLACES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
WATCHED = (Shape(70, 72, 40, 3, 2), Shape(9, 24, 8, 5, 3))
"""The first has experts of more and of fewer than 64 rows, and a last k-step that is not full."""
SUMMARY = re.compile(r"SUMMARY:.*?(\d+) errors?\b")
"""As in "ERROR SUMMARY: 0 errors" and "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"."""


def units(device: str, _: str) -> list[Unit]:
    """A tool each; a rehearsal runs the program without one."""
    alone = [] if device == "cuda" else [("no tool", functools.partial(alone_on, device))]
    started = functools.cache(start)
    return [*alone, *((tool, functools.partial(judged, tool, device, started)) for tool in TOOLS)]


def alone_on(device: str) -> dict[str, Any]:
    """Whether the program runs at all."""
    done = subprocess.run(program(device), capture_output=True, text=True, check=False)
    return {"ok": done.returncode == 0, "what": done.stderr[-500:]}


def judged(tool: str, device: str, started: Any) -> dict[str, Any]:
    """What a tool found.

    Raises:
        Missing: it is not installed, or does not work with this driver.
    """
    if device != "cuda":
        raise Missing("needs a GPU")
    sanitizer = next(filter(None, map(shutil.which, PLACES)), None)
    if sanitizer is None:
        raise Missing("compute-sanitizer is not installed")
    for each in TOOLS:
        started(sanitizer, each)
    process, file = started(sanitizer, tool)
    code = process.wait()
    return verdict(code, Path(file).read_text(encoding="utf-8", errors="replace"))


def start(sanitizer: str, tool: str) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and the file of its output."""
    descriptor, path = tempfile.mkstemp(prefix=f"{tool}-", suffix=".log")
    # an allocation of its own for each tensor: in a cached block an access beyond its end is no error
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--print-limit", "3", *program("cuda")]
    with os.fdopen(descriptor, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment), path


def verdict(code: int, output: str) -> dict[str, Any]:
    """From the exit code of the program and the last line of the tool.

    Raises:
        Missing: the tool counted nothing, as where it does not know the driver.
    """
    print(output, flush=True)
    summary = SUMMARY.search(output)
    if summary is None or "Device not supported" in output:
        raise Missing(f"it did not run: {' '.join(output.split())[-200:]}")
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=========")]
    what = "; ".join(lines[1:6]) if int(summary[1]) else f"exit code {code}" if code else ""
    return {"ok": code == 0 and not int(summary[1]), "errors": int(summary[1]), "what": what}


def program(device: str) -> list[str]:
    """The command that is watched."""
    return [sys.executable, str(Path(__file__).resolve()), device]


def watched(device: str) -> None:
    """Both passes of both tiers; tensors come from the host, so that hardly a kernel of torch is watched too."""
    import torch
    from problems import inputs

    from smelt_budget.model import experts_cuda

    library = experts_cuda.library_of(torch.device(device))
    tiers = [80, 90] if library.capability() == 90 else [80]
    for shape in WATCHED:
        *operands, grad = (tensor.detach().to(device) for tensor in inputs(shape, ROUTINGS[1], 0, "cpu"))
        operands[3][0, 0] = -1
        for tier in tiers:
            _, pre = experts_cuda.forward(*operands, None, None, None, tier=tier)
            needs = [True] * 4 + [False] * 2
            experts_cuda.backward(grad, *operands, None, None, None, pre, needs, tier=tier)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    step.reachable()
    watched(sys.argv[1])
