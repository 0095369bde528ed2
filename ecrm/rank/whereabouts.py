"""What user code is at work on, rank by rank, in memory that outlives the rank.

A rank writes it down in memory that the other ranks of its host read. One that is killed leaves it
as it was, so a survivor of its host knows whether the script's own code was running.
"""

from __future__ import annotations

import numpy as np
import torch

from ecrm.engine.slot_faults import PARTS, Place
from ecrm.rank.collective_check import share_at_start
from ecrm.transport.base import Transport

_NOWHERE = 0
_MOST_SLOTS = 1 << 28  # or batches of an evaluation


class Whereabouts:
    """Where user code is on this `rank`, and where it was on those that have died.

    `of` other ranks are words that they write, int64 [1].
    """

    def __init__(self, rank: int, mine: np.ndarray, of: dict[int, np.ndarray]) -> None:
        self._rank, self._mine, self._of = rank, mine, of

    @staticmethod
    def shared(transport: Transport) -> Whereabouts:
        """Collective, before there is an engine, once ranks of a host read each other's memory."""
        word = transport.allocate_shared(1, dtype=np.int64)
        memory = transport.shared_memory
        offset = None if memory is None else memory.offset(word)
        offsets = share_at_start(transport, [torch.tensor([-1 if offset is None else offset])])
        of = {}
        for rank, (said,) in offsets.items():
            its = None if memory is None else memory.memory_of(rank)
            if its is not None and int(said) >= 0:
                of[rank] = its[int(said) :][:8].view(np.int64)
        return Whereabouts(transport.rank, word.numpy(), of)

    def be_at(self, place: Place | None) -> None:
        """User code begins there; None: it is through."""
        self._mine[0] = _NOWHERE if place is None else _written(place)

    def places(self) -> dict[int, Place]:
        """By rank, where user code is now: on this rank, and on those of its host that are read."""
        found = {rank: int(word[0]) for rank, word in [*self._of.items(), (self._rank, self._mine)]}
        return {rank: _read(word) for rank, word in found.items() if word != _NOWHERE}

    def when_dead(self, rank: int) -> tuple[Place, ...] | None:
        """Where user code was when a rank died; None where this rank cannot know.

        To be asked once: what the dead rank has shared is not kept any longer.
        """
        word = self._of.pop(rank, None)
        if word is None:
            return None
        return () if word[0] == _NOWHERE else (_read(int(word[0])),)


def _written(place: Place) -> int:
    """A place in one word, which is written as a whole."""
    return 1 + PARTS.index(place.part) + len(PARTS) * (place.slot + _MOST_SLOTS * place.step)


def _read(word: int) -> Place:
    rest, part = divmod(word - 1, len(PARTS))
    step, slot = divmod(rest, _MOST_SLOTS)
    return Place(step, slot, PARTS[part])
