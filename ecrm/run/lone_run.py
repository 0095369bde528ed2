"""A session's run in this process alone: a single rank does everything, without protection.

`python train.py` and a notebook get this kind of run. The model ends with the same bits as under
`ecrm launch`, if the weights are the same at the start.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping

from ecrm.base.console import say
from ecrm.base.errors import UsageError
from ecrm.base.log import SPEAKER, print_from
from ecrm.config.schema import TrainConfig
from ecrm.engine.engine import Engine
from ecrm.engine.events import EndedEarly, Event, Terms
from ecrm.engine.hooks import EnginePolicy, Hooks
from ecrm.model.determinism import prepare_torch
from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import row_spaces
from ecrm.process.linux import memory_bytes
from ecrm.protection.none import NoProtection
from ecrm.run.finite import FiniteWatch
from ecrm.run.loaded_files import check_names
from ecrm.run.memory_check import judged, reserve, shard_bytes
from ecrm.run.reporter import Make
from ecrm.run.session_progress import SessionProgress
from ecrm.run.session_run import REMEDY
from ecrm.run.started import Started, Wanted
from ecrm.run.this_rank import script_name
from ecrm.run.user_code import UserCode
from ecrm.transport.alone import LoneTransport

PROCESSES = {
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",
    "torchrun": "WORLD_SIZE",
}
"""By launcher, the environment variable with the number of processes started."""
CHECK = "--check-determinism"


def run_alone(wanted: Wanted) -> Started:
    """Begin a run in this process, with a warning on stderr.

    From now on torch uses a single thread and deterministic algorithms, as on every rank. Raises
    UsageError if a launcher started several processes: every process would train its own model.
    """
    _check_alone(os.environ)
    print_from(os.environ)
    SPEAKER.rank, SPEAKER.step = 0, None
    _warn(
        "this process trains alone, and nothing is protected; "
        f"protected is what is started by ecrm launch {script_name()}"
    )
    if CHECK in sys.argv and wanted.check_steps < 2:
        _warn(
            f"{CHECK} is an option of ecrm launch, and is not heeded here: type "
            "Session(check_determinism=3) in the script"
        )
    if wanted.keeps_best:
        _warn("session.every(keep_best=True) keeps no model here, where there is no run folder")
    _check_memory(wanted)
    check_names(wanted.tables)
    defaults = TrainConfig()
    prepare_torch(defaults.threads)
    run = LoneRun(wanted, defaults.log_every_steps)
    return Started(run, check_steps=wanted.check_steps, number=next(_numbers))


_numbers = itertools.count(1)
"""Numbers of the sessions of this process, in the order of their beginnings."""


def _warn(text: str) -> None:
    say(f"ecrm: warning: {text}", on_stderr=True)


def _check_memory(wanted: Wanted) -> None:
    """Warn if the tables may outgrow the memory.

    Raises UsageError if the system refuses the memory for the rows.
    """
    spaces, shape, host = row_spaces(wanted.tables), NoProtection(shards=1).shape, "this machine"
    needed = {host: shard_bytes(spaces, shape, padded=False)}
    if lacking := judged(needed, {host: memory_bytes()[1]}, prefault=False):
        _warn(lacking.replace("with --hosts", "with ecrm launch --hosts"))
    reserve(spaces, shape, 1, host)


def _at_step(step: int, phase: str) -> None:
    SPEAKER.step = step


def _tell(told: Event) -> None:
    """Print the event of an early end of training; a lone rank prints no more events."""
    if isinstance(told, EndedEarly):
        say(told.line(Terms()))


def _say(step: int, make: Make) -> bool:
    """Print the line of a progress."""
    if line := make()[1]:
        say(line)
    return True


def _check_alone(environ: Mapping[str, str]) -> None:
    for launcher, variable in PROCESSES.items():
        started = environ.get(variable, "1")
        if started != "1":
            raise UsageError(
                f"this script was started {started} times by {launcher} and without ecrm",
                otherwise=f"type ecrm launch {script_name()}",
            )


class LoneRun:
    """A run (`ecrm.run.step_loop.Run`) of a single rank, hosting the only shard and all slots.

    Every step is committed. A line of progress is printed every `every` steps.
    """

    def __init__(self, wanted: Wanted, every: int) -> None:
        protection = NoProtection(shards=1)
        watch = FiniteWatch(True, every, lambda told: None, remedy=REMEDY)
        self.engine = Engine(
            LoneTransport(),
            wanted.tables,
            initial_view("colocated", protection.shape, 1, 0, wanted.slots, 1),
            protection,
            SparseOptimizer("sgd", 0.0),  # tables have own optimizers
            wanted.make_dense,
            wanted.seed,
            EnginePolicy(),
            Hooks(
                _at_step,
                _tell,
                troubled=watch.losses,
                skipped=watch.skipped,
                inquest=UserCode(),
            ),
            sparse_rate=wanted.sparse_rate,
            wire_dtype=wanted.wire_dtype,
            slots_on=wanted.device,
        )
        self.progress = SessionProgress(wanted.steps, every, _say, wanted.open_end)

    def between_steps(self) -> None:
        """Do nothing: no work is due."""

    def troubles_to_report(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """Return all troubles: the first trouble ends the run."""
        return troubles

    def restart_clock(self) -> None:
        """Leave the time since the last step, spent on an evaluation, out of the step times."""
        self.progress.restart_clock()

    def step_finished(self) -> None:
        """Count a finished step, and print progress when due."""
        self.progress.step_finished(self.engine)

    def keep_best(self) -> None:
        """Do nothing: a lone run has no run folder, as the warning at the start said."""

    def keep(self) -> None:
        """Do nothing: the last step is committed, as all steps are."""

    def on_recovery(self) -> None:
        raise AssertionError("no failure undoes a step of a lone rank")

    def stop(self) -> None:
        raise AssertionError("nobody asks a lone rank to stop")
