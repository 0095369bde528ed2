"""Checks of all engines after every commit and recovery, from outside the engine."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.parity import ParityRows
from ecrm.protection.replicate import Held, ReplicateProtection
from ecrm.storage.base import without_padding
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.testing.simulate.oracle import Truth
from ecrm.testing.simulate.promise import Circle, Violation
from ecrm.testing.simulate.role_checks import Roles


class Checkers:
    """Compares the engines of a simulated cluster with the oracle; raises Violation.

    `first` are the stripes at the start, by default the present stripes. `together` is whether
    ranks with slots host shards at the start.
    `engines` maps ranks to engines. `doomed` holds the ranks with a decided death; the checkers
    skip these ranks. The caller keeps `engines` and `doomed` current, and calls the methods from
    the hooks of every engine.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        doomed: Set[int],
        truth: Truth,
        reshapes: bool = True,
        first: Circle | None = None,
        together: bool = False,
    ) -> None:
        self._all, self._doomed, self._truth = engines, doomed, truth
        self._roles = Roles(reshapes, first, together)
        self._committed: dict[int, tuple[int, int]] = {}
        # ranks that have finished the current recovery
        self._through: set[int] | None = None
        self._parity: dict[tuple[int, int, int, Circle], Tensor] = {}
        self.commits = self.recoveries = self.rows = self.parity_rows = 0

    @property
    def unsearched(self) -> int:
        """See `Roles`."""
        return self._roles.unsearched

    @property
    def _engines(self) -> dict[int, Engine]:
        return {rank: engine for rank, engine in self._all.items() if rank not in self._doomed}

    def at_phase(self, rank: int, phase: str) -> None:
        """A phase begins on a rank."""
        if rank in self._engines:
            if phase == "recover":
                self._through = set()
            self._roles.at_phase(rank, self._all[rank], phase)

    def joined(self, rank: int) -> None:
        """A rank that was dead has joined, with a new engine."""
        self._roles.joined(rank)

    def after_commit(self, rank: int) -> None:
        """Check after a commit of a rank; the first live rank checks the whole cluster.

        If all ranks that accepted a commit die, the survivors make and check the commit again.
        """
        engines = self._engines
        if rank not in engines:
            return
        engine = engines[rank]
        self._never_backwards()
        reshaped = self._roles.after_commit(rank, engine)
        if any(
            other.state.commits >= engine.state.commits
            for mate, other in engines.items()
            if mate != rank
        ):
            if reshaped:  # at the check of the whole cluster, this rank still had the old layout
                self._check_rank(rank, engine, engine.committed)
            return
        self.commits += 1
        self._check_all(engine.committed)
        for mate, other in engines.items():
            if mate in other.view.dense and other.state.dense is None:
                raise Violation(
                    f"rank {mate} commit {engine.committed}: "
                    "it should hold the dense replica and has none"
                )

    def after_recovery(self, rank: int) -> None:
        """Check after a recovery of a rank; the last live rank checks the whole cluster.

        No rank can have gone on before the last rank.
        """
        engines = self._engines
        if self._through is None or rank not in engines:
            return
        self._through.add(rank)
        if engines.keys() - self._through:
            return
        self._through = None
        self.recoveries += 1
        self._never_backwards()
        stood = {
            (engine.state.commits, engine.committed, engine.step) for engine in engines.values()
        }
        if len(stood) > 1:
            raise Violation(
                "after a recovery ranks stand at different "
                f"(commits, committed steps, steps): {sorted(stood)}"
            )
        self._roles.after_recovery(engines)
        self._check_all(engines[rank].committed)

    def _check_all(self, step: int) -> None:
        for rank, engine in self._engines.items():
            self._check_rank(rank, engine, step)
        self._roles.check(self._engines)
        if any(engine.state.protection.kind.copies_at_slots for engine in self._engines.values()):
            check_copies(self._engines, self._truth, step)

    def _never_backwards(self) -> None:
        for rank, engine in self._engines.items():
            now = (
                engine.recovery.rollbacks,
                engine.committed,
            )  # only a checkpoint takes a commit back
            if now < self._committed.get(rank, (0, 0)):
                raise Violation(
                    f"rank {rank} took commit {self._committed[rank][1]} back to {engine.committed}"
                )
            self._committed[rank] = now

    def _check_rank(self, rank: int, engine: Engine, step: int) -> None:
        _hosts_its_shards(rank, engine)
        circle = Circle.of(engine.state.protection.shape)
        for (shard, space), hosted in engine.state.hosted.items():
            truth = self._records(engine, step, space)
            rows = torch.from_numpy(circle.rows_on(shard, len(truth)).reshape(-1))
            local = (rows < len(truth)).nonzero().squeeze(1)
            if hosted.missing is not None:
                local = local[~hosted.missing.among(local)]
            held = hosted.store.read_to_host(local)
            wrong = (held != truth[rows[local]]).any(dim=1).nonzero().squeeze(1)
            self.rows += local.numel()
            if wrong.numel():
                layout = engine.state.layouts[space]
                raise Violation(
                    f"rank {rank} commit {step}: row "
                    f"{int(layout.rows_of(shard, local[wrong[0]]))} of space {space} "
                    f"(shard {shard}) is not the oracle's"
                )
        if engine.state.protection.kind.copies_at_slots:
            check_held(rank, engine, self._truth, step)
        elif engine.state.protection.shape.m:
            self._check_parity(rank, engine, step)
        if engine.state.dense is not None and not torch.equal(
            self._truth.job.dense_value(engine), self._truth.dense[step]
        ):
            raise Violation(f"rank {rank} commit {step}: the dense replica is not the oracle's")
        if engine.state.dense is not None:
            self._check_notes(rank, engine, step)

    def _check_notes(self, rank: int, engine: Engine, step: int) -> None:
        for noted in range(max(step - self._truth.job.remembered, 0), step):
            notes, truth = engine.state.log.of(noted), self._truth.notes[noted]
            if notes.keys() != truth.keys() or not all(
                torch.equal(note, truth[slot]) for slot, note in notes.items()
            ):
                raise Violation(
                    f"rank {rank} commit {step}: the notes on step {noted} are not the oracle's"
                )
        if undone := [
            late for late in range(engine.step, len(self._truth.notes)) if engine.state.log.of(late)
        ]:
            raise Violation(
                f"rank {rank} commit {step}: it has notes on step {undone[0]}, which is not done"
            )

    def _check_parity(self, rank: int, engine: Engine, step: int) -> None:
        circle = Circle.of(engine.state.protection.shape)
        for (shard, space), parity in _parity(engine).items():
            records = self._records(engine, step, space)
            stripes = circle.parity_on(shard, len(records))
            for t in range(circle.m):
                local = torch.arange(t, stripes.size, circle.m)
                if parity.missing is not None:
                    local = local[~parity.missing.among(local)]
                expected = self._parity_of(step, space, t, circle, records)[
                    torch.from_numpy(stripes.reshape(-1))[local]
                ]
                self.parity_rows += local.numel()
                held = without_padding(parity.read(local).cpu(), expected.shape[1])
                if not torch.equal(expected, held):
                    raise Violation(
                        f"rank {rank} commit {step}: "
                        f"parity {t} on shard {shard} is not that of the data"
                    )

    def _records(self, engine: Engine, step: int, space: int) -> Tensor:
        """The oracle's records, uint8 [R, B], in the order of the stripes' rows."""
        layout, records = engine.state.layouts[space], self._truth.records[step][space]
        if layout.places is None:
            return records
        circle = Circle.of(layout.shape)
        each = layout.data_rows_per_shard
        in_order = records.new_zeros(each * circle.shards, records.shape[1])
        counts = torch.zeros(len(records), dtype=torch.int64)
        for shard in range(circle.shards):
            rows = layout.rows_of(shard, torch.arange(each))
            known = rows < len(records)
            places = torch.from_numpy(circle.rows_on(shard, len(in_order)).reshape(-1))
            in_order[places[known]] = records[rows[known]]
            counts.index_add_(0, rows[known], torch.ones_like(rows[known]))
        if (counts != 1).any():
            row = int((counts != 1).nonzero()[0])
            raise Violation(f"row {row} of space {space} has {int(counts[row])} places")
        return in_order

    def _parity_of(self, step: int, space: int, t: int, circle: Circle, records: Tensor) -> Tensor:
        """Parity t of all stripes of the oracle's records; a cache keeps the newest results.

        `records` are as from `_records`: all ranks of a view have the same layouts.
        """
        key = (step, space, t, circle)
        if key not in self._parity:
            if len(self._parity) > 100:
                self._parity.clear()
            self._parity[key] = torch.from_numpy(circle.parity(records.numpy(), t))
        return self._parity[key]


def _parity(engine: Engine) -> dict[ShardSpace, ParityRows]:
    """The parity rows or copies hosted by a rank."""
    protection = engine.state.protection
    assert isinstance(protection, ErasureProtection)
    return protection.parity


def _newest_held(engine: Engine) -> dict[ShardSpace, list[Held]]:
    """The copies of rows held by a trainer."""
    protection = engine.state.protection
    assert isinstance(protection, ReplicateProtection)
    return protection.newest_held


def _hosts_its_shards(rank: int, engine: Engine) -> None:
    """Raise Violation unless a rank holds the rows and parity of exactly its shards by the view.

    Rows may be missing in rebuilding shards only.
    """
    due = {
        (shard, space)
        for shard in engine.view.shards_of(rank)
        for space in range(len(engine.state.spaces))
    }
    all_held: list[Mapping[ShardSpace, HostedShard | ParityRows]] = [engine.state.hosted]
    if engine.state.protection.shape.m:
        all_held.append(_parity(engine))
    for held in all_held:
        if set(held) != due:
            raise Violation(
                f"rank {rank} holds (shard, space) {sorted(held)}, by its view {sorted(due)}"
            )
        for (shard, _space), rows in held.items():
            if rows.missing_rows and shard not in engine.view.rebuilding:
                raise Violation(
                    f"rank {rank} misses {rows.missing_rows} rows of shard {shard}, "
                    "which is not rebuilding"
                )


def check_held(rank: int, engine: Engine, truth: Truth, step: int) -> None:
    """Raise Violation unless a trainer's copies equal the oracle's rows at the commit."""
    for (shard, space), copies in _newest_held(engine).items():
        for copy in copies:
            expected = truth.records[step][space][
                engine.state.layouts[space].rows_of(shard, copy.rows)
            ]
            if not torch.equal(without_padding(copy.records, expected.shape[1]), expected):
                raise Violation(
                    f"rank {rank} commit {step}: "
                    f"a trainer's copy of rows of shard {shard} is not the oracle's"
                )


def check_copies(engines: Mapping[int, Engine], truth: Truth, step: int) -> None:
    """Raise Violation unless every row is current in m + 1 failure domains, or in all backups.

    Domains of the row's shard, of current backups and of trainers' copies count. Nothing is checked
    while a shard rebuilds, while views differ, or if a rank has died since the commit.
    """
    engine = next(iter(engines.values()))
    view, shape = engine.view, engine.state.protection.shape
    if (
        engine.state.live_at_commit != view.live
        or view.rebuilding
        or set(view.live) != set(engines)
        or any(other.view != view for other in engines.values())
    ):
        return
    for space, layout in enumerate(engine.state.layouts):
        for shard in range(shape.shards):
            local = torch.arange(layout.data_rows_per_shard)
            rows = layout.rows_of(shard, local)
            local, rows = local[rows < layout.rows], rows[rows < layout.rows]
            expected = truth.records[step][space][rows]
            domains = {
                view.domains[rank]: torch.zeros(local.numel(), dtype=torch.bool)
                for rank in view.live
            }
            domains[view.domains[view.shards[shard]]][:] = True
            stripes, everywhere = (
                layout.stripes_of_data(shard, local),
                torch.ones(local.numel(), dtype=torch.bool),
            )
            for link in range(shape.m):
                holder = shape.shard_of_unit(shape.residue_of_unit(shard, 0), 1 + link)
                host = view.shards[holder]
                backups = _parity(engines[host])[holder, space]
                backup = backups.read(layout.local_of_unit(stripes, 1 + link)).cpu()
                current = (without_padding(backup, expected.shape[1]) == expected).all(dim=1)
                domains[view.domains[host]] |= current
                everywhere &= current
            for rank, other in engines.items():
                for copy in _newest_held(other).get((shard, space), []):
                    domains[view.domains[rank]] |= torch.isin(local, copy.rows)
            copies = torch.stack(list(domains.values())).sum(dim=0)
            few = ((copies <= shape.m) & ~everywhere).nonzero().squeeze(1)
            if few.numel():
                row, found = int(rows[few[0]]), int(copies[few[0]])
                raise Violation(
                    f"commit {step}: row {row} of space {space} is current in {found} failure "
                    "domains, and not in all its backups"
                )
