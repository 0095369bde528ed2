"""What must hold after every commit, checked from outside the engine against the truth."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.kernels.decode import decode
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View, conflicts
from ecrm.simulate.oracle import Truth


class Violation(AssertionError):
    """Something that the design promises does not hold."""


class Checkers:
    """Looks into all engines of a simulated cluster; raises Violation.

    `engines` maps ranks to their engines and `doomed` holds those whose death is decided, which are not
    looked at; both are kept up to date by the caller.
    """

    def __init__(self, engines: Mapping[int, Engine], doomed: Set[int], truth: Truth) -> None:
        self._all, self._doomed, self._truth = engines, doomed, truth
        self._committed: dict[int, tuple[int, int]] = {}
        self.commits = self.rows = self.parity_rows = 0
        self._newest = (0, 0)

    @property
    def _engines(self) -> dict[int, Engine]:
        return {rank: engine for rank, engine in self._all.items() if rank not in self._doomed}

    def after_commit(self, engine: Engine) -> None:
        """Called by a rank that has just seen a commit; the first to see it checks the whole cluster."""
        self._never_backwards()
        if (engine.rollbacks, engine.committed) <= self._newest:
            return
        self._newest = engine.rollbacks, engine.committed
        self.commits += 1
        for rank, other in self._engines.items():
            self._check_rank(rank, other, engine.committed)
        self._views_agree()

    def _never_backwards(self) -> None:
        for rank, engine in self._engines.items():
            now = engine.rollbacks, engine.committed  # only a checkpoint takes a commit back
            if now < self._committed.get(rank, (0, 0)):
                raise Violation(f"rank {rank} took commit {self._committed[rank][1]} back to {engine.committed}")
            self._committed[rank] = now

    def _check_rank(self, rank: int, engine: Engine, step: int) -> None:
        for (shard, space), hosted in engine.hosted.items():
            layout, truth = engine.layouts[space], self._truth.records[step][space]
            rows = layout.rows_of(shard, torch.arange(layout.data_rows_per_shard))
            local = (rows < layout.rows).nonzero().squeeze(1)
            if hosted.missing is not None:
                local = local[~hosted.missing.among(local)]
            wrong = (hosted.store.read(local) != truth[rows[local]]).any(dim=1).nonzero().squeeze(1)
            self.rows += local.numel()
            if wrong.numel():
                row = int(rows[local[wrong[0]]])
                raise Violation(f"rank {rank} commit {step}: row {row} of space {space} (shard {shard}) is not the oracle's")
        if engine.protection.name == "erasure":
            self._check_parity(rank, engine, step)
        if engine.dense is not None and engine.step == step and not torch.equal(engine.dense.value, self._truth.dense[step]):
            raise Violation(f"rank {rank} commit {step}: the dense replica is not the oracle's")

    def _check_parity(self, rank: int, engine: Engine, step: int) -> None:
        code, shape = engine.protection.code, engine.protection.shape
        coefficients = torch.tensor(code.coefficients)
        for (shard, space), parity in engine.protection.parity.items():
            layout = engine.layouts[space]
            local = torch.arange(layout.parity_rows_per_shard)
            if parity.missing is not None:
                local = local[~parity.missing.among(local)]
            for t in range(shape.m):
                mine = local[local % shape.m == t]
                stripes = layout.stripes_of_parity(shard, mine)
                data = _data_of(stripes, layout, self._truth.records[step][space])
                expected = decode(data, coefficients[t : t + 1])[0]
                self.parity_rows += mine.numel()
                if not torch.equal(expected, parity.records[mine]):
                    raise Violation(f"rank {rank} commit {step}: parity {t} on shard {shard} is not that of the data")

    def _views_agree(self) -> None:
        by_epoch: dict[int, View] = {}
        for rank, engine in self._engines.items():
            view = by_epoch.setdefault(engine.view.epoch, engine.view)
            if view != engine.view:
                raise Violation(f"rank {rank} has another view of epoch {view.epoch}: {engine.view} and {view}")
            self._apart(engine)

    def _apart(self, engine: Engine) -> None:
        """No failure domain holds two members of a stripe while a spare waits in another that could take one of them."""
        view, shape = engine.view, engine.protection.shape
        for shard, host in enumerate(view.shards):
            if host not in view.live or not conflicts(shard, host, view, shape):
                continue
            free = [rank for rank in view.spares if not conflicts(shard, rank, view, shape)]
            if free:
                raise Violation(f"shard {shard} is on rank {host} with others of its stripes though spares {free} wait")


def _data_of(stripes: Tensor, layout: RowLayout, records: Tensor) -> Tensor:
    """Data units of stripes, uint8 [k, R, B], padding rows zero."""
    k = layout.shape.k
    units = torch.zeros(k, stripes.numel(), records.shape[1], dtype=torch.uint8)
    for unit in range(k):
        rows = stripes * k + unit
        inside = (rows < layout.rows).nonzero().squeeze(1)
        units[unit, inside] = records[rows[inside]]
    return units
