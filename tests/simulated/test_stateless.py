"""Stateless servers: what stands in for a lost shard, and what comes back.

What comes back is the checkpoint with the kept gradients applied in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecrm.checkpoint.folder import CheckpointFolder, name_of
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.restore import Restorer
from ecrm.engine.engine import Engine
from ecrm.engine.events import Event, Restored
from ecrm.engine.hooks import Hooks
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.placement.tables import Table
from ecrm.placement.view import failures_left
from ecrm.placement.view_change import plan_recovery
from ecrm.protection.stand_in import LastSeen, StandIn
from ecrm.protection.stateless import StatelessProtection
from ecrm.storage.base import NativeStore
from ecrm.storage.initial_rows import InitialRows
from ecrm.storage.missing_rows import MissingRows
from ecrm.testing.simulate.checkers import Checkers, _hosts_its_shards
from ecrm.testing.simulate.promise import Violation, survivable
from ecrm.testing.simulate.workload import Outcome, Workload, rows_of, run_workload
from ecrm.testing.simulated_transport import (
    PhaseFault,
    ProgramFailed,
    RandomFaults,
    SimulatedCluster,
)
from support.seeds import some_and_more
from support.simulating import dies_once
from support.telling import noted_in


def test_a_row_displaced_by_another_is_not_known_and_none_is_mixed_up():
    generator = torch.Generator().manual_seed(3)
    cache, value_of = LastSeen(50, 4), {}
    for _ in range(200):
        rows = torch.randint(0, 400, (60,), generator=generator).unique()
        values = torch.rand(rows.numel(), 4, generator=generator)
        cache.put(rows, values)
        value_of.update(zip(rows.tolist(), values, strict=True))
        asked = torch.randint(0, 400, (80,), generator=generator).unique()
        known, found = cache.get(asked)
        assert all(
            torch.equal(found[i], value_of[int(asked[i])]) for i in known.nonzero().squeeze(1)
        )
        known, _ = cache.get(rows)
        assert int(known.sum()) == (rows % 50).unique().numel(), "one row of each place stays"
    assert cache.memory_bytes == 50 * (8 + 4 * 4)


def test_values_may_be_picked_of_others():
    cache = LastSeen(4, 2)
    cache.put(
        torch.tensor([6, 1, 2]), torch.arange(10.0).view(5, 2), picked=torch.tensor([4, 0, 4])
    )
    known, values = cache.get(torch.tensor([6, 2, 1]))
    assert known.sum() == 2 and known[2] and values.tolist() == [[8.0, 9.0], [8.0, 9.0], [0.0, 1.0]]


def test_with_an_entry_for_each_row_nothing_is_displaced():
    cache = LastSeen(9, 2)
    cache.put(torch.arange(8), torch.arange(16.0).view(8, 2))
    known, values = cache.get(torch.arange(9))
    assert known.tolist() == [True] * 8 + [False] and torch.equal(
        values[:8], torch.arange(16.0).view(8, 2)
    )


def _stand_in(entries: int = 10) -> StandIn:
    layouts = [RowLayout(StripeShape(2, 1, 0), 20)]
    return StandIn(
        layouts, lambda space, rows: -rows.float().unsqueeze(1).expand(-1, 3).contiguous(), entries
    )


def test_rows_never_seen_have_their_initial_values_and_both_are_counted():
    stand_in = _stand_in()
    assert stand_in.values(1, 0, torch.tensor([3])).tolist() == [[-3.0] * 3]
    stand_in.saw(0, torch.tensor([3, 5]), torch.tensor([[1.0] * 3, [2.0] * 3]))
    stand_in.committed()
    assert stand_in.values(1, 0, torch.tensor([13, 5, 3])).tolist() == [
        [-13.0] * 3,
        [2.0] * 3,
        [1.0] * 3,
    ]
    assert (stand_in.served(1).seen, stand_in.served(1).initial) == (2, 2)
    stand_in.undo(0)
    assert (stand_in.served(1).seen, stand_in.served(1).initial) == (0, 1), (
        "a step taken back counts no more"
    )
    assert stand_in.memory_bytes == 10 * (8 + 3 * 4)


def test_kept_gradients_of_steps_taken_back_go_with_them():
    stand_in = _stand_in()
    part = (0, torch.tensor([1]), torch.ones(1, 3))
    for step in (4, 5):
        for slot in (0, 1):
            stand_in.keep(1, step, slot, [part] if slot else [])
    assert stand_in.kept_bytes == 2 * (8 + 12)
    stand_in.undo(5)
    assert [(kept.step, kept.slot) for kept in stand_in.kept(1)] == [(4, 0), (4, 1)]
    stand_in.forget([1])
    assert stand_in.kept(1) == [] and stand_in.kept_bytes == 0


def test_any_servers_may_be_lost_and_a_dense_replica_must_be_left():
    workload = Workload(protection="stateless", servers=3, trainers=1, spares=0, slots=2)
    view, shape = workload.initial_view(), workload.make_protection().shape
    assert view.dense == (0, 3) and failures_left(view, shape, any_shards=True) == 1
    after = plan_recovery(view, [0, 1, 2], shape, 2, "stateless", any_shards=True)
    assert (
        after.shards == (3, 3, 3)
        and after.rebuilding == (0, 1, 2)
        and failures_left(after, shape, any_shards=True) == 0
    )
    with pytest.raises(Exception, match="every replica of the dense model is lost"):
        plan_recovery(view, [0, 3], shape, 2, "stateless", any_shards=True)


class Alike(Checkers):
    """Checks views and shards after every commit and recovery, and that all dense states are equal.

    Rows are not those of an undisturbed run.
    """

    def _check_rank(self, rank: int, engine: Engine, step: int) -> None:
        _hosts_its_shards(rank, engine)

    def after_recovery(self, rank: int) -> None:
        super().after_recovery(rank)
        if self._through is not None:  # others have not come through yet
            return
        states = {
            tuple(engine.state.dense.value.tolist())
            for engine in self._engines.values()
            if engine.state.dense is not None
        }
        if len(states) > 1:
            raise Violation(f"after a recovery dense replicas differ: {states}")


class Run:
    """One run with checkpoints.

    `accounts` are those of the shards, `reports` how many reports of finished rows were right.
    `events` and `killed` are of all ranks. `only_read` counts how often ranks read without updating
    while shards were away.
    """

    def __init__(
        self, workload: Workload, every_steps: int, faults, kind: str = "full", seed: int = 0
    ) -> None:
        self.workload, self.events, self.reports, self.stood_in, self.only_read = (
            workload,
            [],
            0,
            0,
            0,
        )
        # (step, slot): rank, gradients by row space
        self.made: dict[tuple[int, int], tuple[int, list[torch.Tensor]]] = {}
        self.accounts: dict[tuple[int, int], dict] = {}  # (epoch, shard): account
        # (shard, step, slot) whose gradients died with their rank
        self.lost_pairs: set[tuple[int, int, int]] = set()
        engines: dict[int, Engine] = {}
        doomed: set[int] = set()
        checkers = Alike(engines, doomed, None, reshapes=False)
        policy = CheckpointPolicy(
            steps=workload.steps, every_steps=every_steps, kind=kind, full_every=3, keep=1
        )

        if isinstance(faults, RandomFaults):
            faults = replace(
                faults,
                may_kill=dies_once(
                    doomed, lambda rank: survivable(workload, engines, doomed, rank)
                ),
            )
        cluster = SimulatedCluster(workload.world_size, seed, faults, most_calls=300_000)

        def program(transport):
            rank = transport.rank

            def phase(step: int, name: str) -> None:
                cluster.enter_phase(rank, step, name)
                checkers.at_phase(rank, name)

            def started(engine: Engine) -> None:
                engines[rank] = engine
                lookup, apply, seen = engine.lookup, engine.apply, {}

                def looking(rows, *more, **words) -> dict[int, list[torch.Tensor]]:
                    stand_in = engine.state.protection.stand_in
                    before = stand_in.away, _left(engine)
                    values = lookup(rows, *more, **words)
                    if not words.get("apply_follows"):
                        assert (stand_in.away, _left(engine)) == before, (
                            "what only reads restores nothing"
                        )
                        self.only_read += bool(stand_in.away)
                    self._compare(
                        engine, rows, values, seen, remembered=words.get("apply_follows", False)
                    )
                    return values

                def noting(given) -> None:
                    for slot, by_space in given.row_gradients.items():
                        self.made[engine.step, slot] = rank, [tensor.clone() for tensor in by_space]
                    apply(given)

                engine.lookup, engine.apply = looking, noting

            def event(told: Event) -> None:
                self.events.append(told.to_dict())
                if isinstance(told, Restored):
                    for account in told.shards:
                        self._note(account, told.epoch, engines[rank].view.live)

            own = CheckpointFolder(Path(workload.folder))
            hooks = Hooks(
                phase=phase,
                event=event,
                committed=lambda: checkers.after_commit(rank),
                recovered=lambda: checkers.after_recovery(rank),
            )
            try:
                return run_workload(
                    workload,
                    transport,
                    hooks,
                    after_start=started,
                    durable=Restorer(own),
                    report=lambda tables: self._check(engines, engines[rank]),
                    make_checkpoints=lambda engine: Checkpoints(
                        engine,
                        own,
                        {},
                        policy,
                        noted_in(self.events),
                        lambda: 0.0,
                        lambda work: work(),
                    ),
                )
            finally:
                engines.pop(rank, None)

        outcome = cluster.run(program)
        self.killed = outcome.killed
        self.finished = [
            result for result in outcome.results.values() if isinstance(result, Outcome)
        ]

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    def _compare(
        self,
        engine: Engine,
        rows,
        values,
        seen: dict[tuple[int, int], torch.Tensor],
        remembered: bool,
    ) -> None:
        """Rows of shards that are away: as this rank's slots have `seen` them last, or initial."""
        away = engine.state.protection.stand_in.away
        if self.workload.last_seen_rows < max(space.rows for space in engine.state.spaces):
            return
        before = dict(seen)
        for slot, by_space in values.items():
            for space, of_space in enumerate(by_space):
                shards, _ = engine.state.layouts[space].locate(rows[slot][space])
                initial = InitialRows(engine.state.spaces[space], self.workload.seed)(
                    rows[slot][space]
                )
                for place, (row, shard) in enumerate(
                    zip(rows[slot][space].tolist(), shards.tolist(), strict=True)
                ):
                    if shard not in away:
                        if remembered:
                            seen[space, row] = of_space[place]
                    else:
                        self.stood_in += 1
                        assert torch.equal(
                            of_space[place], before.get((space, row), initial[place])
                        ), (engine.step, space, row)

    def _note(self, account: dict, epoch: int, live: Iterable[int]) -> None:
        """Every rank has the same account, and each dead rank's gradients are lost."""
        assert self.accounts.setdefault((epoch, account["shard"]), account) == account
        away = range(account["lost_at_step"], account["lost_at_step"] + account["steps_away"])
        lost = {
            (account["shard"], at, slot)
            for at in away
            for slot in range(self.workload.slots)
            if self.made[at, slot][0] not in live
        }
        assert len(lost) == account["lost_slot_steps"]
        self.lost_pairs |= lost

    def _check(self, engines: dict[int, Engine], reporter: Engine) -> None:
        """Every row and its state is what the gradients made of it that did not get lost."""
        self.reports += 1
        for shard, host in enumerate(reporter.view.shards):
            for space in range(len(reporter.state.spaces)):
                local = torch.arange(reporter.state.layouts[space].data_rows_per_shard)
                found = engines[host].state.hosted[shard, space].store.read(local)
                assert torch.equal(found, self._expected(reporter, shard, space).read(local)), (
                    shard,
                    space,
                    self.accounts,
                )

    def _expected(self, engine: Engine, shard: int, space: int):
        """A shard's rows after all steps except those that an account calls lost.

        Each step makes one update, with the slots' gradients added in order.
        """
        workload, layout, this = (
            self.workload,
            engine.state.layouts[space],
            engine.state.spaces[space],
        )
        store = NativeStore(
            layout.data_rows_per_shard,
            this.dim,
            SparseOptimizer(workload.optimizer, 0.05),
            lambda local: InitialRows(this, workload.seed)(layout.rows_of(shard, local)),
        )
        mine = [account for (_, number), account in self.accounts.items() if number == shard]
        for step in range(workload.steps):
            if any(
                account["checkpoint_step"] <= step < account["lost_at_step"] for account in mine
            ):
                continue
            totals: dict[int, torch.Tensor] = {}
            for slot in range(workload.slots):
                if (shard, step, slot) in self.lost_pairs:
                    continue
                shards, local = layout.locate(rows_of(workload, step, slot)[space])
                for row, gradient in zip(
                    local[shards == shard].tolist(),
                    self.made[step, slot][1][space][shards == shard],
                    strict=True,
                ):
                    totals[row] = totals.get(row, torch.zeros(this.dim)) + gradient
            if totals:
                store.update(
                    torch.tensor(sorted(totals)),
                    torch.stack([totals[row] for row in sorted(totals)]),
                )
        return store


def _left(engine: Engine) -> dict[int, int]:
    """Rows that are missing of each shard hosted here."""
    found: dict[int, int] = {}
    for (shard, _), hosted in engine.state.hosted.items():
        found[shard] = found.get(shard, 0) + hosted.missing_rows
    return found


def _workload(folder: Path, **more) -> Workload:
    tables = (Table("a", 60, 4), Table("b", 30, 8))
    return Workload(
        **{
            "tables": tables,
            "protection": "stateless",
            "folder": str(folder),
            "steps": 12,
            "rebuild_rows_per_step": 4,
            **more,
        }
    )


@pytest.mark.parametrize("kind", ["full", "incremental"])
def test_a_lost_shard_is_the_checkpoint_with_what_was_kept(tmp_path, kind):
    run = Run(_workload(tmp_path), 3, [PhaseFault(1, 5, "update")], kind)
    (account,) = run.accounts.values()
    assert (
        account["shard"],
        account["checkpoint_step"],
        account["lost_at_step"],
        account["lost_steps"],
    ) == (1, 3, 5, 2)
    assert account["steps_away"] >= 2 and account["kept_rows"] > 0 and account["last_seen_rows"] > 0
    assert (
        account["last_seen_rows"] + account["initial_rows"] == account["kept_rows"] == run.stood_in
    )
    assert run.reports == 1 and len(run.finished) == run.workload.world_size - 1
    assert {event["step"] for event in run.of("checkpoint")} >= {3, 12}, (
        "written again once all are whole"
    )


def test_with_a_checkpoint_at_every_step_no_update_is_lost(tmp_path):
    run = Run(_workload(tmp_path), 1, [PhaseFault(2, 7, "parity")])
    (account,) = run.accounts.values()
    assert account["lost_steps"] == 0 and account["steps_away"] > 0 and run.reports == 1


def test_before_the_first_checkpoint_a_lost_shard_starts_anew(tmp_path):
    run = Run(_workload(tmp_path), 100, [PhaseFault(0, 6, "lookup")])
    (account,) = run.accounts.values()
    assert (account["checkpoint_step"], account["lost_steps"]) == (0, 6) and run.reports == 1


def test_a_damaged_checkpoint_is_not_used(tmp_path):
    class Damaging(StatelessProtection):
        def adopt(self, view):
            for file in (tmp_path / name_of(6)).glob("rows*"):
                file.write_bytes(bytes(len(file.read_bytes())))
            super().adopt(view)

    def damaging(self):
        plain = make(self)
        return Damaging(self.servers, plain._source, self.last_seen_rows)

    make = Workload.make_protection
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "make_protection", damaging)
        patch.setattr("ecrm.checkpoint.folder.CheckpointFolder.prune", lambda self, keep: None)
        run = Run(_workload(tmp_path), 3, [PhaseFault(1, 8, "update")])
    (account,) = run.accounts.values()
    assert (account["checkpoint_step"], account["lost_at_step"]) == (3, 8) and run.reports == 1
    (refused,) = account["refused"]
    assert f"{tmp_path / name_of(6)} is not used: " in refused and "damaged: CRC-32" in refused


@pytest.mark.parametrize("rows_per_piece", [5, 1 << 16])
def test_a_resumed_run_restores_from_what_it_goes_on_from_until_it_has_its_own(
    tmp_path, monkeypatch, rows_per_piece
):
    monkeypatch.setattr("ecrm.checkpoint.lost_rows.FRAME_ROWS", rows_per_piece)
    Run(_workload(tmp_path / "first", steps=6), 3, [])
    layouts = [RowLayout(StripeShape(4, 1, 0), rows) for rows in (60, 30)]
    reader = CheckpointRows(
        CheckpointFolder(tmp_path / "none"), [tmp_path / "first" / name_of(6)]
    ).read(2, layouts)
    assert reader.step is None
    assert len(list(reader.check())) > 1 and reader.step == 6 and not reader.refused
    rows = [
        (space, int(row))
        for space, local, records in reader.pieces()
        for row in layouts[space].rows_of(2, local)
    ]
    used = {
        (space, int(row))
        for step in range(6)
        for slot in (0, 1)
        for space, rows in enumerate(rows_of(_workload(tmp_path), step, slot))
        for row in rows
    }
    assert len(rows) == len(set(rows)) and set(rows) == {
        (space, row) for space, row in used if row % 4 == 2
    }


def test_rows_in_no_checkpoint_are_found_all_at_once_and_that_is_taken_back():
    missing = MissingRows(10)
    missing.remove(torch.tensor([3]))
    missing.committed()
    missing.remove(torch.tensor([4]))
    missing.remove_rest()
    assert missing.count == 0 and not missing.among(torch.arange(10)).any()
    assert missing.undo().tolist() == [4] and missing.count == 9
    assert missing.among(torch.arange(10)).tolist() == [True] * 3 + [False] + [True] * 6


def test_all_servers_die_at_once_and_the_host_of_one_again(tmp_path):
    faults = [PhaseFault(rank, 5, "update") for rank in range(4)] + [PhaseFault(6, 6, "dense")]
    run = Run(_workload(tmp_path), 2, faults)
    assert len(run.killed) == 5 and len(run.accounts) == 4 and run.reports == 1
    assert {account["lost_at_step"] for account in run.accounts.values()} == {5}


def test_what_only_reads_meets_the_same_stand_in_however_long_it_takes(tmp_path):
    run = Run(
        _workload(tmp_path, looks_between=True, steps=20, rebuild_rows_per_step=2),
        3,
        [PhaseFault(1, 5, "update")],
    )
    (account,) = run.accounts.values()
    assert run.only_read and run.reports == 1
    assert (
        account["last_seen_rows"] + account["initial_rows"] == account["kept_rows"] < run.stood_in
    ), "what only reads does not count"


def test_a_trainer_that_dies_takes_what_it_kept_along(tmp_path):
    run = Run(
        _workload(tmp_path, trainers=3, slots=3),
        4,
        [PhaseFault(1, 5, "update"), PhaseFault(5, 7, "update")],
    )
    (account,) = run.accounts.values()
    assert account["lost_slot_steps"] == 2 and run.reports == 1, account


def test_a_server_dies_after_all_have_gone_back_to_a_checkpoint(tmp_path):
    faults = [PhaseFault(4, 5, "update"), PhaseFault(5, 5, "update"), PhaseFault(1, 7, "update")]
    run = Run(_workload(tmp_path, spares=3, last_seen_rows=5), 2, faults, seed=2)
    assert {event["step"] for event in run.of("rolled_back")} == {4}
    (account,) = run.accounts.values()
    assert (account["checkpoint_step"], account["lost_at_step"]) == (6, 7) and run.reports == 1


@pytest.mark.parametrize("seeds", some_and_more(10, 200))
def test_any_servers_die_at_any_instant(tmp_path, seeds):
    killed = restored = away = lost_pairs = 0
    for seed in seeds:
        rng = random.Random(f"stateless {seed}")
        workload = _workload(
            tmp_path / str(seed),
            seed=seed,
            servers=rng.randint(1, 5),
            trainers=rng.randint(1, 3),
            slots=3,
            spares=rng.choice((0, 1, 3)),
            layout=rng.choice(("dedicated", "colocated")),
            commit_interval=rng.choice((1, 1, 3)),
            look_ahead=rng.random() < 0.7,
            looks_between=rng.random() < 0.5,
            optimizer=rng.choice(("sgd", "rowwise_adagrad", "adagrad")),
            rebuild_rows_per_step=rng.choice((1, 4, 16, 1000)),
            last_seen_rows=rng.choice((5, 1000)),
            steps=14,
        )
        if workload.world_size < 2:
            workload = replace(workload, spares=1)
        faults = RandomFaults(
            most=6,
            per_call=rng.choice((0.005, 0.02)),
            per_recovery_call=rng.choice((0.0, 0.05, 0.3)),
            together=0.3,
        )
        run = Run(
            workload, rng.choice((2, 3, 5, 9)), faults, rng.choice(("full", "incremental")), seed
        )
        assert run.reports and run.finished and not run.of("rolled_back"), seed
        killed, restored = killed + len(run.killed), restored + len(run.accounts)
        away += sum(account["steps_away"] for account in run.accounts.values())
        lost_pairs += len(run.lost_pairs)
    print(
        f"{killed} deaths, {restored} shards restored, {away} steps without one, gradients of "
        f"{lost_pairs} slots' steps lost with their ranks"
    )
    tens = len(seeds) / 10
    assert killed > 20 * tens and restored > 12 * tens and away > 40 * tens and lost_pairs > tens


@pytest.mark.parametrize(
    "broken",
    [
        "gradients of undone steps stay",
        "a kept gradient is forgotten",
        "kept gradients come in another order",
        "rows are left out",
        "rows are not as last seen",
    ],
)
def test_a_broken_protection_is_caught(tmp_path, monkeypatch, broken):
    if broken == "gradients of undone steps stay":
        monkeypatch.setattr(StandIn, "undo", lambda self, committed: None)
    elif broken == "a kept gradient is forgotten":
        monkeypatch.setattr(StandIn, "keep", _without_rows)
    elif broken == "kept gradients come in another order":
        monkeypatch.setattr(
            StandIn,
            "kept",
            lambda self, shard: [
                replace(entry, step=1000 - entry.step) for entry in kept(self, shard)
            ],
        )
    elif broken == "rows are left out":
        restore = "ecrm.storage.hosted.HostedShard.restore"
        monkeypatch.setattr(restore, lambda self, rows, records: self.missing.remove(rows))
    else:
        monkeypatch.setattr(
            LastSeen,
            "put",
            lambda self, rows, values, picked=None: put(self, rows, values + 1, picked),
        )
    faults = [PhaseFault(1, 5, "update"), PhaseFault(4, 7, "parity")]
    with pytest.raises(ProgramFailed) as failed:
        Run(_workload(tmp_path, trainers=3, slots=3), 3, faults)
    assert all(isinstance(error, AssertionError) for error in failed.value.errors.values()), (
        failed.value.errors
    )


def _without_rows(self, shard, step, slot, parts):
    keep(self, shard, step, slot, [] if step == 6 and slot == 1 else parts)


keep, kept, put = StandIn.keep, StandIn.kept, LastSeen.put
