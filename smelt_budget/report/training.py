"""How far is the training, and when will it be done? A bar per arm on a terminal; elsewhere a line per finished run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Training:
    """Listens to the events of `verify`; everything goes to stderr."""

    def __init__(self, totals: dict[str, int]):
        """`totals`: steps of each arm, over its choice of rate and all seeds."""
        self.totals = totals
        self.console = Console(stderr=True, highlight=False)
        self.bars: dict[str, TaskID] = {}
        self.done: dict[str, int] = dict.fromkeys(totals, 0)
        columns = (
            TextColumn("{task.description:24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not sys.stderr.isatty())

    def __enter__(self) -> Training:
        self.progress.start()
        for arm, total in self.totals.items():
            self.bars[arm] = self.progress.add_task(arm, total=total, loss="")
        return self

    def told(self, event: dict[str, Any]) -> None:
        """One event of a worker."""
        arm, kind = event.get("arm", ""), event["event"]
        if kind == "step":
            self.advance(arm, 1, f"loss {event['loss']:.3f}")
        elif kind == "begin":
            self.describe(arm, event["run"])
            self.advance(arm, event["done"])
        elif kind == "had":
            self.advance(arm, event["steps"])
        elif kind == "more":
            self.totals[arm] += event["steps"]
            self.progress.update(self.bars[arm], total=self.totals[arm])
        elif kind == "look":
            self.describe(arm, f"{event['run']}, judged")
        elif kind == "end":
            loss = "diverged" if event["loss"] is None else f"held out {event['loss']:.4f} nats per token"
            if self.progress.disable:
                self.console.print(f"{arm} {event['run']}: {loss} ({self.done[arm]} of {self.totals[arm]} steps)")

    def describe(self, arm: str, what: str) -> None:
        """Name the run an arm is at."""
        self.progress.update(self.bars[arm], description=f"{arm} {what}")

    def advance(self, arm: str, steps: int, loss: str | None = None) -> None:
        """Count steps."""
        self.done[arm] += steps
        self.progress.update(self.bars[arm], advance=steps, **({} if loss is None else {"loss": loss}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
