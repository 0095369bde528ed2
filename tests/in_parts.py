"""Runs `make test` in parts: what computes on all cores, then what waits, then MPI two by two.

conftest.py marks tests by their folder. All arguments go to pytest in every part.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def without(*folders: str) -> list[str]:
    """Nothing is collected there, which takes seconds, unless an argument names it."""
    return [f"--ignore={Path(__file__).parent / folder}" for folder in folders]


AT_ONCE = str(min(8, 2 * len(os.sched_getaffinity(0))))
"""Of tests that mostly wait: two a core."""

PARTS = {
    "tests of unit and simulated": [
        *("-n", "auto", "-m", "parallel and not drill"),
        *without("processes", "mpi", "drills"),
    ],
    "tests of processes": [
        *("-n", AT_ONCE, "-m", "waiting and not drill"),
        *without("unit", "simulated", "mpi", "drills"),
    ],
    "tests of mpi": [
        # Two files at once: ranks wait for one another more than they compute.
        *("-n", "2", "--dist", "loadfile", "-m", "not parallel and not waiting and not drill"),
        *without("unit", "simulated", "processes", "drills"),
    ],
}
NO_TESTS = 5
"""Exit code of pytest that selects no test, as for a file that is all of another part."""


def main() -> int:
    """The exit code of a part that failed, or 0; NO_TESTS only if no part had any."""
    codes = {
        name: subprocess.run([sys.executable, "-m", "pytest", *part, *sys.argv[1:]]).returncode
        for name, part in PARTS.items()
    }
    for name, code in codes.items():
        if code not in (0, NO_TESTS):
            print(f"{name}: pytest ended with {code}, see above", flush=True)
    return max((code for code in codes.values() if code != NO_TESTS), key=abs, default=NO_TESTS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pytest has said so
        sys.exit(130)
