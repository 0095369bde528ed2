"""A dense replica's state of the last two commits, in two files written in turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecrm.base.errors import DataError
from ecrm.protection.mapped_files.file_access import open_file, read_at, write_at
from ecrm.protection.mapped_files.words import Words

NEVER = -1


class DenseFile:
    """The files NAME.words, NAME.dense0 and NAME.dense1 in a folder, made if missing.

    `written_bytes` counts the states written. Raises OSError.
    """

    def __init__(self, folder: Path, name: str, durable: bool) -> None:
        self._durable, self.written_bytes = durable, 0
        self._slots = [open_file(folder / f"{name}.dense{slot}") for slot in (0, 1)]
        self._words = Words(
            folder / f"{name}.words",
            {"step0": NEVER, "step1": NEVER, "tensors": 0, "tensors0": 0, "tensors1": 0},
            durable,
        )

    @property
    def steps(self) -> set[int]:
        """Steps with a dense state in the files."""
        return {self._words["step0"], self._words["step1"]} - {NEVER}

    def keep(self, step: int, state: Sequence[Tensor], committed: int) -> None:
        """Write the state of `step`, as exported; the state of `committed` stays."""
        slot = 1 if self._words["step0"] == committed else 0
        self._words[f"step{slot}"] = NEVER
        self._words[f"tensors{slot}"] = len(state)
        self._flush()
        data = BytesIO()
        for tensor in state:
            np.save(data, tensor.numpy(), allow_pickle=False)
        write_at(self._slots[slot], data.getvalue(), 0, self._durable)
        self.written_bytes += data.tell()
        self._words[f"step{slot}"] = step
        self._flush()

    def state(self, step: int) -> list[Tensor]:
        """The state of `step`. Raises DataError if the file has no readable state."""
        slot = 0 if self._words["step0"] == step else 1
        # files of earlier versions have a common count
        file, count = self._slots[slot], self._words[f"tensors{slot}"] or self._words["tensors"]
        data = BytesIO(read_at(file, os.fstat(file.fileno()).st_size, 0))
        tensors = []
        try:
            for _ in range(count):
                tensors.append(torch.from_numpy(np.load(data, allow_pickle=False)))
        except (ValueError, EOFError) as error:
            raise DataError(f"{file.name}: no dense state can be read from it: {error}") from None
        return tensors

    def _flush(self) -> None:
        if self._durable:
            self._words.flush()
