"""Where do emitted files come from? Files in `templates/`, some with `@@name` where a value goes.

Values are given ready for the language they enter: `repr` for Python, `shlex.quote` for a shell, a dump for YAML.
"""

from __future__ import annotations

import string
from importlib import resources


class Template(string.Template):
    """`$` is left to shells and Python."""

    delimiter = "@@"


def text(name: str, **values: str) -> str:
    """A file of `templates/`, its names replaced; a missing or an unused one is a bug and raises."""
    template = Template((resources.files("smelt_budget.emit") / "templates" / name).read_text(encoding="utf-8"))
    unused = set(values) - set(template.get_identifiers())
    if unused:
        raise ValueError(f"{name} has no {', '.join(sorted(unused))}")
    return template.substitute(values)
