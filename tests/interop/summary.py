"""What did each environment run, and what was skipped? Reads what `make interop` left in .venv-interop.

An environment without results counts as failed: a trainer that was not tried is not a trainer that works.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / ".venv-interop"


def pins(file):
    """The packages that the environment is about."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return ", ".join(line for line in lines if line and not line.startswith(("#", "-")))


def counted(path):
    """Passed, failed, skipped, seconds, and why skipped."""
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    total, why = Counter(), Counter()
    for suite in suites:
        total += Counter({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
        total["seconds"] += float(suite.get("time", 0))
        why.update(skip.get("message", "no reason given") for skip in suite.iter("skipped"))
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
        "seconds": total["seconds"],
    }, why


def main():
    """Print a line for each environment, the skips with their reasons, and the sums."""
    sums, bad = Counter(), False
    for file in sorted((HERE / "requirements").glob("*.txt")):
        name, on_demand = file.stem, "# on demand" in file.read_text(encoding="utf-8")
        results = RESULTS / f"{name}.xml"
        if not results.is_file():
            print(f"{name:20} {'not run (on demand)' if on_demand else 'NOT RUN'}: {pins(file)}")
            bad |= not on_demand
            continue
        counts, why = counted(results)
        sums += Counter(counts)
        bad |= counts["failed"] > 0 or counts["passed"] == 0
        told = ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
        print(f"{name:20} {told}, {counts['seconds']:.0f} s: {pins(file)}")
        for reason, times in why.most_common():
            print(f"{'':20} skipped {times}: {reason}")
    print(f"{'all':20} {sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
