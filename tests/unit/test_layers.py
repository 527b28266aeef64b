"""One direction, spec to commands: the table of the design, held by walking the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import smelt_budget

PACKAGE = Path(smelt_budget.__file__).parent
COMMANDS = {
    "cli", "emit_command", "flags", "ladder_command", "law_commands", "report_command", "training_commands", "typer",
}  # fmt: skip
LATER = {"report", "page", "ladder", "emit", "verify", "model", *COMMANDS}
NEVER = {
    "spec": {"ledger", "solver", "numpy", "scipy", "sympy", "torch", "rich", *LATER},
    "ledger": {"solver", "numpy", "scipy", "torch", "rich", *LATER},
    "solver": {"torch", "rich", *LATER},
    "model": {"ledger", "solver", "scipy", "sympy", "rich", *LATER} - {"model"},
    "verify": {"report", "page", "ladder", "emit", "rich", *COMMANDS},
    "laws": {"torch", "rich", "sympy", "spec", "ledger", "solver", *LATER},
    "emit": {"report", "page", "ladder", "rich", "scipy", "sympy", *COMMANDS},
    "ladder": {"report", "page", "rich", "scipy", "sympy", "torch", "model", "verify", "laws", *COMMANDS},
    "page": {"rich", "scipy", "sympy", "torch", "model", "solver", "emit", "ladder", *COMMANDS},
    "verify/data": {"torch", "report", "page", "ladder", "emit", "rich", "model", "ledger", "solver", *COMMANDS},
    "report": {"torch", "numpy", "scipy", "sympy", "verify", "model", "emit", "page", "ladder", *COMMANDS},
}


def imported(path):
    """Every module a file imports, anywhere in it, in terms of our rooms or of other packages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            yield parts[1] if parts[0] == "smelt_budget" and len(parts) > 1 else parts[0]


@pytest.mark.parametrize("room", NEVER)
def test_a_room_never_imports_what_comes_after_it(room):
    """And never a heavy library that is not its business."""
    for path in (PACKAGE / room).rglob("*.py"):
        assert not NEVER[room] & set(imported(path)), path


def test_nothing_imports_the_command_line():
    """cli.py is imported by nothing but the entry point."""
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "__main__.py"):
            assert not (COMMANDS - {"flags", "typer"}) & set(imported(path)), path


def test_files_stay_small():
    """A file answers one question in about 300 lines; longer are readers of 22 families and 400 flags, and options.

    Templates are single files because their trainers load single files.
    """
    ours = [path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts]
    long = {p.name for p in ours if len(p.read_text(encoding="utf-8").splitlines()) > 360}
    assert long <= {"families.py", "megatron_arguments.py", "cli.py"}


HEAVY = ("numpy", "scipy", "sympy", "torch")
LOADS = {
    "--help": set(),
    "solve --help": set(),
    "verify --help": set(),
    "ladder --help": set(),
    "report --help": set(),
    "generate --help": set(),
    "models": set(),
    "ledger mixtral-8x7b": set(),
    "ledger mixtral-8x7b --equations": {"sympy"},
    "solve": {"numpy", "sympy"},
}


@pytest.mark.parametrize("arguments", LOADS)
def test_what_a_command_loads(arguments):
    """--help, models and ledger start without numpy, scipy, sympy and torch; solve needs the first and third."""
    code = (
        "import sys; from smelt_budget.cli import app\n"
        f"try: app({arguments.split()!r})\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        f"print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split("LOADED")[1].split()) == LOADS[arguments]
