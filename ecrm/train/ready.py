"""What a rank loads before it needs it, so that a takeover does not wait for it, and a far spare does without."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from torch import Tensor

from ecrm.model.dlrm import import_dense_arch
from ecrm.placement.view import View
from ecrm.storage import store_factory
from ecrm.storage.base import Allocate, SparseOptimizer, Store

READY_SPARES_PER_M = 2
"""m may die at once, and m more while the spares that move up are loading."""


def takes_over_soon(rank: int, view: View, ready: int) -> bool:
    """Whether a rank has a role in this view, or would be given one if the next `ready` ranks died."""
    return rank not in view.spares or rank in view.dense or rank in view.spares[:ready]


class Loading:
    """One rank's loading of FBGEMM and TorchRec, the most of a spare's memory after torch itself.

    A rank that `takes_over_soon` loads them when this is made; a spare further back when it has moved up, in a thread beside
    the steps of the others; whoever makes a store or dense parts earlier loads them then. What is there then is left out of garbage
    collection for good.
    """

    def __init__(self, rank: int, view: View, ready: int, arch: str, backend: str, optimizer: SparseOptimizer) -> None:
        self._rank, self._ready, self._arch, self._backend, self._optimizer = rank, ready, arch, backend, optimizer
        self.began = takes_over_soon(rank, view, ready)
        if self.began:
            self._load()

    def heed(self, view: View) -> None:
        """Begin to load if this rank is to, now that roles are as in `view`."""
        if not self.began and takes_over_soon(self._rank, view, self._ready):
            self.began = True
            threading.Thread(target=self._load, name="loading", daemon=True).start()

    def make_store(
        self, rows: int, dim: int, initial: Callable[[Tensor], Tensor], allocate: Allocate | None = None
    ) -> Store:
        """A store as `store_factory` makes it; a lone row, which only tells the size of a record, loads nothing for it."""
        backend = self._backend if self.began or rows > 1 else "native"
        return store_factory(backend, self._optimizer)(rows, dim, initial, allocate)

    def _load(self) -> None:
        store_factory(self._backend, self._optimizer)
        import_dense_arch(self._arch)
        gc.freeze()  # garbage collections in a step pass over all of it
