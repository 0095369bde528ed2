"""Runs `make test` in parts: tests that compute, beside them tests that wait, then MPI two by two.

conftest.py marks tests by their folder. All arguments go to pytest in every part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO


def without(*folders: str) -> list[str]:
    """Nothing is collected there, which takes seconds, unless an argument names it."""
    return [f"--ignore={Path(__file__).parent / folder}" for folder in folders]


BESIDE = "tests of processes"
"""The part that runs beside the first part, and prints its output after the first part."""

MOST_AT_ONCE = str(1 + len(os.sched_getaffinity(0)))
"""Of tests that mostly compute: one a core, and one while others wait for files and children."""

PARTS = {
    "tests of unit and simulated": [
        *("-n", MOST_AT_ONCE, "-m", "parallel and not drill"),
        *without("processes", "mpi", "drills"),
    ],
    BESIDE: [
        *("-n", "auto", "-m", "waiting and not drill"),
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


def started(name: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """pytest on a part."""
    words = [sys.executable, "-m", "pytest", *PARTS[name], *sys.argv[1:]]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL if output else None, stdout=output)


def main() -> int:
    """The exit code of a part that failed, or 0; NO_TESTS only if no part had any."""
    codes: dict[str, int] = {}
    with tempfile.TemporaryFile("w+") as output:
        beside = started(BESIDE, output)
        for name in PARTS:
            codes[name] = (beside if name == BESIDE else started(name)).wait()
            if name == BESIDE:
                output.seek(0)
                print(output.read(), end="", flush=True)
    for name, code in codes.items():
        if code not in (0, NO_TESTS):
            print(f"{name}: pytest ended with {code}, see above", flush=True)
    return max((code for code in codes.values() if code != NO_TESTS), key=abs, default=NO_TESTS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pytest has said so
        sys.exit(130)
