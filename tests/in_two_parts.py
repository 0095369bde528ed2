"""Runs `make test` in two parts: unit and simulated tests on all cores, then MPI tests one by one.

conftest.py marks the first `parallel`. All arguments go to pytest in both parts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def without(*folders: str) -> list[str]:
    """Nothing is collected there, which takes seconds, unless an argument names it."""
    return [f"--ignore={Path(__file__).parent / folder}" for folder in folders]


PARTS = (
    ["-n", "auto", "-m", "parallel and not drill", *without("mpi", "drills")],
    ["-m", "not parallel and not drill", *without("unit", "simulated", "drills")],
)
NO_TESTS = 5
"""Exit code of pytest that selects no test, as for a file that is all of the other part."""


def main() -> int:
    """The exit code of the part that failed, or of none; NO_TESTS only if neither had any."""
    codes = [
        subprocess.run([sys.executable, "-m", "pytest", *part, *sys.argv[1:]]).returncode
        for part in PARTS
    ]
    if codes[0] not in (0, NO_TESTS):
        print(f"the tests marked parallel, further up, ended with {codes[0]}", flush=True)
    return max((code for code in codes if code != NO_TESTS), key=abs, default=NO_TESTS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pytest has said so
        sys.exit(130)
