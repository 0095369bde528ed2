"""Run fault schedules on the real engine over the simulated transport, with checkers."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ecrm.base.errors import Unrecoverable, UsageError
from ecrm.engine import events
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.kernels import dispatch
from ecrm.model.determinism import prepared_torch
from ecrm.run.slot_faults import ON_ALL
from ecrm.testing.simulate.checkers import Checkers
from ecrm.testing.simulate.oracle import Truth, truth_of
from ecrm.testing.simulate.promise import Circle, Violation, exact_without, survivable
from ecrm.testing.simulate.refusals import Refusal, check_refusals
from ecrm.testing.simulate.schedule import Schedule
from ecrm.testing.simulate.seen import check_seen
from ecrm.testing.simulate.workload import TINY, Job, Outcome, Workload
from ecrm.testing.simulated_transport import (
    LinkCluster,
    ProgramFailed,
    RandomFaults,
    RankKilled,
    SimulatedCluster,
    SimulationError,
)
from ecrm.transport.base import Transport

if TYPE_CHECKING:
    from ecrm.testing.simulate.session_job import SessionJob

MOST_CALLS = 200_000

IN_SCRIPT = 0.03
"""Chance of a rank's death at a function of the script called by all ranks."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one schedule: deaths, recoveries, reshapes, and numbers of checks.

    `refused` is the text of a refusal after a fatal death, `None` for a finished run. `mix` counts
    faults and traits by kind.
    """

    schedule: Schedule
    deaths: int
    recoveries: int
    reshapes: int
    commits: int
    calls: int
    rows_checked: int
    parity_rows_checked: int
    refused: str | None
    mix: Counter[str]

    def then(self, later: Verdict) -> Verdict:
        """The sum of this verdict and the verdict of the resumed run."""
        counts = (
            "deaths",
            "recoveries",
            "reshapes",
            "commits",
            "calls",
            "rows_checked",
            "parity_rows_checked",
        )
        both = {name: getattr(self, name) + getattr(later, name) for name in counts}
        traits = Counter(_traits(self.schedule))
        return replace(later, **both, mix=self.mix + later.mix - traits)


class Failed(Exception):
    """A schedule broke a promise; the message names the promise.

    `caught`: whether a checker found the error, and not a mere crash of the program.
    """

    def __init__(self, message: str, caught: bool) -> None:
        super().__init__(message)
        self.caught = caught


def run_schedule(schedule: Schedule, breaks: Callable[[Engine], None] | None = None) -> Verdict:
    """Run one schedule to its end; raises Failed for a broken promise.

    `breaks` damages every new engine, for canaries.
    """
    if schedule.model is None:
        return _run(schedule, breaks, TINY, TINY)
    # the import of torchrec takes seconds, and calls a function of torch that warns of a new name
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    from ecrm.testing.simulate.session_job import SessionJob

    with (
        prepared_torch(threads=1),
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stdout(io.StringIO()),  # lines of ranks
    ):
        folder, model = Path(name), schedule.model
        for each in "alone", "disturbed", "mapped":
            (folder / each).mkdir()
        workload = replace(schedule.workload, folder=str(folder / "mapped"))
        later = replace(schedule.later or workload, folder=workload.folder)
        kept = folder / "checkpoints" if model.checkpoints else None

        def run(workload: Workload, steps: int, before: SessionJob | None) -> Verdict:
            true = SessionJob(model, folder / "alone")
            job = SessionJob(model, folder / "disturbed", kept, resumes=before is not None)
            life = replace(schedule, workload=replace(workload, steps=steps))
            found = _run(life, breaks, true, job, lambda: _check_script(life, true, job, before))
            jobs.append(job)
            return replace(found, schedule=schedule)  # without the name of a folder

        jobs: list[SessionJob] = []

        if model.hides:
            (folder / "hides").mkdir()
            # the determinism check compares no slot with a skipped batch
            twin = replace(model, loads="", skips=False, checks=max(model.checks, 1))
            check_hidden_state(workload, SessionJob(twin, folder / "hides", hides=model.hides))
        if not model.stops:
            return run(workload, workload.steps, None)
        first = run(workload, model.stops, None)
        if first.refused is not None:
            return first
        return first.then(run(later, workload.steps, jobs[0]))


def check_hidden_state(workload: Workload, job: SessionJob) -> None:
    """Raise Failed unless an undisturbed run on one rank refuses a script with hidden state."""
    try:
        truth_of(replace(workload, skip_undo=False), job=job)
    except UsageError:
        return
    except ProgramFailed as error:
        if all(isinstance(each, UsageError) for each in error.errors.values()):
            return
        raise
    raise Failed(f"a script with {job.hides} hidden on its model was trained", caught=True)


def _check_script(
    schedule: Schedule, true: SessionJob, job: SessionJob, before: SessionJob | None
) -> None:
    """Compare the scripts' observations and files with the undisturbed run; raises Violation.

    `before` is the job of the stopped run, if `job` goes on from the checkpoints of that run.
    """
    assert schedule.model is not None
    began, steps = 0, len(true.seen[0].logged)
    wrong = job.refused - true.nonfinite
    if wrong:
        raise Violation(f"checkpoints of steps {sorted(wrong)} were refused, but are finite")
    if job.began:
        assert before is not None
        began = first_step(job.began, min(schedule.model.stops, steps), before)
    check_seen(job.seen, true.seen[0], schedule.workload.initial_view().dense, began)
    left = [file.name for file in job.folder.iterdir()]
    if len(left) != len({mine.saved for mine in job.seen.values() if mine.saved}):
        raise Violation(f"where the model was saved there is {left}")


def first_step(began: Collection[int], stopped: int, before: SessionJob) -> int:
    """The step from which all resumed ranks went on; raises Violation for a wrong step.

    A run stopped after `stopped` steps goes on from there. A checkpoint with a nonfinite number is
    refused: the run then goes on from the newest earlier checkpoint.
    """
    step = max(began)
    newest = max((each for each in before.kept if each <= stopped), default=0)
    earlier = stopped in before.refused and newest <= step
    if len(set(began)) > 1 or not (step == stopped or (earlier and step < stopped)):
        raise Violation(f"after {stopped} steps ranks went on from steps {sorted(began)}")
    return step


def _run(
    schedule: Schedule,
    breaks: Callable[[Engine], None] | None,
    true: Job,
    job: Job,
    check: Callable[[], None] = lambda: None,
) -> Verdict:
    """Run a schedule of `job`; `true` is the same job, for the undisturbed run.

    `check` runs after a finished run, and raises Violation for further errors.
    """
    workload = schedule.workload
    rng = random.Random(f"faults {schedule.suite} {schedule.seed}")
    # a separate generator: the draws of earlier versions stay equal for every seed
    rng_in_script = random.Random(f"faults in scripts {schedule.suite} {schedule.seed}")
    died_in_script: dict[tuple[int, str], int] = {}
    truth = truth_of(replace(workload, skip_undo=False), job=true)
    engines: dict[int, Engine] = {}
    # ranks with a decided death; the death may come some calls later
    doomed: set[int] = set()
    condemned: set[int] = set()
    # ranks that have come back, and have no part in the view yet: their death costs nothing
    joining: set[int] = set()
    # (servers, k) after a reshape; every reshape has fewer servers or a smaller k
    reshapes: set[tuple[int, int]] = set()
    start = Circle(workload.servers * workload.shards_per_server, workload.k, workload.m)
    together = workload.layout == "colocated"
    checkers = Checkers(engines, doomed, truth, workload.reshape, start, together)
    reported: list[dict[str, str]] = []
    alarms: list[events.Corruption] = []
    refusals: list[Refusal] = []
    fatal_left = [1 if schedule.fatal else 0]

    def may_kill(rank: int, killed: tuple[int, ...]) -> bool:
        allowed = rank not in doomed and (
            rank in joining
            or (
                survivable(workload, engines, doomed | joining, rank)
                and exact_without(workload, engines, rank)
            )
        )
        if (
            not allowed
            and rank not in doomed
            and fatal_left[0]
            and len(doomed) + 1 < workload.world_size
        ):
            fatal_left[0] -= 1
            allowed = True
        if allowed:
            doomed.add(rank)
            if workload.domains and rng.random() < schedule.together:
                host_dies(rank)
        return allowed

    def host_dies(rank: int) -> None:
        """Condemn the remaining ranks of a dying rank's host, to die at their next phase."""
        domains = workload.domains or ()
        for mate, domain in enumerate(domains):
            if (
                domain == domains[rank]
                and mate not in doomed
                and survivable(workload, engines, doomed | joining, mate)
            ):
                doomed.add(mate)
                condemned.add(mate)
                cluster.mix["deaths with the rest of a host"] += 1

    def in_script(rank: int, step: int, part: str) -> None:
        """Perhaps kill the rank at a script's function called by all ranks, at one epoch only.

        A second death at the same function and step, at a later epoch, ends the run.
        """
        epoch = engines[rank].view.epoch
        if died_in_script.get((step, part), epoch) != epoch:
            return
        drawn = len(doomed) < schedule.deaths and rng_in_script.random() < IN_SCRIPT
        if rank in condemned or (drawn and may_kill(rank, ())):
            died_in_script[step, part] = epoch
            cluster.mix[f"deaths in {part}"] += 1
            raise RankKilled

    def on_phase(rank: int, step: int, phase: str) -> None:
        if phase in ON_ALL:
            return in_script(rank, step, phase)
        if rank in condemned:
            raise RankKilled
        if (
            len(doomed) < schedule.deaths
            and rng.random() < schedule.phase_death
            and may_kill(rank, ())
        ):
            raise RankKilled

    def on_return(rank: int) -> None:
        doomed.discard(rank)
        condemned.discard(rank)
        joining.add(rank)

    def may_lose(ranks: list[int]) -> bool:
        """Whether all these ranks may die together; they are doomed then."""
        gone: set[int] = set()
        for rank in set(ranks) - doomed - joining:
            if not survivable(workload, engines, doomed | joining | gone, rank):
                return False
            gone.add(rank)
        doomed.update(gone)
        return all(exact_without(workload, engines, rank) for rank in gone)

    faults = RandomFaults(
        most=schedule.deaths,
        per_call=schedule.call_death,
        per_recovery_call=schedule.cascade,
        together=schedule.together,
        lost_touch=schedule.lost_touch,
        may_kill=may_kill,
        returns=schedule.returns,
    )
    make: Callable[..., SimulatedCluster] = SimulatedCluster
    if schedule.network is not None:
        make = partial(
            LinkCluster, hosts=workload.domains, network=schedule.network, may_lose=may_lose
        )
    cluster = make(
        workload.world_size,
        f"{schedule.suite} {schedule.seed}",
        faults,
        on_phase=on_phase,
        on_return=on_return,
        most_calls=MOST_CALLS,
    )

    def note(told: events.Event) -> None:
        if isinstance(told, events.Reshaped):
            reshapes.add((told.servers, told.k))
        elif isinstance(told, events.Corruption):
            alarms.append(told)

    def program(transport: Transport) -> Outcome | Unrecoverable:
        rank = transport.rank

        def started(engine: Engine) -> None:
            engines[rank] = engine
            joining.discard(rank)
            circle = Circle.of(engine.state.protection.shape)
            if transport.joined:
                checkers.joined(rank)
            elif circle != start:
                raise Violation(f"rank {rank} begins with {circle}")
            if breaks is not None:
                breaks(engine)

        def phase(step: int, name: str) -> None:
            cluster.enter_phase(rank, step, name)
            checkers.at_phase(rank, name)

        try:
            hooks = Hooks(
                phase=phase,
                event=note,
                committed=lambda: checkers.after_commit(rank),
                recovered=lambda: checkers.after_recovery(rank),
            )
            return job.run(
                workload, transport, hooks, started, lambda engine: None, reported.append
            )
        except Unrecoverable as error:
            if rank in engines:  # else the rank has just joined, and knows nothing of the run
                refusals.append(Refusal.of(rank, error, engines))
            return error
        finally:
            engines.pop(rank, None)

    try:
        with dispatch.used_on_gpu(workload.gpu_kernels):
            outcome = cluster.run(program)
        if alarms:  # no schedule corrupts memory
            raise Violation(f"scrubbing found what is not there: {alarms[0].to_dict()}")
        may_refuse = schedule.fatal and not fatal_left[0]
        steps = len(truth.records) - 1  # data may end before the job's steps
        refused = _judge(outcome.results, reported, truth, refusals, steps, may_refuse)
        if refused is None:
            check()
    except Violation as error:
        raise Failed(str(error), caught=True) from error
    except SimulationError as error:
        first = next(iter(error.errors.values())) if isinstance(error, ProgramFailed) else None
        raise Failed(
            f"{type(error).__name__}: {error}", caught=isinstance(first, Violation)
        ) from error
    finished = [result for result in outcome.results.values() if isinstance(result, Outcome)]
    return Verdict(
        schedule=schedule,
        deaths=len(outcome.killed),
        recoveries=max((result.failures for result in finished), default=0),
        reshapes=len(reshapes),
        commits=checkers.commits,
        calls=outcome.calls,
        rows_checked=checkers.rows,
        parity_rows_checked=checkers.parity_rows,
        refused=refused,
        mix=cluster.mix
        + Counter(_traits(schedule))
        + Counter({"recoveries with too many placements to compare": checkers.unsearched}),
    )


def _traits(schedule: Schedule) -> list[str]:
    """The traits of a schedule, as words for counts over schedules."""
    workload = schedule.workload
    traits = [f"schedules with {workload.protection}"]
    if schedule.model is not None:
        traits += schedule.model.traits
    if schedule.later is not None:
        traits.append("schedules that go on on another cluster")
    if workload.rows_on == "imitated":
        traits.append("schedules on an imitated GPU")
    if workload.on_cpu:
        traits.append("schedules with some ranks on a GPU")
    if workload.k > 4 or workload.m > 3:
        traits.append("schedules with wide stripes")
    if workload.whole_tables:
        traits.append("schedules with whole tables")
    if workload.rounds:
        traits.append("schedules with bfloat16 on the wire")
    return traits


def _judge(
    results: dict[int, Outcome | Unrecoverable],
    reported: list[dict[str, str]],
    truth: Truth,
    refusals: list[Refusal],
    steps: int,
    may_refuse: bool,
) -> str | None:
    """Check the survivors' results; return the text of a refusal to go on, or `None`.

    Raises Violation for a refusal unless `may_refuse`, which is set after a fatal death.
    """
    finished = any(isinstance(result, Outcome) for result in results.values())
    # A rank leaves once the rank knows that the job is done. To ranks not yet told, the leave is a
    # further death. The result exists by then, as summary.json would.
    if refusals and not finished:
        if not may_refuse:
            raise Violation(f"refused to go on although all could be survived: {refusals[0].text}")
        check_refusals(refusals)
        return refusals[0].text
    early = [refusal for refusal in refusals if refusal.committed < steps]
    if early:
        raise Violation(
            f"rank {early[0].rank} refused at step {early[0].committed} of {steps}, "
            f"which others finished: {early[0].text}"
        )
    if not reported:
        raise Violation("no rank reported the digests of the tables")
    if any(tables != truth.tables for tables in reported):
        raise Violation("the finished tables are not the oracle's")
    if any(
        result.verified.mismatches for result in results.values() if isinstance(result, Outcome)
    ):
        raise Violation("parity does not match the data at the end")
    return None
