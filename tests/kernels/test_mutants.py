"""Bugs that are put into the kernels are found, each of them under three schedules.

The sources are compiled once; for a mutant, the one translation unit that shows it is compiled again.
"""

import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

from smelt_budget.model import kernel_build

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
FLAGS = ("-std=c++17", "-O1", "-w", "-DSMELT_EMULATED", "-fPIC", "-pthread", "-x", "c++", "-c")


def lists():
    """Mutants, and the battery that judges them; the Hopper tier's if it is here."""
    yield from (("battery.portable", mutant) for mutant in MUTANTS)
    if importlib.util.find_spec("mutants_hopper"):
        hopper = importlib.import_module("mutants_hopper")
        yield from (("mutants_hopper.battery", Mutant(*mutant)) for mutant in hopper.MUTANTS)


ALL = list(lists())


@pytest.fixture(scope="module")
def judge():
    """A question to the process that runs batteries."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "battery.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:

        def ask(battery, library, seed):
            process.stdin.write(f"{battery} {library} {seed}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield ask
        process.stdin.close()


def compiled(sources, unit, made):
    """A translation unit."""
    include = (f"-I{sources / 'include'}", f"-I{sources / 'emulator'}")
    subprocess.run([kernel_build.gxx().program, *FLAGS, *include, str(sources / unit), "-o", str(made)], check=True)


def linked(objects, made):
    """A library."""
    subprocess.run([kernel_build.gxx().program, "-shared", "-pthread", *map(str, objects), "-o", str(made)], check=True)
    return made


def compiled_once(folder):
    """The objects of all sources as they are; of two processes that want them one compiles."""
    folder.mkdir(exist_ok=True)
    sources = kernel_build.kernels_folder()
    units = sorted((sources / "src").glob("*.cu"))
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.copytree(sources, folder / "kernels")
            list(
                pool.map(
                    lambda unit: compiled(folder / "kernels", f"src/{unit.name}", folder / f"{unit.stem}.o"), units
                )
            )
            (folder / "done").touch()
    return folder


def mutated(mutant, objects, folder):
    """The mutant's library."""
    sources = folder / "kernels"
    shutil.copytree(objects / "kernels", sources)
    changed, unit = sources / mutant.file, mutant.unit or mutant.file
    text = changed.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}"
    changed.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    made = folder / f"{Path(unit).stem}.o"
    compiled(sources, unit, made)
    others = [path for path in objects.glob("*.o") if path.name != made.name]
    return linked([made, *others], folder / "mutant.so")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Shared by the workers of pytest-xdist, whose folders lie in one."""
    base = tmp_path_factory.getbasetemp()
    return compiled_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects")


@pytest.mark.parametrize(("battery", "mutant"), ALL, ids=[mutant.name for _, mutant in ALL])
def test_mutant_is_caught(objects, judge, tmp_path, battery, mutant):
    library = mutated(mutant, objects, tmp_path)
    for seed in SEEDS:
        said = judge(battery, library, seed)
        assert said.startswith("caught"), f"seed {seed}: {said}"
        assert re.search(mutant.says, said), said


@pytest.mark.parametrize("battery", sorted({battery for battery, _ in ALL}))
def test_nothing_is_caught_without_a_mutant(objects, judge, tmp_path, battery):
    library = linked(objects.glob("*.o"), tmp_path / "none.so")
    for seed in SEEDS:
        assert judge(battery, library, seed) == "right"
