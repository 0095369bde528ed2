"""How ranks of a host share its cores when ranks outnumber cores.

A waiting rank polls, and yields whenever another rank can run; yet the system sees a waiting rank
as busy as a computing rank. The system therefore puts computing ranks on one core and waiting ranks
on another. Against this, either every rank keeps to a single core, dealt out by role, to spread
work of a kind evenly; or, if the deal leaves some cores with more slots than others, ranks sleep
while waiting, and the system moves a computing rank to the core of a sleeping rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence

from ecrm.placement.view import View
from ecrm.transport.base import Transport

AUTO, BIND, SLEEP, POLL = "auto", "bind", "sleep", "poll"


def deal(view: View, neighbours: Collection[int], cores: Sequence[int]) -> dict[int, int]:
    """Return {rank: core} for the live ranks among `neighbours`.

    Cores go first to the ranks with slots, then to ranks with shards only, then to the other ranks.
    A rank gets the core with the fewest slots, shards or others dealt before, of the rank's own
    kind of work, and of such cores the core with the fewest ranks.
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
    """The best way to share cores `dealt` out in this way: BIND or SLEEP.

    BIND if all cores have equally many slots, or if ranks with slots do not outnumber the cores.
    """
    running = [rank for rank in dealt if rank in view.slots]
    load = Counter(dealt[rank] for rank in view.slots if rank in dealt)
    even = len({load[core] for core in cores}) == 1
    return BIND if even or len(running) <= len(cores) else SLEEP


class Cores:
    """Makes the calling thread and its `transport` share cores when ranks outnumber cores.

    - `neighbours`: the ranks that may use the same cores, this rank included. Cores are shared
      while more neighbours are alive than there are cores.
    - `wish`: the way to share cores: BIND, SLEEP, POLL, or AUTO for the better of BIND and SLEEP.

    Threads started by the calling thread keep to the cores that the calling thread could then use.
    `manner` is the present way to share cores: BIND, SLEEP or POLL. `manner` is `None` with enough
    cores: then this rank may use all cores, and polls.
    """

    def __init__(self, transport: Transport, neighbours: Collection[int], wish: str = AUTO) -> None:
        self._transport, self._neighbours, self._wish = transport, neighbours, wish
        self._cores = sorted(os.sched_getaffinity(0))
        self.manner: str | None = None

    def know(self, neighbours: Collection[int]) -> None:
        """Share cores with these ranks, this rank included, from the next view on."""
        self._neighbours = neighbours

    def apply_view(self, view: View) -> None:
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
