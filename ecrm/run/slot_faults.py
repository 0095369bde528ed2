"""Deaths and errors of ranks with user code at work, and the consequences. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ecrm.base.wording import named
from ecrm.engine.events import USER_CODE, SlotFailed

RETRY_STEPS = 100
"""User code raising again within so many steps ends the run: the fault is not a single rank's.

So a script with an error now and then does not cost rank after rank.
"""

MOST_UNKNOWN = 3
"""So many ranks dead in a step, all running the same slot, end the run without a known place."""

UNKNOWN_STEP = -1

PARTS = tuple(USER_CODE)
BODY, BATCH, EVALUATION, BEFORE_STEP, EVERY, ON_COMMIT, AFTER = PARTS

OF_SLOTS = (BODY, BATCH)
"""Parts that a different rank can do after a failure."""

ON_ALL = (BEFORE_STEP, EVERY)
"""Parts run by all ranks, or by all dense holders, at the same time."""

UNJUDGED = (ON_COMMIT, AFTER)
"""Parts not judged by a death: every rank runs the part at a time of its own."""

SLOT_PHASES = ("input", "lookup", "forward", "backward", "update")
"""Phases of ranks while some ranks compute slots; phases of waiting ranks included."""


class Place(NamedTuple):
    """The work of user code at a moment.

    `part` is out of PARTS: BODY for a slot of a step, BATCH for making the batch of a slot,
    EVALUATION for a batch of an evaluation after `step` steps, with `slot` as the number of the
    batch. BEFORE_STEP is the function `before_step`, EVERY a function for `session.every` after
    `step` steps, with `slot` as the epoch of the view, to tell a repetition after a death.
    ON_COMMIT is a function told of a step, AFTER the script behind the loop.
    """

    step: int
    slot: int
    part: str = BODY

    def __str__(self) -> str:
        return USER_CODE[self.part].format(step=self.step, slot=self.slot)


@dataclass(frozen=True)
class Fault:
    """The end of a rank with slots, as known to the survivors.

    - `places`: the places of user code at the end; empty for a rank outside user code.
    - `known`: False if no rank knows the places. `places` are then all slots of the rank, in the
      step of noticing the death; UNKNOWN_STEP until the step is agreed on.
    - `error`: the error raised by user code, in words; "" for a dead rank. `of_data`: the error is
      about damaged data.
    """

    places: tuple[Place, ...]
    known: bool = True
    error: str = ""
    of_data: bool = False

    @staticmethod
    def unknown(slots: Iterable[int]) -> Fault:
        """The fault of a rank with nothing known but the slots."""
        return Fault(tuple(Place(UNKNOWN_STEP, slot) for slot in slots), known=False)

    def to_json(self) -> list[Any]:
        return [[list(place) for place in self.places], self.known, self.error, self.of_data]

    def event(self, rank: int) -> SlotFailed:
        """The event about the fault of a rank, at its first place."""
        first = self.places[0]
        return SlotFailed(
            rank=rank, step=first.step, slot=first.slot, part=first.part, error=self.error or None
        )

    @staticmethod
    def from_json(fields: list[Any]) -> Fault:
        places, *rest = fields
        return Fault(tuple(Place(*place) for place in places), *rest)

    @property
    def _agreed(self) -> bool:
        return self.known or all(place.step != UNKNOWN_STEP for place in self.places)

    def with_other(self, other: Fault) -> Fault:
        """The better of two ranks' knowledge; of equal unknown faults, the places in common."""
        mine, its = ((bool(one.error), one.known, one._agreed) for one in (self, other))
        if mine != its:
            return max((mine, self), (its, other), key=lambda pair: pair[0])[1]
        if self.known:
            return self
        return Fault(tuple(place for place in self.places if place in other.places), known=False)

    def noticed_in(self, step: int, phase: str) -> Fault:
        """The fault with the agreed step and phase of noticing the death.

        Outside SLOT_PHASES no slot was computed: the fault then has no places.
        """
        if self._agreed:
            return self
        if phase not in SLOT_PHASES:
            return Fault(())
        return Fault(tuple(Place(step, place.slot) for place in self.places), known=False)


Faults = Mapping[int, Fault]
"""Ends of ranks, by rank."""


def together(said: Iterable[Faults], step: int, phase: str) -> dict[int, Fault]:
    """The joint knowledge from `said` by all ranks, on deaths noticed in a phase of a step.

    The same on all ranks.
    """
    known: dict[int, Fault] = {}
    for faults in said:
        for rank, fault in faults.items():
            known[rank] = fault.with_other(known[rank]) if rank in known else fault
    return {rank: fault.noticed_in(step, phase) for rank, fault in sorted(known.items())}


def ends_run(faults: Faults) -> str:
    """The evidence for user code killing ranks, in a line; "" without enough evidence."""
    at: dict[Place, list[int]] = defaultdict(list)
    again: dict[tuple[int, str], list[int]] = defaultdict(list)
    maybe: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, fault in sorted(faults.items()):
        for place in fault.places:
            if place.part in ON_ALL:
                again[place.step, place.part].append(rank)
            elif fault.known:
                at[place].append(rank)
            if place.part in OF_SLOTS:
                maybe[place.step, place.slot].append(rank)
    advice = (
        "the script kills the rank that runs it, as running out of memory does: the kernel log "
        "(dmesg) may say why"
    )
    advice_on_all = (
        "that code kills the rank that runs it, as running out of memory does, or they were killed "
        "by something else while all ran it: the kernel log (dmesg) may say which"
    )
    for place, ranks in sorted(at.items()):
        if len(ranks) > 1:
            return f"{_ended(faults, ranks, str(place))}: {advice}"
    for ranks in again.values():
        places = {place for rank in ranks for place in faults[rank].places}
        if len(places) > 1:  # ranks dying together may have been killed from outside
            return f"{_ended(faults, ranks, str(min(places)))}: {advice_on_all}"
    for (step, slot), ranks in sorted(maybe.items()):
        if len(ranks) >= MOST_UNKNOWN:
            where = f"step {step}, each running slot {slot}"
            return f"{_ended(faults, ranks, where)}: {advice}"
    return ""


def _ended(faults: Faults, ranks: Sequence[int], where: str) -> str:
    """The ends of ranks at a place, with the errors raised, in words."""
    errors = [faults[rank].error for rank in ranks if faults[rank].error]
    died = [rank for rank in ranks if not faults[rank].error]
    words = [*errors, f"{named('rank', died)} died in {where}"] if died else errors
    return "; ".join(words) + (", one after the other" if len(died) > 1 else "")


def together_in(faults: Faults, ranks: Iterable[int]) -> str:
    """Deaths of `ranks` in parts run by all ranks, in words to be appended; "" without deaths."""
    at: dict[Place, list[int]] = defaultdict(list)
    for rank in ranks:
        for place in faults[rank].places if rank in faults else ():
            if place.part in ON_ALL:
                at[place].append(rank)
    words = [f"{named('rank', of)} died in {place}" for place, of in sorted(at.items())]
    return f" ({'; '.join(words)}, the script's own code)" if words else ""


def raised_before(faults: Faults, rank: int) -> str:
    """An earlier fault similar to the error on `rank`, in words; "" without an earlier fault."""
    (place,) = faults[rank].places
    for other, fault in sorted(faults.items()):
        for before in fault.places if other != rank else ():
            if before == place and fault.known:
                return f"as on rank {other} before" if fault.error else f"rank {other} died there"
            if fault.error and abs(before.step - place.step) < RETRY_STEPS:
                return f"rank {other} failed in {before}, too"
    return ""
