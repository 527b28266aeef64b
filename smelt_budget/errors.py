"""What can go wrong for a user, and the exit code it ends with.

0 met · 2 bad input · 3 infeasible · 4 counts disagree · 130 interrupted · 1 anything else (a bug of ours).
"""


class SmeltError(Exception):
    """An answer the user has to act on: what, by how much, and a fix that was tried."""

    exit_code = 1

    def __init__(self, what: str, *details: str):
        """`what` is one line; each of `details` is one indented line such as ``fix: ...``."""
        super().__init__("\n".join([what, *(f"  {line}" for line in details)]))


class BadInput(SmeltError):
    """A file, a value or a flag that cannot be read exactly. Nothing was guessed, nothing was written."""

    exit_code = 2


class Infeasible(SmeltError):
    """No twin on this lattice meets the tolerances; the message says what binds and what would work."""

    exit_code = 3


class CountsDisagree(SmeltError):
    """Ledger and model count differently; the message names the rows and by how much."""

    exit_code = 4
