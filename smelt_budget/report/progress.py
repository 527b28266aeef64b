"""How far is it? A bar for work that takes over a second, where stderr is a terminal; nothing otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 1.0  # seconds


class SlowWork:
    """A context whose `advanced` may be called often; the bar appears once `PATIENCE` has passed."""

    def __init__(self, words: str):
        self.words = words
        self.began = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> SlowWork:
        return self

    def advanced(self, done: int, total: int) -> None:
        """Tell how much is done; a smaller `total` or `done` than before starts over."""
        if self.bar is None and sys.stderr.isatty() and time.monotonic() - self.began > PATIENCE:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task(self.words)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
