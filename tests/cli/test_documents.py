"""Documents are made from the program: docs/cli.md and the README's sessions equal what it prints today."""

import importlib.util
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.solver import solve

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def test_cli_reference_is_fresh():
    """`make docs` rewrites it."""
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == generate.cli()


def test_readme_sessions_are_what_the_program_prints():
    """Every `$ smelt-budget` session is run again; `make docs` rewrites them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(generate.SESSION.findall(readme)) >= 3
    assert generate.sessions(readme) == readme


def test_every_command_of_the_readme_runs(tmp_path, monkeypatch):
    """The shell blocks: each smelt-budget line, as it stands (a pipe's producer is left out)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("smelt-budget ")]
    assert len(commands) >= 9
    (tmp_path / "CHANGELOG.md").write_text((ROOT / "CHANGELOG.md").read_text(encoding="utf-8") * 20)
    for command in commands:
        if command[1] == "verify":  # the whole training takes minutes
            command += ["--steps", "2", "--seeds", "1", "--rate-factors", "1"]
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, (command, result.stderr)


def test_the_example_pair_is_what_solve_writes():
    """examples/smelt.yaml is solved from examples/base.yaml."""
    from smelt_budget.spec import read
    from smelt_budget.verify.pair import read_pair

    pair = read_pair(ROOT / "examples" / "smelt.yaml")
    assert pair.baseline == read(str(ROOT / "examples" / "base.yaml")).spec
    assert solve(pair.baseline, pair.request).twin == pair.twin


def test_readme_python_runs(capsys):
    """The example of the API."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1], {})
    assert " 0.0 " in capsys.readouterr().out


def test_every_rule_cited_is_written_down():
    """C1..Cn in rows, errors and docstrings exist in docs/conventions.md."""
    rules = set(re.findall(r"\*\*(C\d+)", (ROOT / "docs" / "conventions.md").read_text(encoding="utf-8")))
    cited = {
        rule
        for path in (ROOT / "smelt_budget").rglob("*.py")
        for rule in re.findall(r"\bC\d+\b", path.read_text(encoding="utf-8"))
    }
    assert cited <= rules
    assert rules == {f"C{i}" for i in range(1, len(rules) + 1)}


def test_every_option_is_in_the_reference():
    """No hidden flags."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = ("cli.py", "*_command.py", "*_commands.py")
    files = [path for name in commands for path in (ROOT / "smelt_budget").glob(name)]
    assert len(files) >= 4
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    for flag in re.findall(r'"(--[a-z-]+)"', source):
        assert flag in text
