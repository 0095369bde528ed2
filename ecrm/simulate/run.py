"""Runs fault schedules on the real engine over the simulated transport, with the checkers watching."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ecrm.engine.engine import Engine, Hooks
from ecrm.errors import Unrecoverable
from ecrm.simulate.atlas import survivable
from ecrm.simulate.checkers import Checkers
from ecrm.simulate.oracle import Truth, truth_of
from ecrm.simulate.schedule import Schedule
from ecrm.simulate.workload import Outcome, run_workload
from ecrm.transport.base import Transport
from ecrm.transport.simulated import RandomFaults, RankKilled, SimulatedCluster, SimulationError

MOST_CALLS = 200_000


@dataclass(frozen=True)
class Verdict:
    """What became of one schedule: deaths, recoveries, reshapes, checks made; `refused` says why a fatal one could not go on."""

    schedule: Schedule
    deaths: int
    recoveries: int
    reshapes: int
    commits: int
    calls: int
    rows_checked: int
    parity_rows_checked: int
    refused: str | None


class Failed(Exception):
    """A schedule broke a promise; the message says which."""


def run_schedule(schedule: Schedule, breaks: Callable[[Engine], None] | None = None) -> Verdict:
    """Run one schedule to its end; raises Failed when anything is not as promised.

    `breaks` may damage each engine as it is made, for canaries.
    """
    workload = schedule.workload
    rng = random.Random(f"faults {schedule.suite} {schedule.seed}")
    truth = truth_of(replace(workload, skip_undo=False))
    engines: dict[int, Engine] = {}
    doomed: set[int] = set()  # from the moment their death is decided, which may be some calls ahead
    condemned: set[int] = set()
    reshapes: set[tuple[int, int]] = set()  # by the servers and k they end with: each has fewer than the one before
    checkers = Checkers(engines, doomed, truth)
    reported: list[dict[str, str]] = []
    alarms: list[dict[str, object]] = []
    fatal_left = [1 if schedule.suite == "fatal" else 0]

    def may_kill(rank: int, killed: tuple[int, ...]) -> bool:
        allowed = rank not in doomed and survivable(workload, engines, doomed, rank)
        if not allowed and rank not in doomed and fatal_left[0] and len(doomed) + 1 < workload.world_size:
            fatal_left[0] -= 1
            allowed = True
        if allowed:
            doomed.add(rank)
            if workload.domains and rng.random() < schedule.together:
                host_dies(rank)
        return allowed

    def host_dies(rank: int) -> None:
        """The other ranks of a dying rank's host die as soon as they do anything."""
        for mate, domain in enumerate(workload.domains):
            if domain == workload.domains[rank] and mate not in doomed and survivable(workload, engines, doomed, mate):
                doomed.add(mate)
                condemned.add(mate)

    def on_phase(rank: int, step: int, phase: str) -> None:
        if rank in condemned:
            raise RankKilled
        if len(doomed) < schedule.deaths and rng.random() < schedule.phase_death and may_kill(rank, ()):
            raise RankKilled

    cluster = SimulatedCluster(
        workload.world_size,
        f"{schedule.suite} {schedule.seed}",
        RandomFaults(
            most=schedule.deaths,
            per_call=schedule.call_death,
            per_recovery_call=schedule.cascade,
            together=schedule.together,
            may_kill=may_kill,
        ),
        on_phase=on_phase,
        most_calls=MOST_CALLS,
    )

    def note(fields: dict[str, object]) -> None:
        if fields["event"] == "reshaped":
            reshapes.add((fields["servers"], fields["k"]))
        elif fields["event"] == "corruption":
            alarms.append(fields)

    def program(transport: Transport) -> Outcome | Unrecoverable:
        rank = transport.rank

        def started(engine: Engine) -> None:
            engines[rank] = engine
            if breaks is not None:
                breaks(engine)

        try:
            hooks = Hooks(phase=lambda step, name: cluster.enter_phase(rank, step, name), event=note)
            return run_workload(
                workload,
                transport,
                hooks,
                after_start=started,
                after_step=checkers.after_commit,
                report=reported.append,
            )
        except Unrecoverable as error:
            return error
        finally:
            engines.pop(rank, None)

    try:
        outcome = cluster.run(program)
    except SimulationError as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    if alarms:  # nothing is corrupted in these schedules, whatever dies
        raise Failed(f"scrubbing found what is not there: {alarms[0]}")
    refused = _judge(schedule, outcome.results, reported, truth)
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
    )


def _judge(
    schedule: Schedule,
    results: dict[int, Outcome | Unrecoverable],
    reported: list[dict[str, str]],
    truth: Truth,
) -> str | None:
    """Check what the survivors returned; the reason when they refused to go on, which only fatal schedules may."""
    refusals = sorted({str(result) for result in results.values() if isinstance(result, Unrecoverable)})
    finished = any(isinstance(result, Outcome) for result in results.values())
    # A rank that knows the job to be done leaves, which is one more death to those who were not told: then
    # the result is there already, as summary.json would be.
    if refusals and not finished:
        if schedule.suite == "survivable":
            raise Failed(f"refused to go on although all could be survived: {refusals[0]}")
        if not all("died" in text or "lost" in text for text in refusals):
            raise Failed(f"a refusal does not name what was lost: {refusals}")
        return refusals[0]
    if not reported:
        raise Failed("no rank reported the digests of the tables")
    if any(tables != truth.tables for tables in reported):
        raise Failed("the finished tables are not the oracle's")
    if any(result.verified.mismatches for result in results.values() if isinstance(result, Outcome)):
        raise Failed("parity does not match the data at the end")
    return None
