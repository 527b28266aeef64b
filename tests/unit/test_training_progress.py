"""What is shown while two arms train: every step counted once, whether it was taken, taken before, or never will be."""

from smelt_budget.report.training import Training


def steps(bars, arm):
    """(done, of) on an arm's bar."""
    task = bars.progress.tasks[bars.arms[arm]]
    return task.completed, task.total


def test_an_arm_ends_at_its_total(capsys):
    """A run found done, one resumed, one that diverged, one more than was planned; worked out by hand."""
    with Training({"baseline": 26, "twin": 26}) as bars:
        bars.told({"event": "had", "arm": "twin", "run": "rate-0.5", "steps": 8})
        bars.told({"event": "begin", "arm": "twin", "run": "rate-1", "done": 3, "steps": 8})
        bars.told({"event": "step", "arm": "twin", "run": "rate-1", "step": 4, "loss": 5.5, "seconds": 1})
        assert steps(bars, "twin") == (12, 26)
        bars.told({"event": "end", "arm": "twin", "run": "rate-1", "loss": None})
        assert steps(bars, "twin") == (16, 26)
        bars.told({"event": "more", "arm": "twin", "steps": 8})
        bars.told({"event": "had", "arm": "twin", "run": "rate-0.25", "steps": 8})
        bars.told({"event": "begin", "arm": "twin", "run": "seed-0", "done": 0, "steps": 10})
        for step in range(10):
            bars.told({"event": "step", "arm": "twin", "run": "seed-0", "step": step + 1, "loss": 5.5, "seconds": 1})
        bars.told({"event": "look", "arm": "twin", "run": "seed-0"})
        bars.told({"event": "end", "arm": "twin", "run": "seed-0", "loss": 2.0405})
        assert steps(bars, "twin") == (34, 34)
        assert steps(bars, "baseline") == (0, 26)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "twin rate-1: diverged (16 of 26 steps)",
        "twin seed-0: held out 2.0405 nats per token (34 of 34 steps)",
    ]


def test_steps_of_before_are_no_speed():
    """Time left is estimated from steps taken now: 100 found done in no time say nothing."""
    with Training({"twin": 200}) as bars:
        bars.told({"event": "had", "arm": "twin", "run": "seed-0", "steps": 100})
        assert bars.progress.tasks[bars.arms["twin"]].speed is None
