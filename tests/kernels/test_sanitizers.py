"""Do the kernels, and the emulator under them, read and write only what is theirs?

The same sources, built with address and undefined-behaviour sanitizer. Here tensors have no margin: the byte after the
last is watched. Python is no sanitized program, so the library runs in a process that loads the sanitizer first.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smelt_budget.model import kernel_build

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
SANITIZERS = "address,undefined"
STOP = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}

pytestmark = pytest.mark.slow  # a sanitized build takes a minute

RUN = """
import sys
sys.path[:0] = [{tests!r}]
import torch
import oracle
from oracle import Case
from smelt_budget.model import kernel_library

oracle.ROWS = oracle.COLUMNS = oracle.ELEMENTS = 0  # no margins
torch.set_num_threads(1)
library = kernel_library.load("emulated", {library!r})
"""
STAGES = """
cases = [
    Case(N=9, K=2, E=3, H=72, F=40, dead=0.1),
    Case(N=66, K=1, E=1, H=64, F=32),
    Case(N=5, K=2, E=4, H=1056, F=8),
    Case(N=130, K=1, E=2, H=96, F=128, counts=(130, 0), tile_rows=128),
    Case(N=0, K=2, E=4, H=64, F=32),
]
for seed, case in enumerate(cases):
    library.emulator_seed(seed)
    inputs = oracle.make(case, seed)
    for how in (0, 2):
        found = oracle.run(library, inputs, tier={tier}, tile_rows=case.tile_rows, how=how)
        rows = case.tile_rows or library.tile_rows({tier}, case.N * case.K, case.E, case.H, case.F)
        wrong = oracle.failures(inputs, found, rows, how)
        assert not wrong, wrong
print("clean")
"""
SHORT = """
inputs = oracle.make(Case(N=9, K=1, E=1, H=64, F=32), 0)
offs, tile0 = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
out = torch.empty(8, 64, dtype=torch.bfloat16)  # a row is missing
library.down(torch.zeros(9, 32, dtype=torch.bfloat16), inputs.w_down, out, offs, tile0, 9, 1, 64, 32, 80, 64, None)
print("clean")
"""


def file_of(name):
    """Of a library that g++ knows; skips without it."""
    compiler = os.environ.get("CXX") or "g++"
    try:
        said = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("g++ is not installed")
    path = Path(said.strip())
    if not path.is_absolute():
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture(scope="module")
def sanitized():
    """The real kernels; where the sanitizer is missing nothing is built."""
    file_of("libasan.so")
    return kernel_build.build("emulated", sanitize=SANITIZERS)


def run(library, script, **names):
    """A process that has loaded the sanitizer. Leaks are not looked for: Python leaves much behind."""
    text = (RUN + script).format(tests=str(HERE), library=str(library), **names)
    preload = f"{file_of('libasan.so')} {file_of('libstdc++.so')}"  # without the second, what is thrown is not caught
    environment = {**os.environ, **STOP, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("tier", [80, 90])
def test_all_stages_stay_inside_their_tensors(sanitized, tier):
    done = run(sanitized, STAGES, tier=tier)
    assert done.stdout == "clean\n", done.stderr[-4000:]
    assert done.returncode == 0


def test_a_write_past_a_tensor_is_reported_at_its_line(sanitized):
    """The sanitizer sees into torch's memory: a row too few of `out`."""
    done = run(sanitized, SHORT)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "kernels/src/down.cu" in done.stderr


@pytest.mark.parametrize("contexts", ["assembly", "ucontext"])
def test_fibers_leave_no_memory_behind(tmp_path, contexts):
    """Blocks that end in a finding abandon their fibers; 3 seeds of 39 bugs (test_emulator.py)."""
    file_of("libasan.so")
    compiler = os.environ.get("CXX") or "g++"
    flags = ["-std=c++17", "-O0", "-g1", f"-fsanitize={SANITIZERS}", "-DSMELT_EMULATED", f"-I{KERNELS / 'include'}"]
    if contexts == "ucontext":
        flags.append("-DSMELT_EMULATOR_UCONTEXT")
    units = [HERE / "probes" / f"{name}.cu" for name in ("copies", "words", "warps", "matrices")]
    units.append(HERE / "probes" / "all.cpp")
    program = tmp_path / "probes"
    subprocess.run([compiler, *flags, "-x", "c++", *map(str, units), "-o", str(program), "-pthread"], check=True)
    done = subprocess.run([program], env={**os.environ, **STOP}, capture_output=True, text=True, check=False)
    findings, mappings = (int(word) for word in done.stdout.split() if word.lstrip("-").isdigit())
    assert done.returncode == 0, done.stderr[-4000:]
    assert findings == 3 * 39
    assert mappings < 100  # one launch has 128 stacks
