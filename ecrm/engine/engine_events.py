"""The engine's events, made from objects of the engine. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence

from ecrm.engine import events
from ecrm.engine.failures import RecoveryRecord
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import RowSpace
from ecrm.placement.view import View
from ecrm.protection.scrub import Finding

FLOAT_BYTES = 4


def failure_event(
    failure: RecoveryRecord,
    before: View,
    view: View,
    committed: int,
    left: int,
    left_when_rebuilt: int,
) -> events.Failure:
    """Ranks died; `view` has the new hosts of the dead ranks' roles.

    `left`: how many more failure domains may be lost at once now; `left_when_rebuilt`: after the
    rebuild. `moved` in the event: shards with the rebuild begun again on a different rank.
    """
    moved = [
        shard
        for shard in before.rebuilding
        if shard not in failure.shards and view.shards[shard] != before.shards[shard]
    ]
    return events.Failure(
        ranks=list(failure.ranks),
        step=failure.step,
        phase=failure.phase,
        committed=committed,
        redone_steps=failure.redone_steps,
        recovery_seconds=failure.recovery_seconds,
        shards={shard: view.shards[shard] for shard in failure.shards},
        slots={slot: view.slots[slot] for slot in failure.slots},
        moved={shard: view.shards[shard] for shard in moved},
        failures_left=left,
        failures_left_when_rebuilt=left_when_rebuilt,
    )


def interrupted_event(
    number: int, step: int, phase: str, committed: int, redone_steps: int, seconds: float, why: str
) -> events.Interrupted:
    """The `number`-th recovery without a death; `why`: the failures, with the ranks, in words."""
    return events.Interrupted(
        number=number,
        step=step,
        phase=phase,
        committed=committed,
        redone_steps=redone_steps,
        recovery_seconds=seconds,
        why=why,
    )


def joined_event(ranks: Sequence[int], view: View, step: int, left: int) -> events.Joined:
    """Ranks have joined by `view`, the ranks to run from `step` on."""
    slots = {slot: host for slot, host in enumerate(view.slots) if host in ranks}
    return events.Joined(
        ranks=list(ranks), step=step, epoch=view.epoch, slots=slots, failures_left=left
    )


def rebuilt_event(failure: RecoveryRecord, left: int) -> events.Rebuilt:
    """The shards lost in a failure are whole again."""
    return events.Rebuilt(
        ranks=list(failure.ranks),
        shards=list(failure.shards),
        rebuild_seconds=failure.rebuild_seconds or 0.0,
        rebuilt_bytes=failure.rebuilt_bytes,
        on_demand_rows=failure.on_demand_rows,
        failures_left=left,
    )


def restored_event(step: int, view: View, accounts: list[dict[str, object]]) -> events.Restored:
    """Lost shards are whole, with the losses in `accounts`: see `Protection.accounts`."""
    return events.Restored(step=step, epoch=view.epoch, shards=accounts)


def view_event(step: int, view: View) -> events.View:
    """Roles have moved between ranks: `view` has the new hosts."""
    return events.View(step=step, epoch=view.epoch, live=list(view.live))


def reshaped_event(
    step: int, shape: StripeShape, seconds: float, moved_bytes: int, left: int
) -> events.Reshaped:
    """All data lie in stripes of `shape` now."""
    return events.Reshaped(
        step=step,
        servers=shape.shards,
        k=shape.k,
        m=shape.m,
        seconds=seconds,
        moved_bytes=moved_bytes,
        failures_left=left,
    )


def rolled_back_event(
    step: int, view: View, from_step: int, why: str, seconds: float
) -> events.RolledBack:
    """All ranks have gone back to the state of the durable tier."""
    return events.RolledBack(
        step=step,
        epoch=view.epoch,
        from_step=from_step,
        why=why,
        seconds=seconds,
    )


def corruption_event(
    finding: Finding, step: int, spaces: Sequence[RowSpace], shape: StripeShape
) -> events.Corruption:
    """The event of a finding, committed by `step`.

    `kind` is `data` (bytes of a row), `state` (optimizer state of a row), `parity`, or `unknown`
    for an unknown unit; `table` and `row` (within the table) name a wrong row and are `None` for
    the last two kinds, and for a row only filling up a stripe. `rows` are the first and last row
    protected by the stripe, numbered within the row space.
    """
    space, unit = spaces[finding.space], finding.unit
    kind, table, row = "unknown", None, None
    if unit is not None and unit >= shape.k:
        kind = "parity"
    elif unit is not None:
        kind = "data" if finding.error[: FLOAT_BYTES * space.dim].any() else "state"
        table, row = _table_and_row(space, finding.stripe * shape.k + unit)
    return events.Corruption(
        step=step,
        kind=kind,
        table=table,
        row=row,
        shard=None if unit is None else shape.shard_of_unit(finding.stripe % shape.shards, unit),
        unit=unit,
        space=finding.space,
        stripe=finding.stripe,
        rows=[finding.stripe * shape.k, finding.stripe * shape.k + shape.k - 1],
        repaired=finding.repaired,
        exact=finding.exact,
    )


def _table_and_row(space: RowSpace, row: int) -> tuple[str | None, int | None]:
    for table, offset in zip(space.tables, space.offsets, strict=True):
        if offset <= row < offset + table.rows:
            return table.name, row - offset
    return None, None
