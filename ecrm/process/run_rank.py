"""The life of a rank's process: MPI comes up, the rank works, and it ends so that nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ecrm.errors import DataError, EcrmError, NotKept, ScriptFailed, StrayRow, Unrecoverable
from ecrm.process.counted_transport import CountedTransport
from ecrm.process.farewell import take_leave
from ecrm.process.gpu import fault_in_words, say_fault
from ecrm.process.guard import Guarded
from ecrm.process.memory import keep_freed_memory
from ecrm.process.orphaned import leave_no_memory
from ecrm.process.preflight import say_once
from ecrm.process.startup import THE_START
from ecrm.process.stop_signals import StopSignals
from ecrm.run.reading import launch_id
from ecrm.run.run_folder import RunFolder
from ecrm.transport.base import Transport
from ecrm.transport.mpi import MpiTransport

LAST_WORDS_SECONDS = 5.0
"""How long a rank that ends because of an error waits for the others before it kills itself."""


def run_rank(
    work: Callable[[Transport], int],
    guarded: Guarded,
    stop: StopSignals,
    count_calls: bool,
    run_dir: Path | None,
) -> NoReturn:
    """Connect this rank, run `work(transport)`, and end the process with the code that it returns.

    `count_calls`: the guard learns of every call to other ranks. An error that all ranks have is
    told once, and its exit code is that of every rank; where the run is lost, `run_dir` gets a
    failure.json. On any other error the rank kills itself, and the others go on without it.

    Does not return: after a failure MPI cannot be finalised safely, so the process leaves by
    `os._exit`, after what Python does as a program ends (`take_leave`).
    """
    keep_freed_memory()
    transport: Transport | None = None
    guarded.loaded()
    try:
        transport = mpi = MpiTransport()
        mpi.pulse = guarded.pulse
        guarded.up()
        if count_calls:
            transport = CountedTransport(transport, guarded.calls)
        code = work(transport)
    except EcrmError as error:
        code = _end_by(error, transport, run_dir)
    except BaseException as error:
        if transport is not None and (fault := fault_in_words(error)) is not None:
            say_fault(transport.rank, fault)
            _die()
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        _die()
    with contextlib.suppress(OSError):  # where the terminal is gone
        sys.stdout.flush()
        sys.stderr.flush()
    if stop.orphaned:
        leave_no_memory()
    guarded.done()
    take_leave(code, 0 if transport is None else transport.rank)
    os._exit(code)


def _end_by(error: EcrmError, transport: Transport | None, run_dir: Path | None) -> int:
    """The exit code for an error, which has been told; a rank that alone has it dies here."""
    if transport is None:
        say_once(f"ecrm: error: {error}", about=THE_START)
        return error.exit_code
    if isinstance(error, Unrecoverable) or error.speaker is not None:
        return _leave_together(error, transport, run_dir)
    with contextlib.suppress(OSError):  # where nobody reads any more
        if not error.told:
            print(f"ecrm: error: {error}", file=sys.stderr, flush=True)
    _die()  # nobody else has it: the others must see this rank die


def _leave_together(error: EcrmError, transport: Transport, run_dir: Path | None) -> int:
    """An error that all ranks have: say why, once, and leave together with its code."""
    if transport.rank == (transport.live[0] if error.speaker is None else error.speaker):
        say_why(error, run_dir)
    timer = threading.Timer(LAST_WORDS_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    transport.close()
    timer.cancel()  # what a script's own handlers take has a limit of its own
    return error.exit_code


def say_why(error: EcrmError, run_dir: Path | None) -> None:
    """The last word of a run, in its folder too. Others come before a folder is this run's."""
    if run_dir is not None and isinstance(
        error, (Unrecoverable, DataError, StrayRow, ScriptFailed)
    ):
        RunFolder(run_dir).failure(str(error), error.exit_code)
    if isinstance(error, NotKept) and launch_id() is not None:
        return  # the launch says it, after all that ranks say
    with contextlib.suppress(OSError):  # where nobody reads any more
        print(f"ecrm: error: {error}", file=sys.stderr, flush=True)


def _die() -> NoReturn:
    """End so that everybody notices."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
