"""What every target writes for examples/smelt.yaml, byte for byte, so that a change of a template is seen.

The golden folders are what `python tests/golden/emit.py` wrote; real trainers judge them in tests/interop. Here: they
are what comes out, and what comes out is safe. Weights are not among them.
"""

import ast
import runpy
import subprocess
from pathlib import Path

import pytest

from smelt_budget.emit import TARGETS
from smelt_budget.emit.folder import inside

EMIT = runpy.run_path(str(Path(__file__).with_name("emit.py")))
GOLDEN, write = EMIT["GOLDEN"], EMIT["write"]
AGAIN = "python tests/golden/emit.py"
SPDX = "# SPDX-License-Identifier: Apache-2.0"
FETCHING = {"urllib", "requests", "http", "httpx", "aiohttp", "socket", "ftplib", "wget", "smelt_budget"}
"""Modules that no emitted file may import."""
FETCHES = {"urlopen", "urlretrieve", "snapshot_download", "hf_hub_download", "download_url"}
"""Functions that none may call."""
FETCHERS = ("curl ", "wget ", "git clone", "pip install", "conda install", "apt-get")


def listed(folder):
    """Every file below, by relative name."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    """Each registered target's name."""
    return request.param


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """What it writes."""
    place = tmp_path_factory.mktemp("golden") / "out"
    write(target, place)
    return place


def test_byte_for_byte(target, folder):
    """The golden folder, file for file."""
    want, got = listed(GOLDEN / target), listed(folder)
    assert got.keys() == want.keys(), AGAIN
    for name, path in got.items():
        assert path.read_bytes() == want[name].read_bytes(), f"{target}/{name} changed; {AGAIN}"


def test_no_golden_folder_is_left_over():
    """Each belongs to a registered target."""
    assert {path.name for path in GOLDEN.iterdir()} == set(TARGETS)


def test_python_is_whole_licensed_and_alone(folder):
    """It compiles, says its license, needs no smelt_budget and fetches nothing."""
    for name, path in listed(folder).items():
        if not name.endswith(".py"):
            continue
        text = path.read_text(encoding="utf-8")
        assert SPDX in text.splitlines()[:2], name
        tree = ast.parse(compile(text, name, "exec", ast.PyCF_ONLY_AST) and text)
        assert ast.get_docstring(tree), f"{name} does not say what it is"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & FETCHING, name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] not in FETCHING, name
                assert not {alias.name for alias in node.names} & FETCHES, name
            elif isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in FETCHES, name


def test_scripts_parse_and_fetch_nothing(folder):
    """By bash itself."""
    for name, path in listed(folder).items():
        if name.endswith((".sh", ".sbatch")):
            assert not [word for word in FETCHERS if word in path.read_text()], name
            checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stderr


def test_nothing_is_written_outside(target, tmp_path, monkeypatch):
    """Neither where the command runs, nor beside the folder, nor in the home."""
    for name in ("here", "home", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(target, tmp_path / "there" / "out")
    assert not list((tmp_path / "here").iterdir())
    assert not list((tmp_path / "home").iterdir())
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out"]
    for name in TARGETS[target].emit(EMIT["job"]()).files:
        inside(name)
