"""One rank that runs a user's script: the script to its end, and how an error in it ends the run.

The rank on which a script raises tells all others. If that was in a slot, it may leave alone, and
another rank tries the slot once more. Else all leave, with the same exit code.
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

from ecrm.config.script import Script
from ecrm.engine.hooks import StepAborted, StopAgreed
from ecrm.engine.slot_faults import OF_SLOTS, Place
from ecrm.errors import EcrmError, ScriptFailed, StrayId, Unrecoverable, UsageError
from ecrm.model.determinism import prepare_torch, seed_slot
from ecrm.process.gpu import is_lost
from ecrm.process.guard import Guarded
from ecrm.process.run_rank import run_rank
from ecrm.process.stop_signals import StopSignals
from ecrm.rank.check_start import check_kernels
from ecrm.rank.claim import Job
from ecrm.rank.collective_check import collective_check
from ecrm.rank.rank_run import RunStopped
from ecrm.session.own_frames import own_line, own_traceback
from ecrm.session.rank import WITHOUT_GROUPS, ThisRank, be


@dataclass(frozen=True)
class Failure:
    """What a script has failed with: one line, and the user's own traceback, "" for none.

    `place` is that of the slot where another rank may do better; None for no such place.
    """

    problem: str
    traceback: str = ""
    place: Place | None = None

    def raise_it(self) -> NoReturn:
        raise ScriptFailed(self.problem)

    def show(self) -> None:
        """Print the traceback."""
        _say(self.traceback, end="")


def _say(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError):  # where nobody reads any more
        print(text, end=end, file=sys.stderr, flush=True)


def run_script(script: Script, job: Job, guarded: Guarded, stop: StopSignals) -> NoReturn:
    """Be one rank of a run of a script, and end the process: see `run_rank`."""
    # torchrec calls a function of torch that tells of its own renaming on each rank
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    _without_input()
    prepare_torch(job.config.train.threads)
    seed_slot(job.config.train.seed, 0, 0)  # a model draws its first weights alike everywhere
    run_rank(
        lambda transport: _run(ThisRank(transport, job, script, stop, guarded.calls)),
        guarded,
        stop,
        count_calls=job.config.cluster.stuck_seconds > 0,
        run_dir=job.run_dir,
    )


def _without_input() -> None:
    """Have whatever reads from stdin find its end.

    mpirun gives rank 0 a pipe that nobody writes to or closes.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _run(rank: ThisRank) -> int:
    """Collective: the script, and the end of the run. Returns the exit code.

    Raises ScriptFailed on every rank where the script has failed on one.
    """
    rank.calls.awaited = False
    check_kernels(rank.transport, rank.job.config)  # a module goes to its device as it is made
    be(rank)
    try:
        code = _to_the_end(rank)
    except RunStopped:
        code = 0
    finally:
        if rank.part is not None:
            rank.part.over()
    rank.transport.close()
    return code


def _to_the_end(rank: ThisRank) -> int:
    failure = _execute(rank.script, rank)
    if failure is None and rank.part is None:
        failure = Failure(f"{rank.script.path} has ended without training: no session.steps() ran")
    if failure is None and rank.unfinished:
        failure = Failure(rank.unfinished)
    if failure is not None:
        _fail(rank, failure)
    assert rank.part is not None
    code = rank.part.end()
    for begun in rank.begun if code == 0 else ():
        begun.forget()
    return code


def _execute(script: Script, rank: ThisRank) -> Failure | None:
    """Run the script as `python SCRIPT` does, and return what it failed with, None for nothing.

    Raises the errors that all ranks have.
    """
    path = str(script.path)
    sys.argv = [path, *script.arguments]
    sys.path.insert(0, str(script.path.absolute().parent))
    try:
        with _argparse_of(first=rank.transport.rank == 0):
            _run_as_main(path)
    except RunStopped:
        raise
    except (StepAborted, StopAgreed):  # after its loop: the end of the run sees to it
        assert rank.part is not None
        return None
    except SystemExit as error:
        if not error.code:
            return None
        code = error.code
        said = f"exit code {code}" if isinstance(code, int) else str(code)
        return Failure(_said(rank, f"sys.exit: {said}"))
    except BaseException as error:
        if type(error) is EcrmError and rank.part is not None and error.speaker is not None:
            _raise_with_line(rank, error)
        if isinstance(error, Unrecoverable):
            raise
        if isinstance(error, EcrmError) and error.speaker is not None:
            raise
        if is_lost(error):
            raise  # nothing that this rank has on its GPU can be told to others
        if rank.met and rank.part is None:
            raise  # the others wait for this rank in a call that only its death ends
        return _failed_by(rank, error)
    return None


def _run_as_main(path: str) -> None:
    """Run a file as the main module, which it stays: its variables live as long as the process."""
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


def _say_nothing(*_: object) -> None:
    """Another rank says it."""


@contextlib.contextmanager
def _argparse_of(first: bool) -> Iterator[None]:
    """Let one rank alone print what argparse has to say, such as a usage: all have the same words.

    `first`: this rank is the one.
    """
    printing = argparse.ArgumentParser._print_message
    if not first:
        argparse.ArgumentParser._print_message = _say_nothing  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser._print_message = printing  # type: ignore[method-assign]


def _failed_by(rank: ThisRank, error: BaseException) -> Failure:
    """What an error that a script has raised comes to.

    An EcrmError says itself what is wrong and what would be right: the line that it came from
    stands in for a traceback.
    """
    path, place = rank.script.path, _where_to_retry(rank, error)
    if isinstance(error, EcrmError):
        return Failure(_said(rank, str(error), own_line(error, str(path))), place=place)
    last = traceback.format_exception_only(error)[-1].strip()
    if _is_of_groups(error):
        line = own_line(error, str(path))
        return Failure(_said(rank, f"{last}: {WITHOUT_GROUPS}", line), place=place)
    return Failure(_said(rank, last), own_traceback(error, str(path)), place)


def _is_of_groups(error: BaseException) -> bool:
    """Whether torch's process groups have raised an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(
        frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        for frame, _ in frames
    )


def _raise_with_line(rank: ThisRank, error: EcrmError) -> NoReturn:
    """Raise what a call such as session.save has raised on all ranks, with the script's line."""
    line = own_line(error, str(rank.script.path))
    told = ScriptFailed(_said(rank, str(error), line))
    told.exit_code, told.speaker = error.exit_code, error.speaker
    raise told from error


def _where_to_retry(rank: ThisRank, error: BaseException) -> Place | None:
    """The slot that another rank is to try; None where the error would be the same there."""
    same = not isinstance(error, Exception) or isinstance(error, (UsageError, StrayId))
    if same or not isinstance(rank.place, Place) or rank.place.part not in OF_SLOTS:
        return None
    return rank.place


def _said(rank: ThisRank, problem: str, came_from: str = "") -> str:
    """A failure in one line."""
    place = f" in {rank.place}" if rank.place else ""
    place += f" ({came_from})" if came_from else ""
    line = " ".join(problem.split())
    return f"{rank.script.path} failed on rank {rank.transport.rank}{place}: {line}"


def _leaves_alone(failure: Failure, error: EcrmError) -> bool:
    """Whether this rank ends and the others go on, after `error` in telling them of a failure."""
    tried_elsewhere = failure.place is not None and isinstance(error, ScriptFailed)
    return tried_elsewhere and error.speaker is None


def _fail(rank: ThisRank, failure: Failure) -> NoReturn:
    """Have all ranks end, or this one alone where another is to try the slot.

    The traceback is printed by the rank whose failure it is that counts.
    """
    try:
        if rank.part is not None and failure.place is not None:
            rank.part.engine.recovery.leave(failure.place, failure.problem)
        if rank.part is not None:
            rank.part.engine.recovery.refuse(failure.problem, ScriptFailed)
        rank.met = True
        collective_check(rank.transport, failure.raise_it)
    except EcrmError as error:
        if error.speaker in (None, rank.transport.rank):
            failure.show()
        if _leaves_alone(failure, error):
            error.told = True
            _say(
                f"! {failure.problem}: rank {rank.transport.rank} leaves, and the slot is tried "
                "once more, on another rank"
            )
        raise
    raise AssertionError("a run went on although its script has failed")
