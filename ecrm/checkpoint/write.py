"""One rank's part of a checkpoint: the rows of its shards and, on the reporter, the dense state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import ReusableBuffer, lazy_zeros
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.manifest import DENSE
from ecrm.checkpoint.row_file import FRAME_ROWS, SummedFile, write_rows
from ecrm.device.copies import on_host
from ecrm.engine.engine import Engine
from ecrm.placement.stripes import RowLayout
from ecrm.storage.hosted import HostedShard

Window = tuple[np.ndarray, np.ndarray]
Buffers = dict[int, ReusableBuffer]
"""Memory for the records of a shard's windows, by first local row."""


class Part:
    """This rank's part of the checkpoint of the engine's step.

    Made at a commit, when no row is missing. With `changed_only`, the part has the rows touched
    since the last `Part` of this engine; else all rows ever updated. If `noting`, the engine's
    shards note touched rows from now on. `run` writes the files. After `copy`, `run` may work while
    training goes on; `buffers`, by (shard, row space), keep the memory of copies from part to part.
    Afterwards `entries` are for the manifest, and `trouble` is the reason for a failure, else "".
    `finite` is False if a NaN or an infinity in rows, dense parameters or optimizer state is the
    reason.
    """

    def __init__(
        self,
        engine: Engine,
        draft: Path,
        disk: Disk,
        changed_only: bool,
        noting: bool,
        attempt: int,
        buffers: dict[tuple[int, int], Buffers] | None = None,
    ) -> None:
        self.step, self._draft, self._disk = engine.step, draft, disk
        # a new name per attempt: a writer given up may still be inside its last write
        self._name = f"rows-rank{engine.rank:04}-{attempt}"
        self._dense_draft = draft / f"{DENSE}-rank{engine.rank:04}-{attempt}"
        self.done = self.cancelled = False
        self.entries: list[dict[str, Any]] = []
        self.trouble, self.finite, self._spaces = "", True, engine.state.spaces
        self.dense: list[Tensor] | None = None
        if engine.rank == engine.view.reporter:
            self.dense, self._replica = engine.state.export_dense(), engine.state.dense
        self._rows: dict[int, list[Iterator[Window] | list[Window]]] = {}
        for (shard, space), hosted in sorted(engine.state.hosted.items()):
            touched = hosted.touched if changed_only else None
            own = None if buffers is None else buffers.setdefault((shard, space), {})
            if noting:
                hosted.touched = lazy_zeros(
                    engine.state.layouts[space].data_rows_per_shard, dtype=np.bool_
                )
            self._rows.setdefault(space, []).append(
                _windows(hosted, engine.state.layouts[space], shard, touched, own)
            )

    def copy(self) -> int:
        """Copy everything to be written, so that training may change rows and dense state.

        Returns the bytes of the copied row numbers and records.
        """
        self._rows = {space: [list(part) for part in parts] for space, parts in self._rows.items()}
        if self.dense is not None:
            self.dense = [tensor.clone() for tensor in self.dense]
        return sum(
            a.nbytes + b.nbytes for parts in self._rows.values() for part in parts for a, b in part
        )

    def run(self) -> None:
        """Write and sync the files; an OSError or a value not finite ends up in `trouble`."""
        try:
            for space, parts in sorted(self._rows.items()):
                windows = (
                    self._checked(space, window)
                    for part in parts
                    for window in part
                    if not self.cancelled
                )
                self.entries.append(
                    write_rows(
                        self._disk, self._draft / f"{self._name}-{space}.bin", space, windows
                    )
                )
            if self.dense is not None and not self.cancelled:
                self.entries.append(self._write_dense(self.dense))
        except OSError as error:
            self.trouble = f"cannot write {self._draft}: {error.strerror or error}"
        except FloatingPointError as error:
            self.trouble, self.finite = str(error), False
        self._rows = {}
        self.done = True

    def _checked(self, space: int, window: Window) -> Window:
        """Return a window if finite, else raise FloatingPointError with the rows in words."""
        numbers, records = window
        floats = torch.from_numpy(records).view(torch.float32)
        if not floats.sum().isfinite():  # the sum may overflow, so every number is checked
            bad = numbers[~floats.isfinite().all(1).numpy()].tolist()
            if bad:
                raise FloatingPointError(
                    f"what is not finite is in {self._spaces[space].in_words(bad)}"
                )
        return window

    def _write_dense(self, dense: list[Tensor]) -> dict[str, Any]:
        assert self._replica is not None
        if not self._replica.is_finite(dense):
            raise FloatingPointError(
                "what is not finite is in the dense parameters or their optimizer's state"
            )
        with SummedFile(self._disk, self._dense_draft) as file:
            for tensor in dense:
                file.write(np.ascontiguousarray(tensor.numpy()))
        return {"name": DENSE, "space": -1, "bytes": file.bytes, "crc32": file.checksum}

    def name_dense(self) -> None:
        """Rename the dense file, on the rank that wrote it, to its name in the manifest."""
        if self.dense is not None:
            self._disk.rename(self._dense_draft, self._draft / DENSE)

    @property
    def dense_shapes(self) -> list[dict[str, Any]]:
        """The manifest's description of the dense state; empty on ranks not writing it."""
        return [
            {"dtype": str(tensor.numpy().dtype), "shape": list(tensor.shape)}
            for tensor in self.dense or []
        ]


def _windows(
    hosted: HostedShard,
    layout: RowLayout,
    shard: int,
    touched: Tensor | None,
    buffers: Buffers | None,
) -> Iterator[Window]:
    """(row numbers int64 [R], records uint8 [R, B]) of a shard's rows ever updated.

    With `touched`, only rows also touched. With `buffers`, the records lie in the buffers.
    """
    for first in range(0, layout.data_rows_per_shard, FRAME_ROWS):
        here = slice(first, min(first + FRAME_ROWS, layout.data_rows_per_shard))
        if touched is not None and not touched[here].any():
            continue
        wanted = on_host(hosted.store.last_bytes(here))[0] != 0
        if touched is not None:
            wanted &= touched[here]
        local = wanted.nonzero().squeeze(1) + first
        if local.numel():
            out = None
            if buffers is not None:
                buffer = buffers.setdefault(
                    first, ReusableBuffer(hosted.store.kept_bytes // 4, lazy_zeros)
                )
                out = buffer.of(local.numel()).view(torch.uint8)
            yield (
                layout.rows_of(shard, local).numpy(),
                hosted.store.read_to_host(local, out).numpy(),
            )
