"""The values that rows of one row space had when they were last seen, within a bounded memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.allocate import lazy_zeros
from ecrm.kernels.records import scatter_records


class LastSeen:
    """A direct-mapped cache: row r has place r mod `entries`, where the row seen last displaces any other.

    With as many entries as rows nothing is ever displaced. Arguments named `rows` are unique int64
    row numbers [R], values are float32 [R, dim].
    """

    def __init__(self, entries: int, dim: int) -> None:
        self._rows = lazy_zeros(entries, dtype=np.int64)  # one more than the row held; 0: none
        self._values = lazy_zeros(entries, dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes once every place has been used."""
        return self._rows.nbytes + self._values.nbytes

    def put(self, rows: Tensor, values: Tensor, picked: Tensor | None = None) -> None:
        """These rows have these values now, or `values[picked]`, int64 [R], of any number; of several with one place any one stays."""
        places, marks = rows % self._rows.numel(), rows + 1
        self._rows[places] = marks
        # of each place one row: rows and values must not be mixed up
        stay = (self._rows[places] == marks).nonzero().squeeze(1)
        scatter_records(
            self._values,
            (),
            places[stay],
            values.view(torch.uint8),
            picked=stay if picked is None else picked[stay],
        )

    def get(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(which rows are held, bool [R]; their values, any value for the others)."""
        places = rows % self._rows.numel()
        return self._rows[places] == rows + 1, self._values.index_select(0, places)
