"""testing.flip: the hook flipping a bit in this rank's memory."""

from __future__ import annotations

import torch

from ecrm.config.faults import Flip
from ecrm.engine.engine import Engine

BIT = 1 << 2


class FlipSwitch:
    """A phase hook flipping a bit, once, at the first `dense` phase from the step on.

    Rows and parity have their updates by then. The bit is in the last row (or parity row) ever
    updated, of the first row space on the rank's first shard.
    """

    def __init__(self, flip: Flip | None, rank: int) -> None:
        self._flip = flip if flip is not None and flip.rank == rank else None
        self._engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Set the engine with the memory to change."""
        self._engine = engine

    def __call__(self, step: int, phase: str) -> None:
        if self._flip is None or phase != "dense" or step < self._flip.step:
            return
        assert self._engine is not None
        flip, self._flip = self._flip, None
        shards = self._engine.view.shards_of(self._engine.rank)
        if shards:
            flip_bit(self._engine, shards[0], flip.kind)


def flip_bit(engine: Engine, shard: int, kind: str) -> None:
    """Flip a bit in the shard's first row space.

    The bit is in the last row (or parity row) ever updated; without updates, in the last row.
    """
    key = (shard, 0)
    if kind == "parity":
        # checking the config made sure of a protection with parity
        target = getattr(engine.state.protection, "parity")[key].records  # noqa: B009
        _flip_in(target, _last_nonzero(target))
        return
    store = engine.state.hosted[key].store
    row = _last_nonzero(store.read(torch.arange(engine.state.layouts[0].data_rows_per_shard)))
    part = store.weights if kind == "row" else store.state[0]
    _flip_in((part if part.dim() > 1 else part.unsqueeze(1)).view(torch.uint8), row)


def _flip_in(rows: torch.Tensor, row: int) -> None:
    rows[row, 0] ^= BIT


def _last_nonzero(records: torch.Tensor) -> int:
    places = records.any(dim=1).nonzero()
    return int(places[-1]) if places.numel() else records.shape[0] - 1
