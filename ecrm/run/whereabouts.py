"""The place of user code at work, rank by rank, in memory outliving the rank.

A rank writes the place into memory read by the other ranks of its host. A killed rank leaves the
memory unchanged, and a survivor on the same host knows whether the script's own code was running.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ecrm.run.slot_faults import PARTS, Place
from ecrm.transport.base import Transport

_NOWHERE = 0
_MOST_SLOTS = 1 << 28  # or batches of an evaluation


class Whereabouts:
    """The place of user code on this `rank`, and the last place on dead ranks.

    `of` has the words written by other ranks, int64 [1].
    """

    def __init__(self, rank: int, mine: np.ndarray, of: dict[int, np.ndarray]) -> None:
        self._rank, self._mine, self._of = rank, mine, of

    @staticmethod
    def of_ranks(transport: Transport, mine: Tensor, words: Mapping[int, int]) -> Whereabouts:
        """The whereabouts of all ranks of this host, once the ranks read each other's memory.

        `mine` is the word of this rank, from `word_of`; `words` are the offsets by rank.
        """
        found = Whereabouts(transport.rank, mine.numpy(), {})
        found.learn(transport, words)
        return found

    def learn(self, transport: Transport, words: Mapping[int, int]) -> None:
        """Read the places of further ranks from now on; `words` as in `of_ranks`."""
        memory = transport.shared_memory
        for rank, offset in words.items():
            its = None if memory is None else memory.memory_of(rank)
            if its is not None and offset >= 0:
                self._of[rank] = its[offset:][:8].view(np.int64)

    def enter(self, place: Place | None) -> None:
        """Note the place where user code begins; `None` once user code is done."""
        self._mine[0] = _NOWHERE if place is None else _written(place)

    def places(self) -> dict[int, Place]:
        """The present places of user code: of this rank, and of readable ranks of its host."""
        found = {rank: int(word[0]) for rank, word in [*self._of.items(), (self._rank, self._mine)]}
        return {rank: _read(word) for rank, word in found.items() if word != _NOWHERE}

    def place_of_dead(self, rank: int) -> tuple[Place, ...] | None:
        """The place of user code at a rank's death, () for none; `None` if unknown to this rank.

        Ask only once: the memory shared by the dead rank is not kept afterwards.
        """
        word = self._of.pop(rank, None)
        if word is None:
            return None
        return () if word[0] == _NOWHERE else (_read(int(word[0])),)


def word_of(transport: Transport) -> tuple[Tensor, int]:
    """A word of shared memory for this rank's place, int64 [1], and its offset; -1 for none."""
    word = transport.allocate_shared(1, dtype=np.int64)
    memory = transport.shared_memory
    offset = None if memory is None else memory.offset(word)
    return word, -1 if offset is None else offset


def _written(place: Place) -> int:
    """A place in one word, to be written as a whole."""
    return 1 + PARTS.index(place.part) + len(PARTS) * (place.slot + _MOST_SLOTS * place.step)


def _read(word: int) -> Place:
    rest, part = divmod(word - 1, len(PARTS))
    step, slot = divmod(rest, _MOST_SLOTS)
    return Place(step, slot, PARTS[part])
