"""What must hold of ultralight replication after every commit: enough current copies of every row, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ecrm.engine.engine import Engine
from ecrm.simulate.oracle import Truth
from ecrm.simulate.violation import Violation


def check_held(rank: int, engine: Engine, truth: Truth, step: int) -> None:
    """The copies that a rank holds as a trainer are the rows as of the commit."""
    for (shard, space), copies in engine.protection.newest_held.items():
        for copy in copies:
            rows = engine.layouts[space].rows_of(shard, copy.rows)
            if not torch.equal(copy.records, truth.records[step][space][rows]):
                raise Violation(
                    f"rank {rank} commit {step}: a trainer's copy of rows of shard {shard} is not the oracle's"
                )


def check_copies(engines: Mapping[int, Engine], truth: Truth, step: int) -> None:
    """Every row is current in m + 1 failure domains or, where its shard and its backups are in fewer, in all of these, once nothing
    is rebuilding, all live ranks are there and none has died since the commit."""
    engine = next(iter(engines.values()))
    view, shape = engine.view, engine.protection.shape
    if (
        engine.live_at_commit != view.live
        or view.rebuilding
        or set(view.live) != set(engines)
        or any(other.view != view for other in engines.values())
    ):
        return
    for space, layout in enumerate(engine.layouts):
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
                backup = (
                    engines[host]
                    .protection.parity[holder, space]
                    .records[layout.local_of_unit(stripes, 1 + link)]
                )
                current = (backup == expected).all(dim=1)
                domains[view.domains[host]] |= current
                everywhere &= current
            for rank, other in engines.items():
                for copy in other.protection.newest_held.get((shard, space), []):
                    domains[view.domains[rank]] |= torch.isin(local, copy.rows)
            copies = torch.stack(list(domains.values())).sum(dim=0)
            few = ((copies <= shape.m) & ~everywhere).nonzero().squeeze(1)
            if few.numel():
                row, found = int(rows[few[0]]), int(copies[few[0]])
                raise Violation(
                    f"commit {step}: row {row} of space {space} is current in {found} failure domains, and not in all its backups"
                )
