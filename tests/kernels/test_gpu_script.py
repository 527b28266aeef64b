"""The GPU script where there is no GPU: its formulas, clock, tables and time plan, and a rehearsal of the whole."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from smelt_budget.model import kernel_library

BENCH = Path(__file__).parents[2] / "kernels" / "bench"
sys.path.insert(0, str(BENCH))  # as for `python kernels/bench/gpu.py`
checks, floor, gpu, measure, problems, records = map(
    importlib.import_module, ("checks", "floor", "gpu", "measure", "problems", "records")
)
rivals, sanitizer, shapes, step, table, timing = map(
    importlib.import_module, ("rivals", "sanitizer", "shapes", "step", "table", "timing")
)
sys.path.remove(str(BENCH))
SHAPES, ROUTINGS, Shape = shapes.SHAPES, shapes.ROUTINGS, shapes.Shape

FLOORS = (  # of shared/facts: forward ms, TFLOP/s, backward ms, TFLOP/s at 790 TFLOP/s and 4.3 TB/s
    (0.477, 446, 0.863, 493),
    (0.683, 622, 1.335, 637),
    (1.760, 725, 3.48, 733),
    (0.213, 250, 0.397, 268),
    (3.41, 725, 6.54, 756),
)


@pytest.mark.parametrize(("shape", "floors"), list(zip(SHAPES, FLOORS, strict=True)), ids=map(str, SHAPES))
def test_floors_are_those_worked_out_before_the_kernels_were_written(shape, floors):
    """Rounded: three digits; the rates follow from the unrounded times."""
    for stages, ms, rate in ((floor.forward(shape), *floors[:2]), (floor.backward(shape), *floors[2:])):
        found = 1e3 * floor.seconds(stages, floor.REFERENCE)
        assert found == pytest.approx(ms, rel=2e-3)
        assert floor.flops(stages) / found / 1e9 == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flops_of_the_floor_are_those_of_the_op(shape):
    """Exact: 2 for each of an expert's 3 H F weights, K times a token, and twice that backward."""
    N, H, F, _, K = shape
    assert floor.flops(floor.forward(shape)) == 6 * N * K * H * F
    assert floor.flops(floor.backward(shape)) == 12 * N * K * H * F


def test_bytes_of_a_stage_are_its_tensors():
    """Exact, N = 2, H = 8, F = 4, E = 3, K = 1, two experts with rows, two bytes a number, summed by hand."""
    shape = Shape(2, 8, 4, 3, 1)
    assert [stage.bytes for stage in floor.forward(shape, busy=2)] == [
        2 * (2 * 8 + 2 * 2 * 4 * 8 + 2 * 8 + 2 * 4),  # x, two gate-up matrices; pre, h
        2 * (2 * 4 + 2 * 8 * 4 + 2 * 8),  # h, two down matrices; out
        2 * (2 * 8 + 2 * 8),
    ]
    assert floor.backward(shape, busy=2)[3].bytes == 2 * (2 * 8 + 2 * 8 + 3 * 8 * 8)  # dpre, x; all three gradients


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", [Shape(60, 8, 8, 10, 4), Shape(7, 8, 8, 5, 3)], ids=str)
def test_a_token_chooses_different_experts(shape, routing):
    idx = problems.chosen(shape, routing, torch.Generator().manual_seed(0))
    assert idx.shape == (shape.N, shape.K)
    assert all(len(set(row)) == shape.K and 0 <= min(row) <= max(row) < shape.E for row in idx.tolist())


def test_routings_are_as_their_names_say():
    """From the definitions: equal counts; half of the experts without rows; counts that fall like 1 / rank."""
    shape = Shape(4096, 8, 8, 64, 2)
    counts = {
        routing: problems.chosen(shape, routing, torch.Generator().manual_seed(1)).flatten().bincount(minlength=64)
        for routing in ROUTINGS
    }
    assert set(counts["balanced"].tolist()) == {4096 * 2 // 64}
    assert sorted(set(counts["half empty"].tolist())) == [0, 4096 * 2 // 32]
    assert (counts["half empty"] == 0).sum() == 32
    ranked = counts["zipf"].sort(descending=True).values
    # drawn without replacement, the first are a little flatter than 1 / rank
    assert ranked[0] / ranked[15] == pytest.approx(16, rel=0.35)
    assert ranked[-1] > 0


class FakeClock:
    """Every call takes what a test says; what is not part of a form takes 1000."""

    warm, rounds = 2, 5

    def __init__(self):
        self.now, self.log = 0.0, []

    def ahead(self):
        self.log.append("ahead")
        self.now += 1000

    def mark(self):
        self.log.append("mark")
        return self.now

    def finish(self):
        self.log.append("finish")

    def milliseconds(self, start, stop):
        assert self.log[-1] == "finish", "an event is read before it has happened"
        return stop - start


def test_forward_and_backward_are_timed_apart_and_warm_rounds_not_at_all():
    """Exact: medians of times that a fake clock deals out; the inputs take turns and nothing waits in between."""
    clock, seen = FakeClock(), []
    spent = iter([(900, 800), (900, 800), (3, 30), (1, 10), (5, 70), (2, 20), (4, 40)])

    class Form(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *_):
            ahead, ctx.behind = next(spent)
            clock.now += ahead
            seen.append(x.data_ptr())
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            clock.now += ctx.behind
            return grad, *[None] * 4

    sets = [problems.inputs(Shape(2, 8, 8, 2, 1), "balanced", seed, "cpu") for seed in range(3)]
    sets = [each._replace(**{name: getattr(each, name).detach() for name in NO_GRADIENT}) for each in sets]
    assert timing.timed(Form.apply, sets, clock) == (3, 30)
    assert seen == [sets[number % 3].x_NH.data_ptr() for number in range(7)]
    assert clock.log == ["ahead", "mark", "mark", "mark"] * 7 + ["finish"]


NO_GRADIENT = ("w_gate_up_E2FH", "w_down_EHF", "weight_NK")


def test_work_without_a_gradient_is_timed_by_its_median():
    clock = FakeClock()
    spent = iter([900, 900, 3, 1, 5, 2, 4])

    def work():
        clock.now += next(spent)

    assert timing.timed_alone(work, clock) == 3


def test_a_rehearsal_has_no_times():
    sets = [problems.inputs(Shape(2, 8, 8, 2, 1), "balanced", 0, "cpu")]
    form = lambda x, w_gate_up, w_down, idx, weight: x + w_gate_up.sum() + w_down.sum() + weight.sum()  # noqa: E731
    assert timing.timed(form, sets, timing.NoClock()) == (None, None)


def test_the_cuda_clock_reads_events_of_the_stream(monkeypatch):
    """Calls of torch.cuda by the names that torch has; the events are fake."""
    calls = []
    ticks = itertools.count(0, 5)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks)

        def elapsed_time(self, other):
            return other.at - self.at

    for name, fake in (("Event", Event), ("_sleep", calls.append), ("synchronize", lambda: calls.append("all"))):
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    assert timing.timed_alone(lambda: None, timing.clock_of("cuda")) == 5
    assert calls == [timing.AHEAD] * 24 + ["all"]


def test_memory_is_what_the_allocator_says(monkeypatch):
    """Exact: held = after forward - before - y; peak above what was there before."""
    levels = iter([1000, 1000 + 700])
    for name, fake in (
        ("synchronize", lambda: None),
        ("reset_peak_memory_stats", lambda: None),
        ("memory_allocated", lambda: next(levels)),
        ("max_memory_allocated", lambda: 5000),
    ):
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    given = problems.inputs(Shape(2, 8, 8, 2, 1), "balanced", 0, "cpu")
    form = lambda x, w_gate_up, w_down, idx, weight: x + w_gate_up.sum() + w_down.sum() + weight.sum().bfloat16()  # noqa: E731
    assert timing.memory(form, given, "cuda") == (700 - 2 * 2 * 8, 4000)
    assert timing.memory(form, given, "cpu") == (None, None)


def test_a_step_gets_its_share_of_what_is_left():
    """From the plan: unused seconds go to all later steps in proportion, and the sum never exceeds the whole."""
    steps = gpu.plan(5)
    assert sum(each.share for each in steps) <= 8 * 60 - gpu.LAST_WORDS
    left = 465.0
    for number, each in enumerate(steps):
        seconds = gpu.allowed(steps[number:], left)
        assert seconds >= each.share - 1e-9  # nobody before took more than was theirs
        left -= seconds
    assert left == pytest.approx(0)
    assert gpu.allowed(steps[3:], 200) == pytest.approx(200 * 50 / (50 + 12 + 240))
    assert gpu.allowed(steps, -5) == 0


def test_a_slow_step_is_stopped_and_what_it_found_is_kept(tmp_path, monkeypatch):
    """A step of three units, of which the first dies with its process and the third never ends."""
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    (tmp_path / "step.py").write_text(
        "import sys, os, time\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "import step\n"
        "step.reachable = lambda: None\n"
        "step.units = lambda *_: [('dies', lambda: os.abort()), ('ends', lambda: {'found': float('nan')}),\n"
        "                         ('hangs', lambda: time.sleep(600)), ('late', dict)]\n"
        "sys.exit(step.main(*sys.argv[1:]))\n"
    )
    found = records.Records(tmp_path / "gpu.jsonl")
    start = time.monotonic()
    outcome = gpu.run("checks", 6, found, "cpu", tmp_path / "gpu.log")
    assert 5 < time.monotonic() - start < 30  # the unit hangs longer
    assert outcome.words == "stopped: its time was over"
    states = {each["unit"]: (each["state"], each.get("found")) for each in found.latest()}
    assert states == {"dies": ("died", None), "ends": ("done", "nan"), "hangs": ("died", None)}


def test_a_unit_that_fails_does_not_keep_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "reachable", lambda: None)

    def fails():
        raise ValueError("one\ntwo")

    def missing():
        raise step.Missing("not here")

    monkeypatch.setattr(step, "STARTED", time.monotonic())  # not when a test first imported it
    monkeypatch.setattr(step, "units", lambda *_: [("a", fails), ("b", missing), ("c", lambda: {"ok": False})])
    found = records.Records(tmp_path / "gpu.jsonl")
    assert step.main("checks", str(found.path), "60", "cpu") == 0
    assert step.main("checks", str(found.path), "60", "cpu") == 0  # begun once is enough
    states = [(each["unit"], each["state"], each.get("reason")) for each in found.latest()]
    assert states == [("a", "failed", "ValueError: one"), ("b", "missing", "not here"), ("c", "done", None)]
    assert len(found.path.read_text().splitlines()) == 6
    monkeypatch.setattr(step, "units", lambda *_: [("d", fails)])
    assert step.main("build", str(found.path), "-1", "cpu") == 0
    assert found.latest()[-1] == {"step": "build", "unit": "d", "state": "left out", "reason": "no time left"}


def result(form, forward, backward, routing="balanced", shape=SHAPES[0], **more):
    """A record of a shape's step."""
    found = {"step": "shape 0", "unit": f"{routing}: {form}", "state": "done", "shape": list(shape), "form": form}
    found |= {"routing": routing, "busy": shape.E, "ok": True, "distance": 0.004, "held": 2**27, "peak": 2**30}
    return found | {"forward_ms": forward, "backward_ms": backward, **more}


RESULTS = [
    {"step": "ceilings", "unit": "product", "state": "done", "flops": 790e12},
    {"step": "ceilings", "unit": "copy", "state": "done", "bytes": 4.3e12},
    result("smelt 80", 0.954, 1.726),
    result("smelt 90", 0.795, 1.6),
    result("grouped op", 1.2, 2.4),
    result("grouped plain", 1.1, 9.0),
    result("dense", 0.5, 1.0, distance=None),
    {"step": "shape 0", "unit": "balanced: liger", "state": "missing", "reason": "not installed"},
    result("grouped op compiled", 0.7, 1.5, ok=False, distance=0.5),
]


def test_rates_and_ratios_follow_from_the_times():
    """By hand, from the floors above: 0.954 ms is twice the floor of 0.477, 212.6 GFLOP of them 223 TFLOP/s."""
    found = table.findings({"capability": "9.0"}, [], RESULTS, rehearsal=False)
    rows = {row["form"]: row for row in found["rows"]}
    assert rows["smelt 80"]["forward_floor"] == pytest.approx(50, rel=2e-3)
    assert rows["smelt 80"]["backward_floor"] == pytest.approx(50, rel=2e-3)
    assert rows["smelt 80"]["forward_tflops"] == pytest.approx(6 * 262144 * 1056 * 128 / 0.954e9, rel=1e-9)
    assert rows["grouped op"]["forward_ratio"] == pytest.approx(1.2 / 0.795)
    assert rows["grouped op"]["backward_ratio"] == pytest.approx(2.4 / 1.6)
    assert rows["grouped op"]["both_ratio"] == pytest.approx(3.6 / 2.395)
    assert rows["dense"]["forward_floor"] is None
    assert rows["smelt 90"]["both_ratio"] == 1


def test_aims_are_judged_by_the_worse_direction_and_the_faster_rival():
    """Exact: grouped op is the faster one both ways; 1.2 / 0.795 = 1.51 and 2.4 / 1.6 = 1.5, floors 60 and 54 %."""
    found = table.findings({"capability": "9.0"}, [], RESULTS, rehearsal=False)["aims"]
    assert [(each["least"], round(each["found"], 1), each["met"]) for each in found] == [
        (1.4, 1.5, "met"),
        (55, 53.9, "not met"),
    ]
    wide = [result(form, *times, shape=SHAPES[2]) for form, times in (("smelt 80", (2, 4)), ("grouped op", (2.3, 4.3)))]
    found = table.findings({"capability": "8.0"}, [], wide, rehearsal=False)["aims"]
    assert [(each["least"], each["met"]) for each in found] == [(1.1, "not met")]
    found = table.findings({"capability": "9.0"}, [], [result("smelt 80", None, None)], rehearsal=True)["aims"]
    assert [each["met"] for each in found] == ["not measured", "not measured"]


def test_a_wrong_rival_is_shown_and_not_compared_with():
    found = table.findings({"capability": "9.0"}, [], RESULTS, rehearsal=False)
    assert not found["wrong"]
    text = table.text(found)
    assert "grouped op compiled (wrong)" in text
    assert "- shape 0, balanced: liger: missing: not installed" in text
    wrong = [*RESULTS, result("smelt 90", 0.1, 0.1, ok=False), {"step": "checks", "unit": "x", "state": "died"}]
    found = table.findings({"capability": "9.0"}, [], wrong, rehearsal=False)
    assert [each["unit"] for each in found["wrong"]] == ["balanced: smelt 90", "x"]
    assert not [each for each in found["rows"] if each["form"] == "grouped op" and each["both_ratio"] > 2]


def test_a_step_whose_units_cannot_even_be_listed_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "reachable", lambda: None)
    monkeypatch.setattr(step, "units", lambda *_: iter(lambda: 1 / 0, None))
    found = records.Records(tmp_path / "gpu.jsonl")
    step.main("checks", str(found.path), "60", "cpu")
    (wrong,) = table.findings({}, [], found.latest(), rehearsal=True)["wrong"]
    assert (wrong["unit"], wrong["reason"]) == ("units", "ZeroDivisionError: division by zero")


def test_a_line_that_a_killed_process_did_not_finish_is_left_out(tmp_path):
    found = records.Records(tmp_path / "gpu.jsonl")
    found.add("checks", "a", "done", ok=True)
    with found.path.open("a") as file:
        file.write('{"step": "checks", "un')
    assert [each["unit"] for each in found.latest()] == ["a"]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_form_computes_what_the_definition_does(library, routing):
    """To rounding, and a form that does not is told from those that do; compilers are left to the rehearsal."""
    given = problems.inputs(shapes.REHEARSED[0], routing, 0, "cpu")
    reference = measure.exact(given)
    for name in ("smelt 80", "smelt 90", "grouped op", "grouped plain"):
        assert measure.agreement(rivals.FORMS[name]("cpu"), given, reference)["ok"], name
    swapped = rivals.FORMS["grouped plain"]("cpu")
    found = measure.agreement(lambda *given: swapped(*given[:4], given[4].flip(1)), given, reference)
    assert not found["ok"]
    broken = measure.agreement(lambda *given: swapped(*given) * float("nan"), given, reference)
    assert not broken["ok"]
    assert str(broken["distance"]) == "nan"


def test_the_dense_rival_has_as_many_flops(monkeypatch):
    """Counted by torch: 2 N 3 H (K F) forward, twice that backward."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = shapes.REHEARSED[0]
    given = rivals.dense_inputs(problems.inputs(shape, "balanced", 0, "cpu"))
    with FlopCounterMode(display=False) as counter:
        y = rivals.FORMS["dense"]("cpu")(*given.operands)
        torch.autograd.grad(y, given.leaves, given.grad_NH)
    assert counter.get_total_flops() == floor.flops(floor.forward(shape)) + floor.flops(floor.backward(shape))


@pytest.mark.parametrize("far", [checks.far_rows, checks.far_matrices])
@pytest.mark.parametrize("tier", [80, 90])
def test_the_check_of_large_tensors_finds_what_an_overflow_would_do(library, monkeypatch, far, tier):
    """A row that was not written, and gradients that an expert without rows got."""
    assert far(checks.REHEARSED_FAR, tier, "cpu") == {"ok": True, "what": ""}
    right = checks.both

    def lost(given, tier):
        y, *rest = right(given, tier)
        y[-1] = 0
        return y, *rest

    monkeypatch.setattr(checks, "both", lost)
    assert far(checks.REHEARSED_FAR, tier, "cpu")["what"].startswith("y ")

    def stray(given, tier):
        y, dx, dw_gate_up, dw_down, dweight = right(given, tier)
        dw_down[0, 0, 0] += 100
        return y, dx, dw_gate_up, dw_down, dweight

    monkeypatch.setattr(checks, "both", stray)
    if far is checks.far_matrices:
        assert far(checks.REHEARSED_FAR, tier, "cpu")["what"] == "an expert without rows has a gradient"


def test_a_case_that_fails_is_reported_in_words(library, monkeypatch):
    case = checks.TILES["narrow"]
    runs = iter(range(5))
    right = checks.oracle.run

    def unsteady(*given):
        got = right(*given)
        got.y[0, 0] += 10 * next(runs)
        return got

    monkeypatch.setattr(checks.oracle, "run", unsteady)
    found = checks.staged(case, 64, 80, "cpu")
    assert not found["ok"]
    assert "y is not the same 3 times" in found["what"]
    assert "y: relative norm" in found["what"]


SAID = {  # as compute-sanitizer's manual shows them
    "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n": (0, ""),
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 16 bytes\n=========     at up_kernel\n"
    "========= ERROR SUMMARY: 1 error\n": (1, "Invalid __global__ read of size 16 bytes; "),
    "========= COMPUTE-SANITIZER\n========= Error: Race reported between Write access and Read access\n"
    "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n": (2, "Error: Race reported"),
    "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n": (0, ""),
}


@pytest.mark.parametrize("said", SAID)
def test_what_compute_sanitizer_says_is_understood(tmp_path, monkeypatch, said):
    """Through a program of that name, which says it."""
    (tmp_path / "said").write_text(said)
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\ntest $PYTORCH_NO_CUDA_MEMORY_CACHING = 1 && cat {tmp_path / 'said'}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    errors, what = SAID[said]
    for _, work in sanitizer.units("cuda", ""):
        found = work()
        assert (found["ok"], found["errors"]) == (errors == 0, errors)
        assert found["what"].startswith(what)


def test_a_sanitizer_that_is_not_there_or_does_not_know_the_gpu_is_no_fault(monkeypatch):
    with pytest.raises(records.Missing, match="Device not supported"):
        sanitizer.verdict(1, "========= Error: Device not supported\n========= ERROR SUMMARY: 1 error\n")
    with pytest.raises(records.Missing, match="did not run"):
        sanitizer.verdict(127, "no such option")
    assert not sanitizer.verdict(1, "========= ERROR SUMMARY: 0 errors\n")["ok"]  # the program failed by itself
    monkeypatch.setattr(sanitizer, "PLACES", ("no-such-program",))
    with pytest.raises(records.Missing, match="not installed"):
        sanitizer.units("cuda", "")[0][1]()


README = BENCH.parents[0] / "README.md"
LOG = BENCH.parents[1] / "docs" / "log.md"


def ops():
    """The rows of the README's table: op, files, definition, tolerance."""
    rows = [line.split(" | ") for line in README.read_text().splitlines() if line.startswith("| ")]
    head = next(number for number, row in enumerate(rows) if row[0] == "| op")
    return {
        row[0].removeprefix("| "): (row[1].replace("`", "").split(", "), row[2].strip("`"), row[3])
        for row in itertools.takewhile(lambda row: len(row) == 5, rows[head + 1 :])
    }


def test_the_readme_has_every_op_and_every_file():
    assert set(ops()) == set(kernel_library.WORK)
    named = {file for files, *_ in ops().values() for file in files}
    assert named | {"abi.cu"} == {path.name for path in (BENCH.parent / "src").glob("*.cu")}


def test_nobody_claims_that_a_gpu_has_run_this():
    """In the words the issue asks for, until a table of gpu.py stands there."""
    for path in (README, LOG):
        assert "no gpu has run this yet" in path.read_text().lower()


def test_the_definitions_of_the_readme_are_what_the_kernels_compute(library):
    """Each line is executed in float64, for every expert where it names one, on what the kernels were given."""
    case = checks.Case(N=40, K=2, E=4, H=64, F=32, dead=0.2)
    given = checks.oracle.make(case)
    got = checks.oracle.run(library, given, 80, 64)
    named = {**vars(got), **vars(given)}
    named = {name: found.double() if found.is_floating_point() else found for name, found in named.items()}
    named |= {"torch": torch, "E": case.E, "partial": named["partial"].sum(0)}
    definitions, routed = ops(), int(got.offs[-1])
    found = dict(named)
    exec(definitions.pop("plan")[1], found)
    assert torch.equal(found["choice"][:routed].int(), got.choice[:routed])
    compared = set()
    for op, (_, line, tolerance) in definitions.items():
        names, made = dict(named), {}
        for e in range(case.E) if "[s]" in line or "[e]" in line else [0]:
            s = slice(int(got.offs[e]), int(got.offs[e + 1]))
            choice = got.choice[s].long()
            names |= {"e": e, "s": s, "t": choice // case.K, "w": named["weight"].flatten()[choice, None]}
            for statement in line.split("; "):
                result = statement.split(" = ")[0].split("[")[0]
                names[result] = made.setdefault(result, torch.zeros_like(named.get(result, torch.empty(0))))
                exec(statement, names)
                if result in named:  # the next statement is given what the kernel made, which is rounded
                    made[result], names[result] = names[result], named[result]
        for result in set(made) & set(named):
            assert checks.oracle.relative(named[result], made[result]) < float(tolerance), (op, result)
            compared.add(result)
    assert compared == set(vars(got)) - {"offs", "tile0", "choice", "slot", "dx"}


def test_without_a_gpu_it_says_so():
    """Exit code 1 and what to do instead."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    assert "sees no GPU here" in done.stderr
    assert "--rehearse" in done.stderr
    assert not done.stdout


def test_without_torch_it_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(BENCH / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {sys.executable} has no torch (none)\n  fix: ")


def test_a_machine_that_has_torch_and_little_else_can_run_it(tmp_path):
    """The GPU machine has neither pydantic nor ruamel.yaml, and what commands want is not wanted here."""
    for name in ("pydantic", "ruamel", "typer", "rich", "sympy", "scipy", "transformers", "safetensors", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name}')\n")
    program = "import step; step.reachable(); import checks, libraries, measure, sanitizer, ceilings"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{BENCH}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_whole_run_is_rehearsed(emulated, tmp_path):
    """Every step on the emulated kernels: nothing wrong, and nothing that a CPU cannot know is claimed."""
    command = [sys.executable, str(BENCH / "gpu.py"), "--rehearse", "--minutes", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["words"] for each in result["steps"]] == ["done"] * 6
    assert result["wrong"] == []
    states = {(each["step"], each["unit"]): each["state"] for each in result["results"]}
    assert {each["reason"] for each in result["results"] if each["state"] == "missing"} == {"needs a GPU"}
    assert set(states.values()) == {"done", "missing"}
    measured = {row["form"] for row in result["rows"]}
    assert measured == set(rivals.FORMS) - {"liger"}
    figures = {row[name] for row in result["rows"] for name in ("forward_ms", "backward_tflops", "both_ratio", "held")}
    assert figures == {None}
    assert {each["met"] for each in result["aims"]} == {"not measured"}
    text = (tmp_path / "gpu.md").read_text()
    assert text in done.stdout
    assert text.startswith("# Rehearsal on the CPU\n\nNothing was measured")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.jsonl", "gpu.log", "gpu.md"]
