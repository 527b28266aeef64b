"""`make kernels`: compiles the library of the expert kernels for every architecture, and says where it is.

With `emulated` as argument it is the test back end that is compiled.
"""

from __future__ import annotations

import logging
import sys

from smelt_budget.model.kernel_build import KernelBuildError, build


def main() -> int:
    """Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(build("emulated" if sys.argv[1:] == ["emulated"] else "cuda"))
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
