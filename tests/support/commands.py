"""The `ecrm` command as a process of its own."""

import subprocess
import sys
from pathlib import Path

ECRM = [sys.executable, "-m", "ecrm"]


def ecrm(*words: str, timeout: float = 60, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*ECRM, *words], capture_output=True, text=True, timeout=timeout, **options
    )


def dry_run(data: Path, *words: str, **options) -> subprocess.CompletedProcess:
    """`ecrm launch tiny --dry-run` on a dataset."""
    return ecrm("launch", "tiny", "--dry-run", "--set", f"data.path={data}", *words, **options)


def assert_one_line(done: subprocess.CompletedProcess, said: str, code: int = 2) -> None:
    assert done.returncode == code
    assert done.stderr.startswith("ecrm: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
