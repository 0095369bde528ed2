"""The same contract for every protection: what `PROMISES` says of it holds, on the simulated cluster and under real mpirun.

A protection that can be configured and has no entry here fails
`test_every_protection_that_can_be_configured_is_held_to_this`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.config import load_config
from ecrm.config.schema import ProtectionConfig
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.engine.rollback import Durable
from ecrm.errors import Unrecoverable
from ecrm.protection import make_protection
from ecrm.protection.base import VerifyReport
from ecrm.simulate.workload import Outcome, Workload, run_workload
from ecrm.transport.base import PeerFailure
from ecrm.transport.simulated import PhaseFault, SimulatedCluster
from support.drilling import BASE, drill, launch
from support.paths import ROOT

ENDS = "the run ends with one message"
ROLLS_BACK = "all go back, and the bits are the undisturbed ones"
GOES_ON = "the run goes on as with fewer"

CHECKPOINT_EVERY = 3


@dataclass(frozen=True)
class Promise:
    """What a protection promises.

    `workload`, `sets`: how the simulated job, and a real run, are given it; `in_words`: what
    messages call it. `survives`: ranks that may die at once without all going back further than the
    commit, `exact` with the undisturbed bits; `beyond`: what one more costs. `redundancy`: bytes
    kept beside the rows that these can be checked against, as a share of theirs; `exactly`: nothing
    else is kept. `logs`: whether it can take back steps since the commit, or keeps a journal for
    that. `checkpoints`: whether they are written; `durable`: what is gone back to; `redone`: steps
    that may be redone then.
    """

    page: str
    in_words: str
    workload: Mapping[str, Any]
    sets: Mapping[str, Any]
    survives: int = 0
    exact: bool = True
    beyond: str = ENDS
    redundancy: Fraction = Fraction(0)
    exactly: bool = True
    logs: bool = False
    checkpoints: bool = False
    durable: Callable[[Path], Durable] | None = None
    redone: int = 1


def _copies(name: str, copies: int, in_words: str, exactly: bool) -> Promise:
    return Promise(
        page=f"docs/{name}.md",
        in_words=in_words,
        workload={"protection": name, "k": 1, "m": copies - 1},
        sets={"protection.name": name, "protection.copies": copies, "cluster.servers": 4},
        survives=copies - 1,
        redundancy=Fraction(copies - 1),
        exactly=exactly,
        logs=True,
    )


def _erasure(k: int, m: int) -> Promise:
    return Promise(
        page="docs/design.md",
        in_words=f"erasure k={k} m={m}",
        workload={"protection": "erasure", "k": k, "m": m, "servers": k + m},
        sets={"protection.k": k, "protection.m": m, "cluster.servers": k + m},
        survives=m,
        redundancy=Fraction(m, k),
        logs=True,
    )


PROMISES = {
    "none": Promise(
        "docs/protections.md",
        "protection none",
        {"protection": "none"},
        {"protection.name": "none"},
    ),
    "checkpoint": Promise(
        page="docs/checkpoint.md",
        in_words="protection checkpoint",
        workload={"protection": "checkpoint"},
        sets={"protection.name": "checkpoint", "checkpoint.every_steps": CHECKPOINT_EVERY},
        beyond=ROLLS_BACK,
        checkpoints=True,
        durable=lambda folder: Restorer(CheckpointFolder(folder)),
        redone=CHECKPOINT_EVERY,
    ),
    "mapped": Promise(
        page="docs/mapped.md",
        in_words="protection mapped",
        workload={"protection": "mapped"},
        sets={"protection.name": "mapped"},
        beyond=ROLLS_BACK,
        logs=True,
        durable=lambda folder: Reopened(),
    ),
    "stateless": Promise(
        page="docs/stateless.md",
        in_words="stateless parameter servers",
        workload={"protection": "stateless"},
        sets={"protection.name": "stateless", "checkpoint.every_steps": CHECKPOINT_EVERY},
        survives=1,
        exact=False,
        beyond=GOES_ON,
        exactly=False,
        logs=True,
        checkpoints=True,
        durable=lambda folder: Restorer(CheckpointFolder(folder)),
    ),
    "chain 2": _copies("chain", 2, "chain replication, 2 copies", exactly=True),
    "chain 3": _copies("chain", 3, "chain replication, 3 copies", exactly=True),
    "replicate 2": _copies("replicate", 2, "ultralight replication, 2 copies", exactly=False),
    "replicate 3": _copies("replicate", 3, "ultralight replication, 3 copies", exactly=False),
    "erasure (4,1)": _erasure(4, 1),
    "erasure (2,2)": _erasure(2, 2),
}

every = pytest.mark.parametrize("name", PROMISES)
KEEPING = [name for name, promise in PROMISES.items() if promise.survives]
"""Those that survive something without going back."""

STEPS = 8
KILLED_AT = 5
PHASES = (
    "parity",
    pytest.param("update", marks=pytest.mark.drill),
    pytest.param("commit", marks=pytest.mark.drill),
)


def workload_of(promise: Promise, folder: Path, **changes: Any) -> Workload:
    """A small job under it, that dense replicas outlive the deaths of."""
    return replace(
        Workload(servers=4, trainers=2, spares=2, steps=STEPS),
        folder=str(folder),
        **{**promise.workload, **changes},
    )


@dataclass
class Simulated:
    """What came of a simulated run: each survivor's outcome or refusal, tables reported, events of all ranks, who was killed."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: list[Unrecoverable] = field(default_factory=list)
    tables: list[dict[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    killed: tuple[int, ...] = ()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def dense(self) -> set[str]:
        return {outcome.dense for outcome in self.outcomes if outcome.dense is not None}


def simulate(
    promise: Promise,
    folder: Path,
    deaths: Mapping[int, str] | None = None,
    at_phase: Callable[[int, int, str], None] = lambda rank, step, name: None,
    committed: Callable[[Engine], None] = lambda engine: None,
    recovered: Callable[[Engine], None] = lambda engine: None,
    after_step: Callable[[Engine], None] = lambda engine: None,
    **changes: Any,
) -> Simulated:
    """Run the job; each rank of `deaths` is killed in its phase of step KILLED_AT, all of which must happen."""
    workload, found, engines = workload_of(promise, folder, **changes), Simulated(), {}
    folder.mkdir(exist_ok=True)
    faults = [PhaseFault(rank, KILLED_AT, phase) for rank, phase in (deaths or {}).items()]
    cluster = SimulatedCluster(workload.world_size, 1, faults, most_calls=100_000)

    def program(transport):
        rank = transport.rank

        def phase(step: int, name: str) -> None:
            cluster.enter_phase(rank, step, name)
            at_phase(rank, step, name)

        def started(engine: Engine) -> None:
            engines[rank] = engine
            committed(engine)

        def checkpoints(engine: Engine) -> Checkpoints:
            policy = CheckpointPolicy(workload.steps, every_steps=CHECKPOINT_EVERY)
            return Checkpoints(engine, CheckpointFolder(folder), {}, policy)

        hooks = Hooks(
            phase,
            found.events.append,
            lambda: committed(engines[rank]),
            lambda: recovered(engines[rank]),
        )
        try:
            return run_workload(
                workload,
                transport,
                hooks,
                after_start=started,
                after_step=after_step,
                report=found.tables.append,
                durable=promise.durable(folder) if promise.durable else None,
                make_checkpoints=checkpoints if promise.checkpoints else None,
            )
        except Unrecoverable as error:
            return error

    outcome = cluster.run(program)
    assert not outcome.unfired, outcome.unfired
    found.killed = tuple(kill.rank for kill in outcome.killed)
    for result in outcome.results.values():
        (found.refusals if isinstance(result, Unrecoverable) else found.outcomes).append(result)
    return found


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory) -> Simulated:
    """The undisturbed run of `none`: what every other ends in."""
    run = simulate(PROMISES["none"], tmp_path_factory.mktemp("unprotected"))
    assert len(run.tables) == len(run.dense) == 1
    return run


def same_bits(run: Simulated, other: Simulated) -> bool:
    return (
        bool(run.tables)
        and all(tables == other.tables[0] for tables in run.tables)
        and run.dense == other.dense
    )


def test_every_protection_that_can_be_configured_is_held_to_this():
    choices = ProtectionConfig.__dataclass_fields__["name"].metadata["rule"].choices
    assert {promise.workload["protection"] for promise in PROMISES.values()} == set(choices)


@every
def test_its_name_and_numbers_are_what_a_config_gives(name, tmp_path):
    promise = PROMISES[name]
    config = load_config(
        "tiny", ["data.path=x", *(f"{key}={value}" for key, value in promise.sets.items())]
    )
    protection = make_protection(config, tmp_path)
    assert config.protection.name == protection.name == promise.workload["protection"]
    assert protection.in_words == promise.in_words
    assert config.failures_survived == promise.survives
    again = protection.with_shape(protection.shape)
    assert type(again) is type(protection) and again.shape == protection.shape


@every
def test_it_has_a_page_and_a_line_where_users_choose(name):
    promise = PROMISES[name]
    page = (ROOT / promise.page).read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    if promise.page == "docs/design.md":  # the protection that all of it is about
        assert "Going back to the commit" in headings
    elif name != "none":
        assert {"Mechanism", "What is promised", "What it costs"} <= set(headings)
    if name != "none":
        assert re.search(r"(After|Source:|come from) .{0,400}\b(19|20)\d\d\b", page, re.DOTALL), (
            "no source with its year"
        )
    (line,) = re.findall(
        rf"^\| `{promise.workload['protection']}` .*$",
        (ROOT / "docs" / "tutorial" / "choose-a-protection.md").read_text(),
        re.MULTILINE,
    )
    assert ("**not exact**" in line) == (not promise.exact)


@every
def test_undisturbed_bits_are_those_of_none(name, tmp_path, unprotected):
    run = simulate(PROMISES[name], tmp_path / "run")
    assert same_bits(run, unprotected) and not run.refusals and not run.of("rolled_back")


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("phase", PHASES)
def test_as_many_as_promised_die_at_once_and_nobody_goes_back(name, phase, tmp_path, unprotected):
    promise = PROMISES[name]
    run = simulate(promise, tmp_path / "run", dict.fromkeys(range(promise.survives), phase))
    assert sorted(run.killed) == list(range(promise.survives))
    assert run.tables and same_bits(run, unprotected) == promise.exact
    assert not run.refusals and not run.of("rolled_back")
    assert {event["redone_steps"] for event in run.of("failure")} <= {0, 1}
    assert {outcome.failures_left for outcome in run.outcomes} == {promise.survives}


@every
@pytest.mark.parametrize("phase", PHASES[:2])
def test_one_more_than_it_survives_costs_what_is_said_and_never_a_wrong_byte(
    name, phase, tmp_path, unprotected
):
    promise = PROMISES[name]
    doomed = range(promise.survives + 1)
    run = simulate(promise, tmp_path / "run", dict.fromkeys(doomed, phase))
    assert sorted(run.killed) == list(doomed)
    if promise.beyond == ROLLS_BACK:
        assert same_bits(run, unprotected) and not run.refusals
        (step,) = {event["step"] for event in run.of("rolled_back")}
        assert (
            KILLED_AT
            <= max(event["from_step"] for event in run.of("rolled_back"))
            <= step + promise.redone
        )
    elif promise.beyond == GOES_ON:
        assert run.tables and not run.refusals and not run.of("rolled_back")
    else:
        assert not run.tables and not run.outcomes
        (said,) = {str(error) for error in run.refusals}
        assert (
            promise.in_words in said
            and "died" in said
            and all(str(rank) in said for rank in doomed)
        ), said


def _held(engine: Engine) -> dict[tuple[str, int, int], torch.Tensor]:
    """A copy of every record that a rank holds: rows with their state, and what protects others' rows."""
    rows = {
        ("rows", *key): hosted.store.read(torch.arange(engine.layouts[key[1]].data_rows_per_shard))
        for key, hosted in engine.hosted.items()
    }
    parity = getattr(engine.protection, "parity", {})
    return rows | {("parity", *key): unit.records.clone() for key, unit in parity.items()}


def _aborted(
    promise: Promise, folder: Path, phase: str, **changes: Any
) -> tuple[Simulated, int, list[str]]:
    """A run in which a call fails on one rank as `phase` of step KILLED_AT begins, though nobody dies: (it, comparisons, what differed
    after going back from what was held at that commit)."""
    snapshots: dict[tuple[int, int], dict] = {}
    compared, different, failed = [], [], []

    def keep(engine: Engine) -> None:
        snapshots[engine.rank, engine.committed] = _held(engine)

    def compare(engine: Engine) -> None:
        was, now = snapshots[engine.rank, engine.committed], _held(engine)
        compared.append(engine.rank)
        different.extend(
            f"rank {engine.rank}: {key}"
            for key in was.keys() | now.keys()
            if not torch.equal(was[key], now[key])
        )

    def fail_once(rank: int, step: int, name: str) -> None:
        if (rank, step, name) == (1, KILLED_AT, phase) and not failed:
            failed.append(name)
            raise PeerFailure("injected")

    run = simulate(
        promise,
        folder,
        at_phase=fail_once,
        committed=keep,
        recovered=compare,
        commit_interval=3,
        **changes,
    )
    assert failed
    return run, len(compared), different


@every
@pytest.mark.parametrize("phase", PHASES)
def test_an_aborted_step_leaves_no_trace(name, phase, tmp_path, unprotected):
    """Commits are three steps apart, so that two finished steps and a begun one are taken back."""
    promise = PROMISES[name]
    run, compared, different = _aborted(promise, tmp_path / "run", phase)
    assert not different
    if promise.survives or promise.durable:
        assert compared == workload_of(promise, tmp_path).world_size and same_bits(run, unprotected)
    else:
        assert not run.tables and {str(error) for error in run.refusals} == {
            "ranks lost touch with each other, none of them died: protection none cannot take back the updates since step 3"
        }


@pytest.mark.parametrize("name", KEEPING)
def test_without_undo_the_trace_of_an_aborted_step_is_found(name, tmp_path):
    _, compared, different = _aborted(PROMISES[name], tmp_path / "run", "parity", skip_undo=True)
    assert compared and different


@every
@pytest.mark.parametrize("flipped", ["nothing", "a row", "its redundancy"])
def test_the_check_at_the_end_finds_a_flipped_byte_where_there_is_redundancy(
    name, flipped, tmp_path
):
    promise, done = PROMISES[name], []

    def flip(engine: Engine) -> None:
        if (engine.rank, engine.step) != (0, STEPS) or flipped == "nothing":
            return
        hosted = engine.hosted[0, 0]
        row = hosted.store.updated(torch.arange(engine.layouts[0].data_rows_per_shard)).nonzero()[0]
        if flipped == "a row":
            record = hosted.store.read(row)
            record[0, 5] ^= 16
            hosted.store.write(row, record)
        elif promise.redundancy:
            engine.protection.parity[0, 0].records[0, 5] ^= 16
        done.append(flipped)

    run = simulate(promise, tmp_path / "run", after_step=flip)
    (verified,) = {outcome.verified for outcome in run.outcomes}
    if not promise.redundancy:
        assert verified == VerifyReport(0, 0)
        return
    wrong = {"nothing": 0, "a row": promise.survives, "its redundancy": 1}[flipped]
    assert verified.stripes > 0 and verified.mismatches == wrong
    assert done == ([] if flipped == "nothing" else [flipped])


@every
def test_memory_and_logs_are_reported(name, tmp_path):
    promise, memories = PROMISES[name], []

    def measure(engine: Engine) -> None:
        if engine.step == STEPS - 1:  # the step before the last looks ahead
            layouts = zip(engine.layouts, engine.record_bytes, strict=True)
            rows = sum(
                layout.data_rows_per_shard * layout.shape.shards * size for layout, size in layouts
            )
            memories.append((rows, engine.memory()))

    simulate(promise, tmp_path / "run", after_step=measure)
    rows, memory = memories[0]
    assert all(other == (rows, memory) for other in memories)
    beyond = memory.total["parity"] - promise.redundancy * rows
    assert beyond == 0 if promise.exactly else beyond > 0
    assert (memory.total["undo"] > 0) == promise.logs
    assert sum(rank["parity"] for rank in memory.per_rank) == memory.total["parity"]


@pytest.mark.drill
@pytest.mark.parametrize(
    "name", [name for name, promise in PROMISES.items() if promise.survives or promise.durable]
)
def test_real_kills_that_it_covers_leave_the_undisturbed_model(
    name, tmp_path, criteo_rows, undisturbed
):
    promise = PROMISES[name]
    kills = tuple(f"{rank}@12:update" for rank in range(promise.survives or 1))
    run = drill(tmp_path / "run", criteo_rows, {**BASE, "cluster.spares": 2, **promise.sets}, kills)
    assert (run.model == undisturbed) == promise.exact
    assert bool(run.events_of("rolled_back")) == (promise.survives == 0)
    summary = run.summary
    assert (
        summary["protection"]["name"]
        == summary["config"]["protection"]["name"]
        == promise.workload["protection"]
    )
    assert promise.in_words in run.output
    assert summary["failures_left"] == promise.survives
    assert all(failure["redone_steps"] <= promise.redone for failure in summary["failures"])
    assert bool(summary["memory_bytes"]["parity"]) == bool(
        promise.redundancy or not promise.exactly
    )
    assert bool(summary["memory_bytes"]["undo"]) == promise.logs
    traffic = summary["traffic_bytes_per_rank"]
    assert [rank["rank"] for rank in traffic] == [
        rank["rank"] for rank in summary["memory_bytes_per_rank"]
    ]
    assert sum(rank["sent"].get("update", 0) for rank in traffic) > 0
    assert (sum(rank["written"] for rank in traffic) > 0) == (promise.durable is not None)


@pytest.mark.drill
@pytest.mark.parametrize(
    "name", [name for name, promise in PROMISES.items() if promise.beyond == ENDS]
)
def test_real_kills_beyond_it_end_the_run_with_one_message(name, tmp_path, criteo_rows):
    promise = PROMISES[name]
    kills = tuple(f"{rank}@12:update" for rank in range(promise.survives + 1))
    run = launch(tmp_path / "run", criteo_rows, {**BASE, **promise.sets}, kills)
    assert run.code == 3, run.output
    said = [line for line in run.output.splitlines() if line.startswith("ecrm: error:")]
    assert len(said) == 1 and promise.in_words in said[0], run.output
    assert "Traceback" not in run.output
    assert (run.folder / "failure.json").exists() and not (run.folder / "summary.json").exists()
