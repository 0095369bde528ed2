"""testing.flip: its text, and the hook that flips one bit of this rank's memory.

The text is checked with the rest of a config, so torch is imported only when a bit is to flip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ecrm.engine.engine import Engine

BIT = 1 << 2

KINDS = ("row", "state", "parity")


@dataclass(frozen=True)
class Flip:
    """One bit flips on `rank` in `step`, after the updates of the step.

    `kind` says where: in a data row, its optimizer state, or a parity row.
    """

    rank: int
    step: int
    kind: str


def parse_flip(text: str) -> Flip | None:
    """RANK@STEP:KIND; None for anything else."""
    match = re.fullmatch(rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(KINDS)})", text)
    return Flip(int(match[1]), int(match[2]), match[3]) if match else None


class FlipSwitch:
    """A phase hook that flips one bit, once, when the `dense` phase of the step begins.

    Rows and parity have their updates by then. Of the first row space on the rank's first shard,
    the last row (or parity row) that was ever updated is hit.
    """

    def __init__(self, flip: Flip | None, rank: int) -> None:
        self._flip = flip if flip is not None and flip.rank == rank else None
        self._engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """The engine whose memory is meant."""
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
    """Flip one bit in the shard's first row space.

    It is in the last row (or parity row) that was ever updated, or in the last one if none was.
    """
    import torch

    key = (shard, 0)
    if kind == "parity":
        # which protections have it is checked with the config
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
