"""The same contract for every protection: `PROMISES` holds on the simulated cluster.

A protection that can be configured and has no entry there fails
`test_every_protection_that_can_be_configured_is_held_to_this`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.base.errors import Unrecoverable
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.config import load_config
from ecrm.config.schema import ProtectionConfig
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.placement.stripes import StripeShape
from ecrm.protection.base import VerifyReport
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.kinds import KINDS, Kind, Settings
from ecrm.protection.registry import PROTECTIONS, make_protection
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.simulation import run_schedule
from ecrm.testing.simulate.workload import Outcome, Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.transport.base import PeerFailure
from support.paths import ROOT
from support.promises import (
    CHECKPOINT_EVERY,
    GOES_ON,
    PROMISES,
    ROLLS_BACK,
    Promise,
)
from support.telling import noted_in

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
    """The result of a simulated run.

    Holds each survivor's outcome or refusal, the tables reported, the events of all ranks, and who
    was killed.
    """

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
    """Runs the job and kills each rank of `deaths` in its phase of step KILLED_AT.

    All of these kills must happen.
    """
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
            noted_in(found.events),
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


class MirrorKind(Kind):
    """A kind that ecrm does not have."""

    name, meaning, parity = "mirror", "Whole copies of every row.", True

    def stripes(self, settings: Settings) -> tuple[int, int]:
        return 1, settings.copies - 1


class Mirror(ErasureProtection):
    """Its protection: parity of one row is a copy."""

    kind = MirrorKind()

    def __init__(self, shards: int, copies: int) -> None:
        super().__init__(shards, 1, copies - 1)

    def with_shape(self, shape: StripeShape) -> Mirror:
        return Mirror(shape.shards, shape.m + 1)


@pytest.fixture
def mirror(monkeypatch) -> None:
    """Enter the new protection, in its own room and in the config's choices of names.

    A real one has no line in the config: the choices are those of KINDS.
    """
    choices = ProtectionConfig.__dataclass_fields__["name"].metadata["rule"].choices
    monkeypatch.setitem(KINDS, "mirror", Mirror.kind)
    monkeypatch.setitem(
        PROTECTIONS, "mirror", lambda given: Mirror(given.servers, given.settings.copies)
    )
    monkeypatch.setitem(choices, "mirror", Mirror.kind.meaning)


def test_a_new_protection_is_known_to_every_room(mirror, tmp_path, unprotected):
    promise = Promise("protection mirror", {"protection": "mirror", "k": 1, "m": 2}, {}, survives=2)
    run = simulate(promise, tmp_path / "run", {0: "parity", 2: "parity"})
    assert sorted(run.killed) == [0, 2] and same_bits(run, unprotected) and not run.refusals
    assert {outcome.failures_left for outcome in run.outcomes} == {2}
    seeds = (draw(seed, "survivable") for seed in range(60))
    chains = [drawn for drawn in seeds if drawn.workload.protection == "chain"][:3]
    for drawn in chains:
        verdict = run_schedule(
            replace(drawn, workload=replace(drawn.workload, protection="mirror"))
        )
        assert verdict.deaths and verdict.mix["schedules with mirror"] == 1
    assert len(chains) == 3, "schedules of seeds have changed"


def test_a_new_protection_is_configured_as_any_other(mirror):
    config = load_config("tiny", ["data.path=x", "protection.name=mirror", "protection.copies=3"])
    assert config.kind is Mirror.kind and config.failures_survived == 2
    made = make_protection(config.protection, config.cluster.servers, durable=False)
    assert isinstance(made, Mirror) and made.shape.m == 2


@every
def test_its_name_and_numbers_are_what_a_config_gives(name, tmp_path):
    promise = PROMISES[name]
    config = load_config(
        "tiny", ["data.path=x", *(f"{key}={value}" for key, value in promise.sets.items())]
    )
    protection = make_protection(config.protection, config.cluster.servers, tmp_path, durable=False)
    assert config.protection.name == protection.name == promise.workload["protection"]
    assert protection.in_words == promise.in_words
    assert config.failures_survived == promise.survives
    again = protection.with_shape(protection.shape)
    assert type(again) is type(protection) and again.shape == protection.shape


@every
def test_it_has_a_section_and_a_line_where_users_choose(name):
    promise = PROMISES[name]
    kind = promise.workload["protection"]
    page = (ROOT / "docs" / "concepts" / "protections.md").read_text()
    section = re.search(rf"^## {kind}\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    if name != "none":
        assert "- **Promise.**" in section
        assert re.search(r"- \*\*(Memory\.|Without failures)", section), "no cost"
        assert re.search(r"\b(19|20)\d\d\b", section), "no source with its year"
    (line,) = re.findall(
        rf"^\| `{kind}` .*$",
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
    """A copy of every record that a rank holds: rows with their state, and their redundancy."""
    rows = {
        ("rows", *key): hosted.store.read(
            torch.arange(engine.state.layouts[key[1]].data_rows_per_shard)
        )
        for key, hosted in engine.state.hosted.items()
    }
    parity = getattr(engine.state.protection, "parity", {})
    return rows | {("parity", *key): unit.records.clone() for key, unit in parity.items()}


def _aborted(
    promise: Promise, folder: Path, phase: str, **changes: Any
) -> tuple[Simulated, int, list[str]]:
    """A run in which a call fails on one rank as `phase` of step KILLED_AT begins; nobody dies.

    Returns (the run, comparisons, differences). Compared are the records after the rollback with
    those held at that commit.
    """
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
            "ranks lost touch with each other, none of them died: protection none cannot take "
            "back the updates since step 3"
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
        hosted = engine.state.hosted[0, 0]
        row = hosted.store.updated(
            torch.arange(engine.state.layouts[0].data_rows_per_shard)
        ).nonzero()[0]
        if flipped == "a row":
            record = hosted.store.read(row)
            record[0, 5] ^= 16
            hosted.store.write(row, record)
        elif promise.redundancy:
            engine.state.protection.parity[0, 0].records[0, 5] ^= 16
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
            layouts = zip(engine.state.layouts, engine.state.record_bytes, strict=True)
            rows = sum(
                layout.data_rows_per_shard * layout.shape.shards * size for layout, size in layouts
            )
            memories.append((rows, engine.state.memory()))

    simulate(promise, tmp_path / "run", after_step=measure)
    rows, memory = memories[0]
    assert all(other == (rows, memory) for other in memories)
    beyond = memory.total["parity"] - promise.redundancy * rows
    assert beyond == 0 if promise.exactly else beyond > 0
    assert (memory.total["undo"] > 0) == promise.logs
    assert sum(rank["parity"] for rank in memory.per_rank) == memory.total["parity"]
