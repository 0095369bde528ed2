"""The life of a rank's process: MPI comes up, the rank works, the process ends without a hang."""

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

from ecrm.base.console import say
from ecrm.base.errors import DataError, EcrmError, NotKept, ScriptFailed, StrayRow, Unrecoverable
from ecrm.process.counted_transport import CountedTransport
from ecrm.process.farewell import LAST_WORDS_SECONDS, take_leave
from ecrm.process.gpu import fault_in_words, say_fault
from ecrm.process.guard import Guarded
from ecrm.process.memory import keep_freed_memory
from ecrm.process.orphaned import leave_no_memory
from ecrm.process.preflight import say_once
from ecrm.process.startup import THE_START
from ecrm.process.stop_signals import StopSignals
from ecrm.run.joining import LIFE, link_transport
from ecrm.run.reading import launch_id
from ecrm.run.run_folder import RunFolder
from ecrm.transport.base import Transport
from ecrm.transport.membership_socket import LINKS
from ecrm.transport.mpi import MpiTransport


def run_rank(
    work: Callable[[Transport], int],
    guarded: Guarded,
    stop: StopSignals,
    count_calls: bool,
    run_dir: Path | None,
) -> NoReturn:
    """Connect this rank, run `work(transport)`, and end the process with the code of `work`.

    `count_calls`: the guard learns of every call to other ranks. An error common to all ranks is
    told once, and every rank ends with the error's exit code; if the run is lost, `run_dir` gets a
    failure.json. On any other error the rank kills itself, and the other ranks go on without the
    rank.

    Does not return: after a failure MPI cannot be finalised safely, and the process leaves by
    `os._exit`, after the work of Python at a program's end (`take_leave`).
    """
    keep_freed_memory()
    transport: Transport | None = None
    guarded.loaded()
    try:
        transport = _transport()
        transport.pulse = guarded.pulse
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
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    if stop.orphaned:
        leave_no_memory()
    guarded.done(code)
    take_leave(code, 0 if transport is None else transport.rank)
    os._exit(code)


def _transport() -> Transport:
    """Links, without MPI, if the launch has a head, as over several hosts; else MPI.

    A process started by the rank does not get the rendezvous: the process is no rank of the run.
    """
    if (text := os.environ.pop(LINKS, None)) is None:
        return MpiTransport()
    return link_transport(text, os.environ.pop(LIFE, ""))


def _end_by(error: EcrmError, transport: Transport | None, run_dir: Path | None) -> int:
    """Tell an error and return its exit code; a rank alone with the error dies here."""
    if transport is None:
        say_once(f"ecrm: error: {error}", about=THE_START)
        return error.exit_code
    if isinstance(error, Unrecoverable) or error.speaker is not None:
        return _leave_together(error, transport, run_dir)
    if not error.told:
        say(f"ecrm: error: {error}", on_stderr=True)
    _die()  # only this rank has the error: the others must see the rank die


def _leave_together(error: EcrmError, transport: Transport, run_dir: Path | None) -> int:
    """After an error common to all ranks: tell the error once, leave, return the exit code."""
    if transport.rank == (transport.live[0] if error.speaker is None else error.speaker):
        say_why(error, run_dir)
    timer = threading.Timer(LAST_WORDS_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    transport.close()
    timer.cancel()  # a script's own handlers have a separate time limit
    return error.exit_code


def say_why(error: EcrmError, run_dir: Path | None) -> None:
    """Print the last error of a run, and write the error into the run folder.

    Only errors raised after the run has taken its folder are written.
    """
    if run_dir is not None and isinstance(
        error, (Unrecoverable, DataError, StrayRow, ScriptFailed)
    ):
        RunFolder(run_dir).failure(str(error), error.exit_code)
    if isinstance(error, NotKept) and launch_id() is not None:
        return  # the launch prints the error, after all lines of ranks
    say(f"ecrm: error: {error}", on_stderr=True)


def _die() -> NoReturn:
    """End by SIGKILL, noticed by all."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
