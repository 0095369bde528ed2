"""The `ecrm` command and Python programs, as processes of their own."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ecrm.launch.mpirun_command import HASH_SEED

ECRM = [sys.executable, "-m", "ecrm"]


def ecrm(*words: str, timeout: float = 60, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*ECRM, *words], capture_output=True, text=True, timeout=timeout, **options
    )


def forked(
    words: Sequence[str],
    timeout: float = 60,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """A program without the seconds of imports: torch and TorchRec are there when it begins.

    Args:
        words: as after `python`: `-m MODULE`, `-c TEXT` or the path of a script, and arguments.
        timeout: seconds.
        cwd: the working directory; by default this process's.
        env: all variables; by default this process's.

    Returns:
        As `subprocess.run(..., capture_output=True, text=True)`. The process is a fork of a
        process that has imported modules and computed nothing. So a test of imports, of threads or
        of variables read by Python itself needs a process of its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pytest", "ecrm.session.session", "torchrec"])
    variables = {HASH_SEED: "0", **(os.environ if env is None else env)}  # else ecrm restarts
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        given = (list(words), str(cwd or os.getcwd()), variables, *map(str, files))
        process = context.Process(target=_run, args=given)
        process.start()
        process.join(timeout)
        said = [file.read_text() for file in files]
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout, *said)
        return subprocess.CompletedProcess(list(words), process.exitcode, *said)


def forked_ecrm(*words: str, **options) -> subprocess.CompletedProcess:
    """As `ecrm`, by `forked`."""
    return forked(["-m", "ecrm", *words], **options)


def _run(words: list[str], cwd: str, env: dict[str, str], *files: str) -> None:
    """Become the program: its streams, variables, folder and arguments; end with its exit code."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    code: object = 0
    try:
        _program(words)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _program(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def dry_run(data: Path, *words: str, **options) -> subprocess.CompletedProcess:
    """`ecrm launch tiny --dry-run` on a dataset."""
    return forked_ecrm(
        "launch", "tiny", "--dry-run", "--set", f"data.path={data}", *words, **options
    )


def assert_one_line(done: subprocess.CompletedProcess, said: str, code: int = 2) -> None:
    assert done.returncode == code
    assert done.stderr.startswith("ecrm: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
