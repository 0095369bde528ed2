"""Runs of the real engine as traces, and whether the model of the protocol allows a trace.

A trace has the acts of all ranks in order: deaths, failed calls, new epochs with their members,
entered and finished agreements on commits, finished recoveries, and the end. All other acts of the
model are hidden: between two acts of a trace the model may take any number of hidden steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from ecrm.base.errors import Unrecoverable
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import ProgramFailed, RandomFaults, SimulatedCluster
from support.protocol_model import (
    AGREE,
    DONE,
    FINISH,
    FIRST,
    LEDGER,
    LEDGER_AGREE,
    SECOND,
    SPREAD,
    SPREAD_AGREE,
    Model,
    State,
)

Act = tuple[int, str, object]
"""Rank, act, and the number or the members that belong to the act."""

FOUR_RANKS = Workload(
    slots=2,
    steps=2,
    servers=4,
    trainers=2,
    spares=0,
    layout="colocated",
    k=2,
    m=2,
    reshape=False,
    rebuild_rows_per_step=1000,
)
RECOVERING = (LEDGER, LEDGER_AGREE, SPREAD, SPREAD_AGREE)


def traced(seed: int, most_deaths: int = 2, lost_touch: float = 0.0) -> list[Act]:
    """The trace of a simulated run with up to `most_deaths` deaths at random instants."""
    workload, engines = replace(FOUR_RANKS, seed=seed), {}
    draws = Random(f"protocol {seed}")
    faults = RandomFaults(
        most=most_deaths,
        per_call=draws.choice((0.01, 0.03)),
        per_recovery_call=0.06,
        together=0.2,
        lost_touch=lost_touch,
    )
    cluster = SimulatedCluster(workload.world_size, f"protocol {seed}", faults)

    def program(transport):
        rank = transport.rank

        def began(engine: Engine) -> None:
            engines[rank] = engine

        def phase(step: int, name: str) -> None:
            cluster.enter_phase(rank, step, name)
            if name == "commit":
                cluster.tell(rank, f"agrees {step + 1}")

        hooks = Hooks(
            phase=phase,
            committed=lambda: cluster.tell(rank, f"commits {engines[rank].committed}"),
            recovered=lambda: cluster.tell(rank, f"recovers {engines[rank].committed}"),
        )
        return run_workload(workload, transport, hooks, after_start=began)

    try:
        return acts_of(cluster.run(program).trace)
    except ProgramFailed as failed:
        # to a rank not yet told of the end, a rank that has left the run is one more death
        outcome = failed.outcome
        gone = len(outcome.killed) + len(outcome.results)
        refused = all(isinstance(error, Unrecoverable) for error in failed.errors.values())
        if not (refused and outcome.results and gone > workload.m):
            raise
        return acts_of(failed.trace)


def acts_of(events: Iterable) -> list[Act]:
    """The acts of a trace of the simulated transport.

    A commit of a round of the rebuild alone repeats the number of the commit before, and is hidden.
    """
    acts: list[Act] = []
    committed: dict[int, int] = {}
    last: dict[int, str] = {}
    for event in events:
        word, _, rest = event.what.partition(" ")
        if word == "killed":
            acts.append((event.rank, "dies", 0))
        elif word == "loses":
            acts.append((event.rank, "loses touch", 0))
        elif event.method == "shrink" and word == "enters":
            if last.get(event.rank) != "loses touch":
                acts.append((event.rank, "fails", 0))
        elif word == "live":
            members = sum(1 << int(each) for each in rest[4:].strip("(),").split(","))
            acts.append((event.rank, "begins", members))
        elif word in ("agrees", "recovers"):
            acts.append((event.rank, word, int(rest)))
        elif word == "commits" and int(rest) > committed.get(event.rank, 0):
            committed[event.rank] = int(rest)
            acts.append((event.rank, word, int(rest)))
        elif word == "leaves":
            acts.append((event.rank, word, 0))
        if acts:
            last[acts[-1][0]] = acts[-1][1]
    return acts


def first_not_allowed(acts: Sequence[Act], mistake: str = "") -> int | None:
    """The place of the first act that the model does not allow, `None` for an allowed trace."""
    model = Model(
        steps_to_train=FOUR_RANKS.steps,
        deaths=sum(act == "dies" for _, act, _ in acts),
        cuts=0,
        failures=sum(act == "loses touch" for _, act, _ in acts),
        mistake=mistake,
    )
    states = {model.start()}
    for place, act in enumerate(acts):
        before = _hidden(model, states)
        states = {after for state in before for after in _taken(model, state, act)}
        if act[1] in ("fails", "loses touch") and _wish_is_lost(acts[place:]):
            states |= before
        if not states:
            return place
    return None


def _wish_is_lost(acts: Sequence[Act]) -> bool:
    """Whether the rank of the first act dies before an epoch begins for the rank.

    The wish for the epoch may have come to nobody. For the model the rank then dies in its call.
    """
    rank = acts[0][0]
    words = [word for mate, word, _ in acts if mate == rank and word in ("begins", "dies")]
    return words[:1] == ["dies"]


def _hidden(model: Model, states: set[State]) -> set[State]:
    """All states that hidden steps lead to."""
    found, new = set(states), list(states)
    while new:
        state = new.pop()
        for label, after in model.steps(state):
            if after not in found and _is_hidden(model, label, state, after):
                found.add(after)
                new.append(after)
    return found


def _is_hidden(model: Model, label: str, before: State, after: State) -> bool:
    if label.startswith("head"):
        return True
    rank, _, act = label.partition(" ")
    was, this = before.ranks[int(rank)], after.ranks[int(rank)]
    if not act.startswith("completes"):
        return False
    if was.at == SECOND and was.committed < model.steps_to_train:
        return False
    return was.committed == this.committed and this.at != DONE


def _taken(model: Model, state: State, act: Act) -> Iterable[State]:
    """The states after an act of a rank, or the state itself for an act that only looks."""
    rank, word, number = act
    this = state.ranks[rank]
    if word == "begins":
        if this.at in RECOVERING and this.members == number:
            yield state
        return
    if word == "recovers":
        if this.at in (FIRST, FINISH) and this.epoch > 1 and this.committed == number:
            yield state
        return
    for label, after in model.steps(state):
        if not label.startswith(f"{rank} "):
            continue
        then, fails = after.ranks[rank], "fails" in label
        agrees = "completes second" in label and then.at == AGREE
        commits = "completes" in label and this.committed < then.committed == number
        if {
            "dies": label.endswith("dies"),
            "loses touch": fails,
            "fails": fails and "alone" not in label,
            "agrees": agrees and then.committed + 1 == number,
            "commits": commits,
            "leaves": then.at == DONE,
        }[word]:
            yield after
