"""Load a rank's libraries and memory early, to keep takeovers from waiting.

Spares far from a takeover load nothing early.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.model.dlrm import import_dense_arch
from ecrm.placement.sparse_optimizer import SparseOptimizer, SparseRate
from ecrm.placement.view import View
from ecrm.process.memory import have_free_memory
from ecrm.protection.base import Protection
from ecrm.storage import store_factory
from ecrm.storage.base import Store
from ecrm.storage.prefault import Prefault

if TYPE_CHECKING:
    from ecrm.engine.engine import Engine


WORKING_BYTES, WORKING_BYTES_TO_SHARE = 64 << 20, 32 << 20
"""Memory waiting on a ready spare: own memory, and memory to share.

Without the own memory a spare that takes over spends 8 ms of a core on new pages until the step is
done. Without the memory to share the spare's first update took 7 ms, later updates 2 ms
(embedding-heavy, 2,048 samples per slot).
"""


def ready_spares(protection: Protection) -> int:
    """The number of ready spares.

    m ranks may die at once, and m more while the spares that move up are loading.
    """
    return 2 * (protection.dense_replicas - 1)


def takes_over_soon(rank: int, view: View, ready: int) -> bool:
    """Whether a rank has a role in `view`, or would after the deaths of the next `ready` ranks."""
    return rank not in view.spares or rank in view.dense or rank in view.spares[:ready]


class Loading:
    """Loads FBGEMM and TorchRec, if used, when a rank needs the libraries.

    After torch itself the libraries are most of a spare's memory. A rank that `takes_over_soon`
    loads the libraries when `Loading` is made. A spare further back loads after moving up, in a
    thread beside the steps of the other ranks. Making a store or dense parts earlier loads the
    libraries too. All objects present after loading are left out of garbage collection for good.
    """

    def __init__(
        self, rank: int, view: View, ready: int, arch: str, backend: str, optimizer: SparseOptimizer
    ) -> None:
        self._rank, self._ready, self._arch, self._backend, self._optimizer = (
            rank,
            ready,
            arch,
            backend,
            optimizer,
        )
        self.began = takes_over_soon(rank, view, ready)
        if self.began:
            self._load()

    def heed(self, view: View) -> None:
        """Begin to load if this rank takes over soon by the roles of `view`."""
        if not self.began and takes_over_soon(self._rank, view, self._ready):
            self.began = True
            threading.Thread(target=self._load, name="loading", daemon=True).start()

    def make_store(
        self,
        rows: int,
        dim: int,
        initial: Callable[[Tensor], Tensor],
        allocate: Allocate | None = None,
        optimizer: SparseOptimizer | None = None,
        rate: SparseRate | None = None,
    ) -> Store:
        """Return a store as made by `store_factory`.

        A single row, used only for the size of a record, loads nothing.
        """
        backend = self._backend if self.began or rows > 1 else "native"
        factory = store_factory(backend, self._optimizer)
        return factory(rows, dim, initial, allocate, optimizer, rate)

    def _load(self) -> None:
        store_factory(self._backend, self._optimizer)
        import_dense_arch(self._arch)
        gc.freeze()  # garbage collections in a step pass over all of it


class ReadyMemory:
    """`storage.prefault` of a rank: the system hands out memory before the need.

    The memory is the memory of all the rank hosts and later takes over. The next `ready` spares
    also have memory for a shard, in `waiting` until taken. They also have `WORKING_BYTES` for
    buffers of their first steps, and `WORKING_BYTES_TO_SHARE` of shared memory. `allocate` is for
    the engine: memory like `lazy_zeros`, taken from `waiting` while `waiting` has memory of the
    shape and dtype.
    """

    def __init__(self, ready: int) -> None:
        self._ready, self._pages = ready, Prefault()
        self.waiting: list[Tensor] = []
        self._view: View | None = None
        self._layouts: object = None

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        wanted = torch.from_numpy(np.empty(0, dtype)).dtype
        for place, memory in enumerate(self.waiting):
            if tuple(memory.shape) == shape and memory.dtype == wanted:
                return self.waiting.pop(place)
        return lazy_zeros(*shape, dtype=dtype)

    def start(self, engine: Engine) -> None:
        """Have all memory handed out now. Raises UsageError if the system cannot."""
        self._heed(engine)
        shared_memory = engine.state.transport.shared_memory
        to_lend = (
            [shared_memory.ahead(WORKING_BYTES_TO_SHARE)]
            if self.waiting and shared_memory is not None
            else []
        )
        self._pages.all_of([*engine.state.tensors, *self.waiting, *to_lend])
        if self.waiting:
            have_free_memory(WORKING_BYTES)

    def committed(self, engine: Engine) -> None:
        """After a commit: have memory new since a change of roles handed out beside the steps."""
        if engine.view is not self._view:
            self._heed(engine)
            self._pages.beside([*engine.state.tensors, *self.waiting])

    def _heed(self, engine: Engine) -> None:
        """Have memory for a shard waiting on the next `ready` spares only."""
        view, self._view = engine.view, engine.view
        if engine.rank not in view.spares[: self._ready]:
            self.waiting.clear()
        elif not self.waiting or engine.state.layouts is not self._layouts:
            self.waiting, self._layouts = (
                engine.state.stores.memory_of_a_shard(engine.state.layouts),
                engine.state.layouts,
            )
