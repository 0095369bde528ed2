"""What user code has done to ranks while it was at work, and what follows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ecrm.base.wording import named

RETRY_STEPS = 100
"""User code that raises within so many steps of the last time ends the run: it is no single rank's.

So a script that raises now and then does not cost one rank after the other.
"""

MOST_UNKNOWN = 3
"""Ranks that may die in one step, each running the same slot, where nobody knows what they did."""

UNKNOWN_STEP = -1

PARTS = ("body", "batch", "evaluation", "before_step", "every", "on_commit", "after")
BODY, BATCH, EVALUATION, BEFORE_STEP, EVERY, ON_COMMIT, AFTER = PARTS

OF_SLOTS = (BODY, BATCH)
"""Parts of which another rank can do what one has failed in."""

ON_ALL = (BEFORE_STEP, EVERY)
"""Parts that all ranks, or all dense holders, are in at the same time."""

UNJUDGED = (ON_COMMIT, AFTER)
"""Parts that a death in tells nothing of: each rank is in them for a time of its own."""

SLOT_PHASES = ("input", "lookup", "forward", "backward", "update")
"""Phases that ranks are in while slots are computed on some: of those that wait for these, too."""


class Place(NamedTuple):
    """What user code is at work on.

    `part` is one of PARTS: BODY for a slot of a step, BATCH for making its batch, EVALUATION for a
    batch of an evaluation after so many steps. `slot` is the number of that batch then. BEFORE_STEP
    is the function of that name, EVERY one for `session.every` after so many steps. `slot` is then
    the epoch of the view: it tells one time from the next, after a death. ON_COMMIT is a function
    that is told of a step, AFTER the script behind its loop.
    """

    step: int
    slot: int
    part: str = BODY

    def __str__(self) -> str:
        if self.part == EVALUATION:
            return f"batch {self.slot} of an evaluation at step {self.step}"
        if self.part == BEFORE_STEP:
            return f"before_step of step {self.step}"
        if self.part == EVERY:
            return f"a function for session.every at step {self.step}"
        if self.part == ON_COMMIT:
            return f"a function for session.on_commit, told of step {self.step}"
        if self.part == AFTER:
            return "the script's code after the loop over session.steps"
        return f"{'the batch of ' if self.part == BATCH else ''}step {self.step}, slot {self.slot}"


@dataclass(frozen=True)
class Fault:
    """How a rank that ran slots has ended, as far as others know.

    - `places`: what user code was at work on then; empty where the rank was elsewhere.
    - `known`: False where nobody knows that. `places` are then all slots that the rank ran, in the
      step in which its death was noticed, UNKNOWN_STEP before that is agreed on.
    - `error`: what is said of an error that user code has raised; "" for a rank that died.
    """

    places: tuple[Place, ...]
    known: bool = True
    error: str = ""

    @staticmethod
    def unknown(slots: Iterable[int]) -> Fault:
        """Of a rank of which only its slots are known."""
        return Fault(tuple(Place(UNKNOWN_STEP, slot) for slot in slots), known=False)

    def to_json(self) -> list[Any]:
        return [[list(place) for place in self.places], self.known, self.error]

    @staticmethod
    def from_json(fields: list[Any]) -> Fault:
        places, known, error = fields
        return Fault(tuple(Place(*place) for place in places), known, error)

    def to_dict(self, rank: int) -> dict[str, Any]:
        """Of the rank that has ended so, as events and summaries have it."""
        place = self.places[0]
        return {
            "rank": rank,
            "step": place.step,
            "slot": place.slot,
            "part": place.part,
            "error": self.error or None,
        }

    @property
    def _agreed(self) -> bool:
        return self.known or all(place.step != UNKNOWN_STEP for place in self.places)

    def with_other(self, other: Fault) -> Fault:
        """What two ranks know of the same one together: the better of what they know."""
        mine, its = ((bool(one.error), one.known, one._agreed) for one in (self, other))
        if mine != its:
            return max((mine, self), (its, other), key=lambda pair: pair[0])[1]
        if self.known:
            return self
        return Fault(tuple(place for place in self.places if place in other.places), known=False)

    def noticed_in(self, step: int, phase: str) -> Fault:
        """The same once step and phase are agreed on in which a death was noticed.

        Outside SLOT_PHASES no slot was computed: then the rank was elsewhere.
        """
        if self._agreed:
            return self
        if phase not in SLOT_PHASES:
            return Fault(())
        return Fault(tuple(Place(step, place.slot) for place in self.places), known=False)


Faults = Mapping[int, Fault]
"""How ranks have ended, by rank."""


def together(said: Iterable[Faults], step: int, phase: str) -> dict[int, Fault]:
    """What all know, from what each says, of deaths noticed in a phase of a step.

    The same on all ranks.
    """
    known: dict[int, Fault] = {}
    for faults in said:
        for rank, fault in faults.items():
            known[rank] = fault.with_other(known[rank]) if rank in known else fault
    return {rank: fault.noticed_in(step, phase) for rank, fault in sorted(known.items())}


def deadly(faults: Faults) -> str:
    """Why user code must be taken for what kills its ranks, in one line; "" where it must not."""
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
        if len(places) > 1:  # ranks that die there together may have been killed by something else
            return f"{_ended(faults, ranks, str(min(places)))}: {advice_on_all}"
    for (step, slot), ranks in sorted(maybe.items()):
        if len(ranks) >= MOST_UNKNOWN:
            where = f"step {step}, each running slot {slot}"
            return f"{_ended(faults, ranks, where)}: {advice}"
    return ""


def _ended(faults: Faults, ranks: Sequence[int], where: str) -> str:
    """That ranks have ended in one place, and what was raised there, in words."""
    errors = [faults[rank].error for rank in ranks if faults[rank].error]
    died = [rank for rank in ranks if not faults[rank].error]
    words = [*errors, f"{named('rank', died)} died in {where}"] if died else errors
    return "; ".join(words) + (", one after the other" if len(died) > 1 else "")


def together_in(faults: Faults, ranks: Iterable[int]) -> str:
    """What runs on all ranks that some of these have died in, to be appended; "" for none."""
    at: dict[Place, list[int]] = defaultdict(list)
    for rank in ranks:
        for place in faults[rank].places if rank in faults else ():
            if place.part in ON_ALL:
                at[place].append(rank)
    words = [f"{named('rank', of)} died in {place}" for place, of in sorted(at.items())]
    return f" ({'; '.join(words)}, the script's own code)" if words else ""


def raised_before(faults: Faults, rank: int) -> str:
    """What came before that what user code raises on `rank` is like; "" where nothing did."""
    (place,) = faults[rank].places
    for other, fault in sorted(faults.items()):
        for before in fault.places if other != rank else ():
            if before == place and fault.known:
                return f"as on rank {other} before" if fault.error else f"rank {other} died there"
            if fault.error and abs(before.step - place.step) < RETRY_STEPS:
                return f"rank {other} failed in {before}, too"
    return ""
