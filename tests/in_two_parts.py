"""`make test`: first tests/unit and tests/simulated, a process per core; then tests/mpi, one by one.

conftest.py marks the first `parallel`. All arguments go to pytest in both parts.
"""

from __future__ import annotations

import subprocess
import sys

PARTS = (["-n", "auto", "-m", "parallel and not drill"], ["-m", "not parallel and not drill"])
NO_TESTS = 5
"""How pytest ends that was to run none, as where a file is named that is all of one part."""


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
