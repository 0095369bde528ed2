"""The missing rows of a shard after the death of the host, and the order of rebuilding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros

_WINDOW = 1 << 14
_NONE = torch.empty(0, dtype=torch.int64)


class MissingRows:
    """A set of row numbers below `rows`, all of them at first.

    `first` looks at each row once, and again only after an undo: rows not missing cost next to
    nothing.

    Rows found since the commit can be lost again: the sources of the decoding are known to be right
    only once every rank has agreed on the step.
    """

    def __init__(self, rows: int) -> None:
        self._present = lazy_zeros(rows, dtype=np.bool_)
        self._probed = self._looked = 0
        # the rows below `_looked` found missing, ascending
        self._ahead = _NONE
        self._at_commit = self._probed, self._looked, self._ahead
        self._found: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._rest = 0  # number of rows removed all at once since the commit
        self.count = rows

    def among(self, rows: Tensor) -> Tensor:
        """Bool [R]: whether each of `rows`, int64 [R], is missing."""
        return ~self._present[rows] if self.count else torch.zeros(rows.numel(), dtype=torch.bool)

    def first(self, count: int, but: Tensor = _NONE) -> Tensor:
        """The lowest `count` missing rows among rows `probed`, or all if fewer, int64.

        Rows of `but` are passed over this time.
        """
        if not self.count:
            return _NONE
        enough = count + but.numel()
        self._ahead = self._ahead[~self._present[self._ahead]]
        while self._ahead.numel() < enough and self._looked < self._probed:
            start, self._looked = self._looked, min(self._looked + _WINDOW, self._probed)
            self._ahead = torch.cat(
                [self._ahead, (~self._present[start : self._looked]).nonzero().squeeze(1) + start]
            )
        if not but.numel():
            return self._ahead[:count]
        # marks instead of a sort: a round may pass over as many rows as it takes
        marks, ahead = self._present[but], self._ahead[:enough]
        self._present[but] = True
        left = ahead[~self._present[ahead]]
        self._present[but] = marks
        return left[:count]

    def unprobed(self, count: int) -> tuple[int, int]:
        """(first, last + 1) of the next `count` rows, missing or not, not yet `probed`."""
        return self._probed, min(self._probed + count, self._present.numel())

    def probed(self, last: int) -> None:
        """Rows below `last` have been probed, and rows of zeros removed, until `undo`."""
        self._probed = max(self._probed, last)

    def remove(self, rows: Tensor) -> None:
        """Unique `rows`, all missing until now, are missing no more."""
        self._present[rows] = True
        self._found.append(rows)
        self.count -= rows.numel()

    def remove_zeros(self, rows: slice, zeros: Tensor) -> None:
        """Rows of the slice with true `zeros`, bool [R], are missing no more.

        The stored record of a missing row is always zeros.
        """
        present = self._present[rows]
        found = (zeros & ~present).nonzero().squeeze(1)
        present |= zeros
        self._zeros.append(rows.start + rows.step * found)
        self.count -= found.numel()

    def remove_rest(self) -> None:
        """No row is missing any more: remove all missing rows at once."""
        self._rest, self.count = self._rest + self.count, 0

    def undo(self) -> Tensor:
        """Rows removed since the commit are missing again.

        Returns the rows with records possibly not zeros, int64.
        """
        found = torch.cat([*self._found, _NONE])
        for rows in (found, *self._zeros):
            self._present[rows] = False
            self.count += rows.numel()
        self.count, self._rest = self.count + self._rest, 0
        self._probed, self._looked, self._ahead = self._at_commit
        self._found.clear()
        self._zeros.clear()
        return found

    def committed(self) -> None:
        """Rows removed so far stay removed."""
        self._rest, self._at_commit = 0, (self._probed, self._looked, self._ahead)
        self._found.clear()
        self._zeros.clear()
