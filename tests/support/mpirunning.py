"""Runs a Python program of `tests/support/programs` under a real fault-tolerant mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from ecrm.launch.supervise import session_base


def mpirun(ranks: int, program: Path, *arguments: object, seconds: float = 120) -> str:
    """What the run printed; its processes are gone on return.

    mpirun's exit code says nothing: look at what the run left.
    """
    beside = Path(sys.executable).with_name("mpirun")
    words = [
        str(beside) if beside.exists() else str(shutil.which("mpirun")),
        "--with-ft",
        "ulfm",
        "--oversubscribe",
    ]
    words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words += ["-n", str(ranks), sys.executable, str(program), *map(str, arguments)]
    with session_base() as variables:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(
                f"not finished after {seconds} s: {' '.join(words)}\n{output}"
            ) from None
    return output
