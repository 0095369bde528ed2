"""One shard's rows of one row space in a memory-mapped file, and journals to undo updates.

Rows are updated in place. Before an update the old records go to the journal of the last commit.
If a kill leaves part of an update behind, the old records overwrite the part. Two journals take
turns. The journal of the commit before is kept, because a rank may have seen a commit that the
other ranks will never see.

Order of writes; every write must be in the file before the next begins:
  note      old records to the journal, then its length; then the caller updates the rows
  prepare   `prepared` = the step, once every update of the step is in
  commit    the older journal's length = 0, its base = the step, then `committed` = the step
Mapped and written bytes belong to the system, so program order is enough to survive the death of
every process. To survive the death of the machine, `durable` waits for the device between writes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecrm.base.errors import DataError
from ecrm.protection.mapped_files.file_access import SHARD_WORDS, open_file, read_at, sync, write_at
from ecrm.protection.mapped_files.words import Words
from ecrm.storage.base import Store

NEVER = -1
_WORDS = dict(zip(SHARD_WORDS, (0, 0, 0, 0, NEVER, 0, 0), strict=True))


class ShardFile:
    """The files NAME.rows, NAME.words, NAME.journal0 and NAME.journal1 in a folder.

    Missing files are made. `allocate` gives a store its memory, piece after piece in the order of
    the calls. Commits are named by step. `written_bytes` counts the bytes written by the object to
    journals and rows, without the few words. Raises OSError.
    """

    def __init__(self, folder: Path, name: str, durable: bool) -> None:
        self.path = folder / f"{name}.rows"
        self.written_bytes = 0
        self._durable = durable
        self._rows = open_file(self.path)
        self._journals = [open_file(folder / f"{name}.journal{slot}") for slot in (0, 1)]
        self._words = Words(folder / f"{name}.words", _WORDS, durable)
        self._maps: list[mmap.mmap] = []
        self._end = 0

    @property
    def committed(self) -> int:
        """Step of the last commit seen by the file."""
        return self._words["committed"]

    @property
    def prepared(self) -> int:
        """Last step known to be complete in the rows: `committed`, or the commit after."""
        return max(self._words["prepared"], self.committed)

    @property
    def journal_bytes(self) -> int:
        return self._words["length0"] + self._words["length1"]

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """The next piece of the file; parts never written are zeros and take no space."""
        size = max(math.prod(shape) * np.dtype(dtype).itemsize, 1)
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._words["bytes"] < self._end + whole:  # new
            self._rows.truncate(self._end + whole)
            if self._durable:
                sync(self.path)
            self._words["bytes"] = self._end + whole
        if (found := os.fstat(self._rows.fileno()).st_size) < self._end + whole:
            raise DataError(f"{self.path}: {found} bytes, {self._words['bytes']} are needed")
        memory = mmap.mmap(self._rows.fileno(), whole, offset=self._end)
        self._end += whole
        self._maps.append(memory)
        return torch.from_numpy(np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape))

    def note(self, rows: Tensor, records: Tensor) -> None:
        """Keep the records, uint8 [R, B], of local rows, int64 [R], to be updated next."""
        slot = self._slot_of(self.committed)
        entry = (
            np.array([rows.numel()], "<i8").tobytes()
            + rows.numpy().tobytes()
            + records.numpy().tobytes()
        )
        length = self._words[f"length{slot}"]
        write_at(self._journals[slot], entry, length, self._durable)
        self._words[f"length{slot}"] = length + len(entry)
        self.written_bytes += len(entry) + records.nbytes
        self._flush_words()

    def prepare(self, step: int) -> None:
        """Note: every update up to `step` is in the rows."""
        self._flush_rows()
        self._words["prepared"] = step
        self._flush_words()

    def commit(self, step: int) -> None:
        """Note: all ranks have agreed on `step`."""
        slot = 1 - self._slot_of(self.committed)
        self._words[f"length{slot}"] = 0
        self._words[f"base{slot}"] = step
        self._flush_words()
        self._words["committed"] = step
        self._flush_words()

    def go_to(self, step: int, store: Store) -> None:
        """Bring the file, and with the file the mapped `store`, to the commit of `step`.

        `step` is the last commit seen by the file, the commit before or the commit after. The call
        may be cut off and repeated. Raises DataError if the file cannot get to `step`.
        """
        if step > self.committed:
            if self.prepared < step:
                raise DataError(
                    f"{self.path}: rows of step {self.committed}, the others' are of {step}: "
                    "not files of one run"
                )
            self.commit(step)
            return
        newest, before = self._slot_of(self.committed), 1 - self._slot_of(self.committed)
        slots = [newest] if step == self.committed else [newest, before]
        if self._words[f"base{slots[-1]}"] != step:
            raise DataError(
                f"{self.path}: rows of step {self.committed} cannot go back to step {step}: "
                "not files of one run"
            )
        # first: from now on the rows are no longer the rows of a later step
        self._words["prepared"] = step
        self._flush_words()
        for slot in slots:
            for rows, records in reversed(list(self._entries(slot, store.record_bytes))):
                store.write(rows, records)
                self.written_bytes += records.nbytes
        self._flush_rows()
        self._words["committed"] = step
        self._flush_words()
        for slot in slots:
            self._words[f"length{slot}"] = 0
        self._flush_words()

    def _slot_of(self, step: int) -> int:
        return 0 if self._words["base0"] == step else 1

    def _entries(self, slot: int, record_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, old records) in the journal of a slot, oldest first."""
        data = read_at(self._journals[slot], self._words[f"length{slot}"], 0)
        at = 0
        while at < len(data):
            count = int(np.frombuffer(data, "<i8", 1, at)[0])
            rows = np.frombuffer(data, "<i8", count, at + 8)
            records = np.frombuffer(data, np.uint8, count * record_bytes, at + 8 + rows.nbytes)
            at += 8 + rows.nbytes + records.nbytes
            yield (
                torch.from_numpy(rows.copy()),
                torch.from_numpy(records.reshape(count, record_bytes).copy()),
            )

    def _flush_rows(self) -> None:
        for memory in self._maps if self._durable else ():
            memory.flush()

    def _flush_words(self) -> None:
        if self._durable:
            self._words.flush()
