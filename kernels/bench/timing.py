"""How long does a form take on the GPU, forward and backward, and how much memory does it hold between the two?

Times are medians over CUDA events. Before each round the GPU is told to wait, so that the host is ahead of it: what
lies between two events is then the GPU's own time, without gaps of a slow host, unless a form waits for the GPU itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from problems import Inputs
from torch import Tensor

Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""x, w_gate_up, w_down, idx and weight to y."""

AHEAD = 3_000_000
"""Clock cycles: 1.5 ms at 1.98 GHz, several times what a host takes to start one round."""


class Clock(Protocol):
    """Where time comes from: CUDA events, or in tests and rehearsals something else."""

    warm: int
    """Rounds before those that count."""
    rounds: int
    """Rounds that count."""

    def ahead(self) -> None:
        """Let the host run ahead."""

    def mark(self) -> Any:
        """A point in the stream."""

    def finish(self) -> None:
        """Wait for all of it."""

    def milliseconds(self, start: Any, stop: Any) -> float | None:
        """Between two marks, after `finish`."""


class CudaClock:
    """Events of the current stream."""

    warm, rounds = 3, 21

    def ahead(self) -> None:
        """Keeps the GPU busy for 1.5 ms."""
        torch.cuda._sleep(AHEAD)

    def mark(self) -> torch.cuda.Event:
        """An event that was recorded."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Every event has happened."""
        torch.cuda.synchronize()

    def milliseconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Resolution: half a microsecond (CUDA runtime API)."""
        return start.elapsed_time(stop)


class NoClock:
    """Of a rehearsal: there is nothing to measure."""

    warm, rounds = 0, 3

    def ahead(self) -> None:
        """Nothing runs ahead."""

    def mark(self) -> None:
        """No point in time."""

    def finish(self) -> None:
        """All has happened."""

    def milliseconds(self, _start: None, _stop: None) -> None:
        """Unknown."""


def clock_of(device: str) -> Clock:
    """The one that fits."""
    return CudaClock() if device == "cuda" else NoClock()


class Times(NamedTuple):
    """Medians in milliseconds; None where no GPU ran."""

    forward: float | None
    backward: float | None


def timed(form: Form, sets: Sequence[Inputs], clock: Clock) -> Times:
    """Both ways, the sets of inputs in turn; nothing waits for the GPU before the last round."""
    marks = []
    for number in range(clock.warm + clock.rounds):
        given = sets[number % len(sets)]
        clock.ahead()
        start = clock.mark()
        y = form(*given.operands)
        middle = clock.mark()
        grads = torch.autograd.grad(y, given.leaves, given.grad_NH)
        stop = clock.mark()
        del y, grads
        if number >= clock.warm:
            marks.append((start, middle, stop))
    clock.finish()
    return Times(
        middle_of(clock.milliseconds(start, middle) for start, middle, _ in marks),
        middle_of(clock.milliseconds(middle, stop) for _, middle, stop in marks),
    )


def timed_alone(work: Callable[[], object], clock: Clock) -> float | None:
    """Median milliseconds of something without a gradient."""
    marks = []
    for number in range(clock.warm + clock.rounds):
        clock.ahead()
        start = clock.mark()
        work()
        if number >= clock.warm:
            marks.append((start, clock.mark()))
    clock.finish()
    return middle_of(clock.milliseconds(start, stop) for start, stop in marks)


def middle_of(numbers: Any) -> float | None:
    """The median; None if any is."""
    numbers = list(numbers)
    return None if None in numbers else median(numbers)


class Memory(NamedTuple):
    """Bytes; None where no GPU ran."""

    held: int | None
    """What is kept for the backward pass, beside inputs and y."""
    peak: int | None
    """Most at any moment of both passes above what was there before, gradients included."""


def memory(form: Form, given: Inputs, device: str) -> Memory:
    """From the allocator, so that nothing a form keeps escapes; the form has run before (caches, compilers)."""
    if device != "cuda":
        return Memory(None, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = form(*given.operands)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    grads = torch.autograd.grad(y, given.leaves, given.grad_NH)
    del y, grads
    return Memory(held, torch.cuda.max_memory_allocated() - before)
