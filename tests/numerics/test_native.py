"""Do the native kernels compute what the experts' definition says, at every edge of their tiles, panels and blocks?

Right values are those of the definition in float64; `kernels/cpu` is compiled by this machine's g++.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import experts_native, kernel_build
from smelt_budget.model.experts import experts, experts_definition
from smelt_budget.model.experts_choice import Circumstances, decided
from tests.numerics.test_experts import TOLERANCE, assert_same, cast, make, run

ROOT = Path(__file__).parents[2]
SHAPES = {  # N, H, F, E, K
    "one of everything": (1, 1, 1, 1, 1),
    "a panel, and a lane more": (40, 33, 17, 3, 2),
    "just under a panel": (40, 31, 15, 3, 2),
    "several strips": (61, 40, 24, 2, 1),
    "more rows than a block": (700, 24, 8, 2, 2),
    "more k than a depth": (30, 1100, 20, 2, 2),
    "more rows than a depth, for weights": (1500, 16, 8, 2, 1),
    "more columns than panels at once": (20, 600, 700, 2, 1),
    "most experts empty": (5, 8, 8, 300, 2),
    "more rows of a weight than a block": (64, 130, 70, 4, 2),
    "no tokens": (0, 8, 16, 6, 3),
    "no choices": (4, 8, 16, 6, 0),
}


@pytest.fixture
def threads():
    """Sets how many, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_they_equal_the_definition_in_every_gradient(shape, number, threads):
    threads(number)
    inputs = cast(make(*shape), torch.float32)
    right = run(experts_definition, cast(inputs, torch.float64), None)
    assert_same(run(experts, inputs, None, "native"), right, TOLERANCE[torch.float32])


def test_bits_do_not_depend_on_the_number_of_threads(threads):
    inputs = cast(make(900, 72, 40, 7, 3), torch.float32)
    found = []
    for number in (1, 2, 5):
        threads(number)
        found.append(run(experts, inputs, None, "native"))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4])
def test_the_activation_is_right_far_from_zero(scale):
    """A gate of +-88 and beyond, where e^x leaves float32, and tiny ones."""
    inputs = cast(make(50, 8, 16, 6, 3), torch.float32)
    inputs[0] = inputs[0] * scale
    right = run(experts_definition, cast(inputs, torch.float64), None)
    assert_same(run(experts, inputs, None, "native"), right, 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_one_expert_sees_reaches_no_other(value):
    """Rows of expert 0 are spoilt; every output and gradient of the others is what it was, bit by bit."""
    inputs = cast(make(60, 40, 24, 4, 1, stray=False), torch.float32)
    clean = run(experts, inputs, None, "native")
    ours = (inputs[3] == 0).flatten()
    assert 0 < ours.sum() < len(ours)
    inputs[0] = torch.where(ours[:, None], value, inputs[0])
    spoilt = run(experts, inputs, None, "native")
    assert not spoilt["y"][ours].isfinite().any()
    for name in ("y", "x"):
        assert torch.equal(spoilt[name][~ours], clean[name][~ours])
    for name in ("w_gate_up", "w_down"):
        assert torch.equal(spoilt[name][1:], clean[name][1:])
        assert not spoilt[name][0].isfinite().all()


def test_layout_does_not_matter():
    """Rows with a stride, matrices that are transposed views."""
    inputs = cast(make(*SHAPES["several strips"]), torch.float32)
    x, w_gate_up, w_down, *others = inputs
    right = run(experts, inputs, None, "native")
    strange = [torch.cat([x, x], 1)[:, : x.shape[1]], *(w.mT.contiguous().mT for w in (w_gate_up, w_down)), *others]
    got = run(experts, strange, None, "native")
    assert all(torch.equal(got[name], right[name]) for name in right)


def at(rows=torch.float32, matrices=torch.float32, device="cpu", biases=False, clamp=False) -> Circumstances:
    return Circumstances(torch.device(device), rows, matrices, (4, 8, 8), biases, clamp)


def test_they_are_taken_on_a_cpu_wherever_they_fit():
    assert decided("auto", at()).name == "native"
    assert decided("auto", at()).words == f"native ({experts_native.lanes()} floats at a time)"
    assert decided("torch", at()).words == "torch (as asked)"


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (at(rows=torch.bfloat16), "the native kernels take float32, these are bfloat16"),
        (at(matrices=torch.float64), "the native kernels take float32, these are float64"),
        (at(biases=True), "the experts have biases"),
        (at(clamp=True), "the activation is clamped"),
    ],
)
def test_what_they_do_not_compute_is_torchs_and_says_why(where, reason):
    assert decided("auto", where).words == f"torch ({reason})"


def test_asked_for_where_they_cannot_be_they_are_refused():
    inputs = cast(make(8, 8, 8, 2, 1), torch.bfloat16)
    with pytest.raises(BadInput, match="native experts were asked for, but the native kernels take float32"):
        experts(*inputs, asked="native")


def test_without_a_compiler_torch_computes_and_says_so(tmp_path):
    """In a process of its own: what was decided is decided once."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import logging; logging.basicConfig(); from tests.numerics.test_native import at, decided;"
            "print(decided('auto', at()).words)",
        ],
        env={**os.environ, "CXX": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"torch (no C++ compiler: {tmp_path / 'none'} does not start)"
    assert "the experts are computed by torch" in said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["a panel, and a lane more", "more k than a depth", "more rows than a block"])
def test_the_sanitizers_find_nothing(shape):
    """Address and undefined behaviour, in a process that starts with their runtimes."""
    library = kernel_build.build("native", sanitize="address,undefined")
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    script = (
        "import sys, torch; from pathlib import Path; from smelt_budget.model import experts_native as native;"
        "native.library = lambda found=native.loaded(Path(sys.argv[1])): found;"
        "from tests.numerics.test_native import *;"
        "inputs = cast(make(*SHAPES[sys.argv[2]]), torch.float32);"
        "right = run(experts_definition, cast(inputs, torch.float64), None);"
        "assert_same(run(experts, inputs, None, 'native'), right, TOLERANCE[torch.float32]); print('the same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(library), shape],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "the same"
    assert "runtime error" not in done.stderr
