"""Have a rank's memory handed out early, to keep takeovers from waiting.

Spares far from a takeover take no memory early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.config.schema import WORKING_BYTES, WORKING_BYTES_TO_SHARE
from ecrm.placement.view import View
from ecrm.process.memory import have_free_memory
from ecrm.storage.prefault import Prefault

if TYPE_CHECKING:
    from ecrm.engine.engine import Engine


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
