"""How ranks of a host share its cores where they outnumber them.

A rank that waits polls, and yields whenever another one can run; yet to the system it is as busy as
one that computes. So the system puts ranks that compute on one core and ranks that wait on another.
Against that ranks either keep to one core each, dealt out by role, so that work of a kind is spread
evenly; or, where that leaves some cores with more slots than others, they sleep while they wait,
and the system moves who computes to the core of who sleeps.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence

from ecrm.placement.view import View
from ecrm.transport.base import Transport

AUTO, BIND, SLEEP, POLL = "auto", "bind", "sleep", "poll"


def deal(view: View, neighbours: Collection[int], cores: Sequence[int]) -> dict[int, int]:
    """{rank: its core} of the live ranks among `neighbours`.

    Cores go first to the ranks that run slots, then to those that only host shards, then to the
    others. Each rank gets the core with the fewest slots, shards or others so far, whichever it has
    itself, and of these cores the one with the fewest ranks.
    """
    slots, shards = Counter(view.slots), Counter(view.shards)
    dealt: dict[int, int] = {}
    for work in slots, shards, Counter(neighbours):
        load = dict.fromkeys(cores, 0)
        for rank in sorted(
            set(neighbours).intersection(view.live, work) - dealt.keys(),
            key=lambda rank: (-work[rank], rank),
        ):
            held = Counter(dealt.values())
            dealt[rank] = min(cores, key=lambda core: (load[core], held[core]))
            load[dealt[rank]] += work[rank]
    return dealt


def best_manner(view: View, dealt: dict[int, int], cores: Sequence[int]) -> str:
    """How ranks best share cores that are `dealt` out so: BIND or SLEEP.

    BIND where all cores have as many slots, or no core has two ranks that run slots.
    """
    running = [rank for rank in dealt if rank in view.slots]
    load = Counter(dealt[rank] for rank in view.slots if rank in dealt)
    even = len({load[core] for core in cores}) == 1
    return BIND if even or len(running) <= len(cores) else SLEEP


class Cores:
    """Makes the calling thread and its `transport` share cores where ranks outnumber them.

    - `neighbours`: the ranks that may use the same cores, this one included. Cores are shared while
      more of them are alive than there are cores.
    - `wish`: how to share them: BIND, SLEEP, POLL, or AUTO for the better one of BIND and SLEEP.

    Threads that the calling thread starts keep to the cores that it could use then. `manner` is how
    cores are shared now: BIND, SLEEP or POLL. It is None where there are cores enough: all of them
    are then free to this rank, which polls.
    """

    def __init__(self, transport: Transport, neighbours: Collection[int], wish: str = AUTO) -> None:
        self._transport, self._neighbours, self._wish = transport, neighbours, wish
        self._cores = sorted(os.sched_getaffinity(0))
        self.manner: str | None = None

    def heed(self, view: View) -> None:
        """Share cores by the roles of `view` from now on."""
        dealt = deal(view, self._neighbours, self._cores)
        self.manner = None
        if len(dealt) > len(self._cores):
            self.manner = (
                best_manner(view, dealt, self._cores) if self._wish == AUTO else self._wish
            )
        os.sched_setaffinity(
            0, {dealt[self._transport.rank]} if self.manner == BIND else self._cores
        )
        self._transport.sleeps = self.manner == SLEEP
