"""How far is the training, and when will it be done? On a terminal a bar for each arm and one for its run at hand,
each with the time left; elsewhere a line per finished run.
"""

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
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description:18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self.progress = Progress(*columns, console=self.console, disable=not sys.stderr.isatty())
        self.arms, self.runs = dict[str, TaskID](), dict[str, TaskID]()
        for arm, total in totals.items():
            self.arms[arm] = self.progress.add_task(arm, total=total, loss="")
            self.runs[arm] = self.progress.add_task("", total=None, loss="", visible=False)

    def __enter__(self) -> Training:
        self.progress.start()
        return self

    def told(self, event: dict[str, Any]) -> None:
        """One event of a worker, or of the process that listens to them."""
        arm, kind = event.get("arm", ""), event["event"]
        if kind == "note":
            self.console.print(event["words"])
        elif kind == "step":
            self.progress.advance(self.arms[arm])
            self.progress.update(self.runs[arm], advance=1, loss=f"loss {event['loss']:.3f}")
        elif kind == "begin":
            words = {"description": f"  {event['run']}", "loss": "", "visible": True}
            self.progress.reset(self.runs[arm], total=event["steps"], completed=event["done"], **words)
            self.skip(arm, event["done"])
        elif kind == "had":
            self.skip(arm, event["steps"])
        elif kind == "more":
            self.progress.update(self.arms[arm], total=self.total(arm) + event["steps"])
        elif kind == "look":
            self.progress.update(self.runs[arm], loss="judging")
        elif kind == "end":
            self.end(arm, event)

    def end(self, arm: str, event: dict[str, Any]) -> None:
        """A run is over, perhaps before its last step."""
        task = self.progress.tasks[self.runs[arm]]
        self.skip(arm, int((task.total or 0) - task.completed))
        loss = "diverged" if event["loss"] is None else f"held out {event['loss']:.4f} nats per token"
        done = int(self.progress.tasks[self.arms[arm]].completed)
        self.console.print(f"{arm} {event['run']}: {loss} ({done} of {self.total(arm)} steps)")

    def total(self, arm: str) -> int:
        """Steps of an arm, as far as is known."""
        return int(self.progress.tasks[self.arms[arm]].total or 0)

    def skip(self, arm: str, steps: int) -> None:
        """Steps that took no time here: they must not count as speed."""
        if steps:
            task = self.progress.tasks[self.arms[arm]]
            self.progress.reset(self.arms[arm], total=self.total(arm), completed=int(task.completed) + steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
