"""A shard's rows on the hosting rank: storage, missing rows, and the undo log."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, ReusableBuffer, lazy_zeros
from ecrm.device.copies import on_device
from ecrm.kernels.records import merge_records
from ecrm.storage.base import Store
from ecrm.storage.missing_rows import MissingRows
from ecrm.storage.undo import Deltas, UndoLog

ShardSpace = tuple[int, int]
"""(shard, row space) numbers."""


class HostedShard:
    """One shard's rows of one row space, in `store`.

    - `missing`: the rows still to be recovered, or `None`.
    - `on_demand_rows`: number of rows recovered because a step asked for the rows.
    - `touched`: bool by row, true for changed rows; `None` if changes are not noted.
    - `journal`: called before an update with rows and old records, uint8 [R, B]; or `None`.
    - `units`: data units of a stripe; local row r is of unit `r % units`.

    Rows looked up and deltas lie in memory from `allocate`, on the device of the store. Row numbers
    are on the CPU.
    """

    def __init__(
        self,
        store: Store,
        rows: int,
        missing: bool,
        units: int = 1,
        allocate: Allocate = lazy_zeros,
    ) -> None:
        self.store, self.units = store, units
        self.missing = MissingRows(rows) if missing and rows else None
        self.on_demand_rows = 0
        self.touched: Tensor | None = None
        self.journal: Callable[[Tensor, Tensor], None] | None = None
        self._looked_up = ReusableBuffer(store.dim, allocate, store.device)
        self._log = UndoLog(rows, store.record_bytes, units, allocate, store.device)

    @property
    def missing_rows(self) -> int:
        return 0 if self.missing is None else self.missing.count

    @property
    def log_bytes(self) -> int:
        return self._log.nbytes

    def lookup(self, rows: Tensor) -> Tensor:
        """Copies of rows, float32 [R, dim]; of missing rows anything.

        In the memory of the last call's result.
        """
        return self.store.lookup(rows, self._looked_up.of(rows.numel()))

    def missing_among(self, rows: Tensor) -> Tensor:
        """The missing rows among `rows`, int64."""
        return rows[:0] if self.missing is None else rows[self.missing.among(rows)]

    def restore(self, rows: Tensor, records: Tensor) -> None:
        """Fill in missing rows with recovered records, uint8 [R, record bytes], on any device."""
        self.store.write(rows, on_device(self.store.device, records))
        if rows.numel():
            assert self.missing is not None, "only missing rows are restored"
            self.missing.remove(rows)

    def restore_rest(self) -> None:
        """Count rows still missing as recovered: their records are zeros, as kept."""
        if self.missing is not None:
            self.missing.remove_rest()

    def gradient_space(self, rows: int, keep_delta: bool) -> Tensor:
        """Memory for the summed gradients of `rows` rows in the next `update`.

        Float32 [rows, at least dim], holding anything. The gradients fill the first dim columns;
        zeros must follow.
        """
        return (
            self._log.space(rows)
            if keep_delta and not self._log.merges
            else torch.empty(rows, self.store.dim, device=self.store.device)
        )

    def update(self, rows: Tensor, sums: Tensor, keep_delta: bool, step: int) -> None:
        """Run the sparse optimizer of `step` on unique rows, no row missing, units ascending.

        With `keep_delta` the update is logged for undo.

        `sums` is the shard's `gradient_space` for as many rows and the same `keep_delta`, filled
        with the summed gradients; the caller must not use `sums` afterwards.
        """
        if self.touched is not None:
            self.touched[rows] = True
        if self.journal is not None and rows.numel():
            self.journal(rows, self.store.read(rows))
        if not keep_delta:
            self.store.update(rows, sums[:, : self.store.dim], step)
        elif rows.numel():
            merging = self._log.expect(rows)
            for some, log in merging:
                self.store.update_logged(rows[some], sums[some, : self.store.dim], log, step)
            if not merging:
                self._log.keep(rows, self.store.update_with_delta(rows, sums, step))

    def pass_over(self, rows: Tensor, keep_delta: bool) -> None:
        """Log an update without any change of the rows; arguments as in `update`.

        Protections may count on an update of all rows asked for by a step.
        """
        if not keep_delta or not rows.numel():
            return
        device = self.store.device
        nothing = torch.zeros(
            rows.numel(), self.store.record_bytes, dtype=torch.uint8, device=device
        )
        merging = self._log.expect(rows)
        for some, log in merging:
            merge_records(log, on_device(device, rows[some]), nothing[some])
        if not merging:
            space = self._log.space(rows.numel()).view(torch.uint8)
            self._log.keep(rows, space.copy_(nothing))

    def correct(self, rows: Tensor, error: Tensor) -> None:
        """Take an error, uint8 [R, record bytes], on any device, out of rows for good."""
        if self.touched is not None:
            self.touched[rows] = True
        self.store.xor(rows, on_device(self.store.device, error))

    def deltas_since_commit(self) -> Deltas:
        """Deltas since the commit: of one `update` in the given order, of several unit by unit.

        Valid until the next `update`, `undo` or commit.
        """
        return self._log.deltas()

    def undo(self) -> None:
        """Go back to the commit: apply every logged delta again. A second call changes nothing."""
        self._log.undo(self.store)
        if self.missing is not None:
            lost = self.missing.undo()
            zeros = torch.zeros(
                lost.numel(), self.store.record_bytes, dtype=torch.uint8, device=self.store.device
            )
            self.store.write(lost, zeros)

    def committed(self) -> None:
        """Forget the log: the updates since the last commit can no longer be taken back."""
        self._log.clear()
        if self.missing is not None:
            self.missing.committed()
            if not self.missing.count:
                self.missing = None
