"""The `ecrm` command as a process of its own."""

import subprocess
import sys

ECRM = [sys.executable, "-m", "ecrm"]


def ecrm(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*ECRM, *words], capture_output=True, text=True, timeout=60, **options)


def assert_one_line(done: subprocess.CompletedProcess, said: str, code: int = 2) -> None:
    assert done.returncode == code
    assert done.stderr.startswith("ecrm: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
