"""Each kind of recovery as a text that a person has read: one line an event, of all ranks.

`pytest tests/simulated/test_recovery_traces.py --rewrite-traces` writes the texts anew; read the
difference before a commit. A line has the ranks and their event. Lines are in the order of the
first rank to come to an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ecrm.base.errors import EcrmError, ScriptFailed
from ecrm.engine import events
from ecrm.engine.events import Event
from ecrm.engine.hooks import Hooks, StepAborted
from ecrm.engine.rollback import Durable
from ecrm.placement.tables import Table
from ecrm.run.slot_faults import Place
from ecrm.run.user_code import UserCode, user_code_of
from ecrm.testing.simulate.session_job import Reopened
from ecrm.testing.simulate.workload import (
    Computed,
    Outcome,
    Workload,
    dense_value,
    finish,
    make_engine,
    outcome,
    train_step,
)
from ecrm.testing.simulated_transport.cluster import SimulatedCluster
from ecrm.testing.simulated_transport.fault_plan import PhaseFault
from ecrm.testing.simulated_transport.outcome import RankKilled
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.membership import Admit

TRACES = Path(__file__).with_name("traces")
SMALL = Workload(
    tables=(Table("users", 24, 4),),
    slots=2,
    steps=4,
    ids_per_slot=6,
    servers=3,
    trainers=2,
    spares=1,
    k=2,
    m=1,
    rebuild_rows_per_step=4,
    look_ahead=False,
    right_hints=True,
)


@dataclass(frozen=True)
class Case:
    """A kind of recovery: deaths at phases, and the ranks with a trouble of another kind.

    `refuses` and `leaves`: user code fails on the rank in step 1, for good or for a second try.
    """

    title: str
    faults: tuple[PhaseFault, ...] = ()
    workload: Workload = SMALL
    dies_after_shrink: int = -1
    loses_touch: int = -1
    refuses: int = -1
    leaves: int = -1
    ends: bool = False
    exact: bool = True


CASES = {
    "server": Case("a server dies while parity is sent", (PhaseFault(1, 1, "parity"),)),
    "trainer": Case("a trainer dies in its forward", (PhaseFault(4, 1, "forward"),)),
    "without_spare": Case(
        "a server dies, and another rank takes its shard as well",
        (PhaseFault(1, 1, "parity"),),
        replace(SMALL, spares=0, reshape=False),
    ),
    "two_at_once": Case(
        "a server and a trainer die in the same step",
        (PhaseFault(0, 1, "update"), PhaseFault(3, 1, "update")),
        replace(SMALL, servers=4, m=2),
    ),
    "death_in_recovery": Case(
        "a second server dies while the ranks recover from the first",
        (PhaseFault(1, 1, "parity"),),
        replace(SMALL, servers=4, m=2),
        dies_after_shrink=2,
    ),
    "lost_touch": Case("a call fails on a rank, and no rank has died", loses_touch=4),
    "two_steps_back": Case(
        "a server dies before the commit of three steps",
        (PhaseFault(2, 2, "update"),),
        replace(SMALL, commit_interval=3),
    ),
    "reshape": Case(
        "too few ranks are left for the stripes, and all rows move to smaller stripes",
        (PhaseFault(1, 1, "parity"),),
        replace(SMALL, layout="colocated", servers=4, spares=0, steps=8),
    ),
    "replicate": Case(
        "a server dies, and copies bring its rows back",
        (PhaseFault(1, 1, "parity"),),
        replace(SMALL, protection="replicate", k=1),
    ),
    "stateless": Case(
        "a server dies, and training goes on without its rows",
        (PhaseFault(1, 1, "update"),),
        replace(SMALL, protection="stateless", k=1, m=0),
        exact=False,
    ),
    "mapped": Case(
        "a server dies, and all ranks go back to the files",
        (PhaseFault(1, 2, "update"),),
        replace(SMALL, protection="mapped", k=1, m=0, commit_interval=2),
    ),
    "refusal": Case("user code fails between steps, and the run ends", refuses=4, ends=True),
    "second_try": Case(
        "user code fails in a slot, the rank leaves, and another rank tries the slot", leaves=4
    ),
    "too_many": Case(
        "two servers die, of which one may",
        (PhaseFault(0, 1, "update"), PhaseFault(1, 1, "update")),
        ends=True,
    ),
}


@dataclass
class Trace:
    """The events of all ranks: a line for each, with the ranks, in the order of first ranks."""

    lines: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    seen: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, rank: int, line: str) -> None:
        """Note an event of a rank; an event of several ranks is a single line."""
        number = self.seen[rank, line] = self.seen.get((rank, line), -1) + 1
        self.lines.setdefault((line, number), []).append(rank)

    def text(self, title: str) -> str:
        """The trace as a text: ranks, then the event. Phases of a step are on a single line."""
        width, told, before = max(2 * len(ranks) for ranks in self.lines.values()), [title, ""], ""
        for (line, _), ranks in self.lines.items():
            head = f"{' '.join(map(str, sorted(ranks))):<{width}}"
            step, _, phase = line.partition(": ") if line.startswith("step ") else ("", "", "")
            if step and before == head + step:
                told[-1] += f" {phase}"
            else:
                told.append(head + line)
            before = head + step
        return "\n".join(told) + "\n"


def in_words(event: Event) -> str:
    """An event without its times."""
    shown = {
        name: value
        for name, value in event.fields().items()
        if name not in ("shards_left", "why")
        and "seconds" not in name
        and "bytes" not in name
        and value not in ({}, [], None)
    }
    return f"event {event.name}: " + ", ".join(f"{name} {v}" for name, v in shown.items())


def run(case: Case, folder: Path, trace: Trace) -> tuple[dict[int, Outcome], tuple[int, ...]]:
    """Run a case; returns the outcomes by surviving rank, and the dead."""
    folder.mkdir()
    workload = replace(case.workload, folder=str(folder))
    cluster = SimulatedCluster(workload.world_size, 0, case.faults)
    cluster._completes = cluster._notices = 1.0  # news of a death has come with the next call

    def program(transport: Transport) -> Outcome | None:
        return on_rank(case, workload, cluster, transport, trace)

    done = cluster.run(program)
    return {rank: out for rank, out in done.results.items() if out}, cluster.killed_ranks


def on_rank(
    case: Case, workload: Workload, cluster: SimulatedCluster, transport: Transport, trace: Trace
) -> Outcome | None:
    """A rank's part in the run of a case; `None` for a rank that ends by an error."""
    rank = transport.rank

    def say(line: str) -> None:
        trace.add(rank, line)

    def phase(step: int, name: str) -> None:
        say(f"step {step}: {name}")
        try:
            cluster.enter_phase(rank, step, name)
        except RankKilled:
            say("dies")
            raise

    def event(told: Event) -> None:
        if not isinstance(told, events.View):
            say(in_words(told))

    watched(case, transport, say)
    hooks = Hooks(phase=phase, event=event, recovered=lambda: say("recovered"), inquest=UserCode())
    hooks.committed = lambda: say(f"commit {engine.committed}")
    durable: Durable | None = Reopened() if workload.kind.rows_in_files else None
    engine = make_engine(workload, transport, hooks, lambda: 0.0, durable)
    computed: Computed = Computed()
    while True:
        try:
            while engine.step < workload.steps:
                if engine.step == 1 and rank == case.refuses:
                    engine.recovery.refuse("a sentence of the user", ScriptFailed)
                if engine.step == 1 and rank == case.leaves:
                    place = Place(1, engine.slots[0])
                    user_code_of(engine).leave(engine, place, "a sentence of the user")
                train_step(workload, engine, computed)
            return outcome(engine, *finish(engine, lambda tables: None), dense_value)
        except StepAborted:
            say(f"back in training, at step {engine.step}")
        except EcrmError as error:
            if case.leaves == rank:
                say("leaves")
                raise RankKilled from None
            say(f"ends: {error}")
            return None


def watched(case: Case, transport: Transport, say: Callable[[str], None]) -> None:
    """Have a transport tell of its shrinks, and fail as the case has it."""
    shrink, exchange = transport.shrink, transport.exchange
    calls = 0

    def told_shrink(admit: Admit = Admit.NO) -> None:
        shrink(admit)
        say(f"shrink: live are {' '.join(map(str, transport.live))}")
        if transport.rank == case.dies_after_shrink:
            say("dies")
            raise RankKilled

    def failing_exchange(outgoing):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if transport.rank == case.loses_touch and calls == 8:
            say("loses touch in a call")
            raise PeerFailure("exchange: lost touch")
        return exchange(outgoing)

    transport.shrink = told_shrink  # type: ignore[method-assign]
    transport.exchange = failing_exchange  # type: ignore[method-assign]


def tables_of(outcomes: dict[int, Outcome]) -> dict[str, str]:
    """The digests of the tables, known to the reporter."""
    (tables,) = (found.tables for found in outcomes.values() if found.tables is not None)
    return tables


@pytest.mark.parametrize("name", CASES)
def test_a_recovery_goes_as_read(name, tmp_path, request):
    case, trace = CASES[name], Trace()
    outcomes, dead = run(case, tmp_path / "disturbed", trace)
    undisturbed = Case("", workload=case.workload)
    calm, _ = run(undisturbed, tmp_path / "undisturbed", Trace())
    assert len(dead) == len(case.faults) + (case.dies_after_shrink >= 0) + (case.leaves >= 0)
    assert bool(outcomes) != case.ends
    if not case.ends:
        assert (tables_of(outcomes) == tables_of(calm)) == case.exact
    written = TRACES / f"{name}.txt"
    if request.config.getoption("--rewrite-traces"):
        written.write_text(trace.text(case.title))
    assert trace.text(case.title) == written.read_text()


def test_every_trace_has_a_case():
    assert {path.stem for path in TRACES.glob("*.txt")} == set(CASES)
