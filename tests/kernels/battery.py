"""Does a library compute what it should? A short answer in words, in a process of its own that may crash or hang.

    python battery.py < lines of "battery library seed", answers one line each; the first word is "right" or "caught"

A battery is a function of a library that returns what it found wrong; a finding of the emulator is raised. This process
loads torch once and forks for each line, so a library that writes where it should not takes nothing with it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import large
import torch
from oracle import NAN, Case, bytes_copied, counts, failures, make, run

SECONDS = 120  # a library that takes longer hangs


def portable(library) -> list[str]:
    """Of the mma.sync tier: tails along k, rows and columns, empty experts, bad ids, NaN next door, > 2^31 elements."""
    for case in (
        Case(N=33, K=2, E=6, H=72, F=40),
        Case(N=40, K=2, E=16, H=136, F=64, chosen=4, dead=0.2),
        Case(N=150, K=1, E=3, H=64, F=32, counts=(0, 70, 80)),
    ):
        for tile_rows, how in ((64, 0), (128, 2)):
            inputs = make(case)
            counts(library)
            got = run(library, inputs, tile_rows=tile_rows, how=how)
            seen, wanted = counts(library), bytes_copied(library, inputs, got)
            if seen["conflicts"]:
                return [f"{seen['conflicts']} bank conflicts, up to {seen['most']} ways"]
            if found := failures(inputs, got, tile_rows, how):
                return found
            if seen["copied"] != wanted:
                return [f"{seen['copied']} bytes copied, not {wanted}"]
    if found := leaks(library):
        return found
    for check in (large.weights, large.gathers, large.slots, large.results):
        check(library)
    return []


def leaks(library) -> list[str]:
    """Where the NaN of one expert turns up that belongs to another."""
    counts = (50, 13, 9, 1)
    inputs = make(Case(N=sum(counts), K=1, E=4, H=72, F=40, counts=counts))
    bad = inputs.idx[:, 0] == 1
    inputs.x[bad] = inputs.grad[bad] = NAN
    got = run(library, inputs)
    others = torch.arange(4) != 1
    parts = {name: getattr(got, name)[~bad] for name in ("y", "dx", "dweight")}
    parts |= {name: getattr(got, name)[others] for name in ("dw_gate_up", "dw_down")}
    return [f"NaN of another expert in {name}" for name, part in parts.items() if not part.isfinite().all()]


def judged(battery: str, path: str, seed: int) -> str:
    """What a battery says of a library."""
    from smelt_budget.model.kernel_library import KernelError, load

    module, function = battery.split(".")
    torch.set_num_threads(1)
    library = load("emulated", Path(path))
    library.emulator_threads(1)
    library.emulator_seed(seed)
    try:
        found = getattr(importlib.import_module(module), function)(library)
    except (KernelError, AssertionError) as error:
        found = [str(error)]
    return "caught: " + "; ".join(found).replace("\n", " ") if found else "right"


def answer(line: str) -> str:
    """The same from a forked process."""
    battery, path, seed = line.split()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.write(write, judged(battery, path, int(seed)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"caught: {signal.Signals(-code).name}"
    return said or f"failed: exit code {code}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for request in sys.stdin:
        print(answer(request), flush=True)
