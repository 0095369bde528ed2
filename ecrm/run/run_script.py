"""A rank running a user's script to its end, and the end of the run after an error in the script.

The rank with the error tells all others. After an error in a slot the rank may leave alone, and
another rank tries the slot once more. After any other error all ranks leave, with the same exit
code.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import logging
import os
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ecrm.base.console import say
from ecrm.base.errors import DataError, EcrmError, ScriptFailed, StrayId, Unrecoverable, UsageError
from ecrm.base.log import SPEAKER
from ecrm.config.script import Script
from ecrm.engine.hooks import StepAborted, StopRequested
from ecrm.model.determinism import prepare_torch, seed_slot
from ecrm.process.gpu import is_lost
from ecrm.process.guard import Guarded
from ecrm.process.stop_signals import StopSignals
from ecrm.run.gather import gather_results
from ecrm.run.inputs import open_data, use_kernels
from ecrm.run.rank_run import RunStopped
from ecrm.run.run_rank import run_rank
from ecrm.run.slot_faults import OF_SLOTS, Place
from ecrm.run.spec import RunSpec
from ecrm.run.this_rank import WITHOUT_GROUPS, ThisRank, be
from ecrm.run.user_code import user_code_of
from ecrm.run.user_frames import own_line, own_traceback


@dataclass(frozen=True)
class ScriptFailure:
    """The failure of a script: a line, and the user's own traceback, "" for no traceback.

    `place` is the place of a slot to be tried on another rank; `None` for no second try. `of_data`:
    the script met damaged data. `unprepared`: the script has not begun.
    """

    problem: str
    traceback: str = ""
    place: Place | None = None
    of_data: bool = False
    unprepared: bool = False

    def raise_it(self) -> NoReturn:
        if self.unprepared and not self.of_data:
            raise UsageError(self.problem)
        raise (DataError if self.of_data else ScriptFailed)(self.problem)

    def show(self) -> None:
        """Print the traceback."""
        with contextlib.suppress(OSError):  # the reader of stderr may be gone
            print(self.traceback, end="", file=sys.stderr, flush=True)


def run_script(spec: RunSpec, guarded: Guarded, stop: StopSignals) -> NoReturn:
    """Run a script as one rank of a run, and end the process: see `run_rank`."""
    quiet_torch()
    _without_input()
    prepare_torch(spec.config.train.threads)
    seed_slot(spec.config.train.seed, 0, 0)  # equal first weights of a model on every rank
    run_rank(
        lambda transport: _run(ThisRank(transport, spec, stop, guarded.calls)),
        guarded,
        stop,
        count_calls=spec.config.cluster.stuck_seconds > 0,
        run_dir=spec.run_dir,
    )


def quiet_torch() -> None:
    """Leave out torch's log message about a renamed function, which torchrec calls."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _without_input() -> None:
    """Give readers of stdin an immediate end of file.

    mpirun gives rank 0 a pipe never written to and never closed.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _run(rank: ThisRank) -> int:
    """Collective: run the script, and end the run. Returns the exit code.

    Raises ScriptFailed on every rank if the script has failed on a rank.
    """
    rank.calls.awaited = False
    be(rank)
    SPEAKER.rank = rank.transport.rank
    try:
        code = _to_the_end(rank)
    except RunStopped as stopped:
        code = int(stopped.code or 0)
    finally:
        if rank.part is not None:
            rank.part.over()
    rank.transport.close()
    return code


def _to_the_end(rank: ThisRank) -> int:
    failure = _prepare(rank) or _execute(rank.script, rank)
    if failure is None and rank.part is None:
        what = (
            "without training: no session.steps() ran"
            if rank.number == 1
            else (f"after session {rank.number - 1}, though another session has begun")
        )
        failure = ScriptFailure(f"{rank.script.typed} has ended {what}")
    if failure is None and rank.unfinished:
        failure = ScriptFailure(rank.unfinished)
    if failure is not None:
        _fail(rank, failure)
    assert rank.part is not None
    code = rank.part.end(sessions=rank.number)
    for begun in rank.begun if code == 0 else ():
        begun.forget()
    return code


def _prepare(rank: ThisRank) -> ScriptFailure | None:
    """Use the kernels and devices, and open the data of a config's run, before the script runs.

    A session moves its module to the device at once.
    """
    try:
        use_kernels(rank.transport, rank.spec.config)
        if rank.script.follows_config:
            open_data(rank.spec.config)
    except EcrmError as error:
        return ScriptFailure(str(error), of_data=isinstance(error, DataError), unprepared=True)
    return None


def _execute(script: Script, rank: ThisRank) -> ScriptFailure | None:
    """Run the script as `python SCRIPT` does; returns the failure, `None` without a failure.

    Raises the errors known to all ranks, and errors to be ended by the death of the rank alone.
    """
    path = str(script.path)
    sys.argv = [path, *script.arguments]
    sys.path.insert(0, str(script.path.absolute().parent))
    try:
        with _argparse_of(first=rank.transport.rank == 0):
            run_as_main(path)
    except RunStopped:
        raise
    except (StepAborted, StopRequested):  # after the loop: the end of the run handles the error
        assert rank.part is not None
        return None
    except SystemExit as error:
        if not error.code:
            return None
        code = error.code
        said = f"exit code {code}" if isinstance(code, int) else str(code)
        return ScriptFailure(_said(rank, f"sys.exit: {said}"))
    except BaseException as error:
        known_to_all = isinstance(error, EcrmError) and error.speaker is not None
        has_line = rank.part is not None and not script.follows_config
        if type(error) is EcrmError and known_to_all and has_line:
            _raise_with_line(rank, error)
        if isinstance(error, Unrecoverable):
            raise
        if known_to_all:
            raise
        if is_lost(error):
            raise  # data on a lost GPU cannot be sent to other ranks
        if rank.met and rank.part is None:
            raise  # the other ranks wait in a call until this rank dies
        return _failed_by(rank, error)
    return None


def run_as_main(path: str) -> None:
    """Run a file as the lasting main module: variables live as long as the process."""
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


def _say_nothing(*_: object) -> None:
    """Print nothing: another rank prints the message."""


@contextlib.contextmanager
def _argparse_of(first: bool) -> Iterator[None]:
    """Let only one rank print argparse messages, such as a usage: all ranks have the same text.

    `first`: whether this rank prints.
    """
    printing = argparse.ArgumentParser._print_message
    if not first:
        argparse.ArgumentParser._print_message = _say_nothing  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser._print_message = printing  # type: ignore[method-assign]


def _failed_by(rank: ThisRank, error: BaseException) -> ScriptFailure:
    """The failure for an error raised by a script.

    The message of an EcrmError names the problem and the remedy: the script's line replaces a
    traceback.
    """
    path, place = rank.script.path, _where_to_retry(rank, error)
    came_from = "" if rank.script.follows_config else own_line(error, str(path))
    if isinstance(error, EcrmError):
        of_data = isinstance(error, DataError) and not isinstance(error, StrayId)
        return ScriptFailure(_said(rank, str(error), came_from), place=place, of_data=of_data)
    last = traceback.format_exception_only(error)[-1].strip()
    if _is_of_groups(error):
        return ScriptFailure(_said(rank, f"{last}: {WITHOUT_GROUPS}", came_from), place=place)
    return ScriptFailure(_said(rank, last), own_traceback(error, str(path)), place)


def _is_of_groups(error: BaseException) -> bool:
    """Whether torch's process groups have raised an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(
        frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        for frame, _ in frames
    )


def _raise_with_line(rank: ThisRank, error: EcrmError) -> NoReturn:
    """Raise the error of a call such as session.save, known to all ranks, with the line."""
    line = own_line(error, str(rank.script.path))
    assert error.speaker is not None
    said = _said(rank, str(error), line)
    raise ScriptFailed.of_rank(error.speaker, error.exit_code, said) from error


def _where_to_retry(rank: ThisRank, error: BaseException) -> Place | None:
    """The slot for another rank to try; `None` for an error expected on any rank."""
    same = not isinstance(error, Exception) or isinstance(error, (UsageError, StrayId))
    if same or not isinstance(rank.place, Place) or rank.place.part not in OF_SLOTS:
        return None
    return rank.place


def _said(rank: ThisRank, problem: str, came_from: str = "") -> str:
    """A failure in one line."""
    place = f" in {rank.place}" if rank.place else ""
    place += f" ({came_from})" if came_from else ""
    line = " ".join(problem.split())
    return f"{rank.script.typed} failed on rank {rank.transport.rank}{place}: {line}"


def _leaves_alone(failure: ScriptFailure, error: EcrmError) -> bool:
    """Whether only this rank ends, after `error` in telling the other ranks of a failure."""
    tried_elsewhere = failure.place is not None and isinstance(error, ScriptFailed)
    return tried_elsewhere and error.speaker is None


def _fail(rank: ThisRank, failure: ScriptFailure) -> NoReturn:
    """End all ranks, or only this rank if another rank is to try the slot.

    Only the rank of the reported failure prints its traceback.
    """
    try:
        if rank.part is not None and failure.place is not None:
            engine = rank.part.engine
            user_code_of(engine).leave(engine, failure.place, failure.problem, failure.of_data)
        if rank.part is not None:
            kind = DataError if failure.of_data else ScriptFailed
            rank.part.engine.recovery.refuse(failure.problem, kind)
        rank.met = True
        gather_results(rank.transport, failure.raise_it)
    except EcrmError as error:
        if error.speaker in (None, rank.transport.rank):
            failure.show()
        if _leaves_alone(failure, error):
            error.told = True
            say(
                f"! {failure.problem}: rank {rank.transport.rank} leaves, and the slot is tried "
                "once more, on another rank",
                on_stderr=True,
            )
        raise
    raise AssertionError("a run went on although its script has failed")
