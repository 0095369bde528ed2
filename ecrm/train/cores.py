"""Which core each rank of a host keeps to, where ranks outnumber the cores.

A rank that waits polls, and yields whenever another one can run; yet to the system it is as busy as one that computes. So it puts
ranks that compute on one core and ranks that wait on another. Dealt out by role, work of a kind is spread evenly.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from ecrm.placement.view import View


def deal(view: View, neighbours: Collection[int], cores: Sequence[int]) -> dict[int, int]:
    """{rank: its core} of the live ranks among `neighbours`: in turn to those that run slots, those that host shards, and the others."""

    def kind(rank: int) -> tuple[bool, bool, int]:
        return rank not in view.slots, rank not in view.shards, rank

    ranks = sorted((rank for rank in neighbours if rank in view.live), key=kind)
    return {rank: cores[place % len(cores)] for place, rank in enumerate(ranks)}


class Cores:
    """Keeps the thread that makes this and calls it, and threads that it starts later, to one of the cores that it may use.

    `neighbours` are the ranks that may use the same cores, this one included. Where no more of them live than there are cores, all cores are free to it,
    and `bound` is false.
    """

    bound = False

    def __init__(self, rank: int, neighbours: Collection[int]) -> None:
        self._rank, self._neighbours = rank, neighbours
        self._cores = sorted(os.sched_getaffinity(0))

    def heed(self, view: View) -> None:
        """Roles are as in `view` from now on."""
        dealt = deal(view, self._neighbours, self._cores)
        self.bound = len(dealt) > len(self._cores)
        os.sched_setaffinity(0, {dealt[self._rank]} if self.bound else self._cores)
