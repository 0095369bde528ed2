"""What a finding of the scrub says about tables and rows. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence

from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import RowSpace
from ecrm.protection.scrub import Finding

FLOAT_BYTES = 4


def corruption_event(
    finding: Finding, step: int, spaces: Sequence[RowSpace], shape: StripeShape
) -> dict[str, object]:
    """The event of one finding, which `step` commits.

    `kind` is `data` (bytes of a row), `state` (its optimizer state), `parity`, or `unknown` where
    the unit cannot be told; `table` and `row` (within the table) name a wrong row and are None for
    the last two, and for a row that only fills its stripe up. `rows` are the first and last row,
    numbered within the row space, that the stripe protects.
    """
    space, unit = spaces[finding.space], finding.unit
    kind, table, row = "unknown", None, None
    if unit is not None and unit >= shape.k:
        kind = "parity"
    elif unit is not None:
        kind = "data" if finding.error[: FLOAT_BYTES * space.dim].any() else "state"
        table, row = _table_and_row(space, finding.stripe * shape.k + unit)
    return {
        "event": "corruption",
        "step": step,
        "kind": kind,
        "table": table,
        "row": row,
        "shard": None if unit is None else shape.shard_of_unit(finding.stripe % shape.shards, unit),
        "unit": unit,
        "space": finding.space,
        "stripe": finding.stripe,
        "rows": [finding.stripe * shape.k, finding.stripe * shape.k + shape.k - 1],
        "repaired": finding.repaired,
        "exact": finding.exact,
    }


def _table_and_row(space: RowSpace, row: int) -> tuple[str | None, int | None]:
    for table, offset in zip(space.tables, space.offsets, strict=True):
        if offset <= row < offset + table.rows:
            return table.name, row - offset
    return None, None
