"""How does a result get onto the terminal? JSON as it is; tables as wide as their numbers."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_json(data: Any) -> None:
    """JSON on stdout, keys in the order they were made."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def show(view: Any) -> None:
    """Rich views on stdout. A table is never cut: it is printed as wide as its numbers are, whatever the terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    narrow = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    terminal = Console(width=narrow, highlight=False)
    for part in getattr(view, "renderables", [view]):
        needed = Measurement.get(terminal, terminal.options.update(max_width=1000), part).maximum
        if hasattr(part, "columns") and needed > terminal.width:
            Console(width=needed, highlight=False).print(part)
        else:
            terminal.print(part)
