"""The user code of a rank: errors, deaths and seals, told to all ranks in recoveries."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ecrm.base.errors import DataError, ScriptFailed
from ecrm.engine.engine import Engine
from ecrm.engine.events import SlotFailed
from ecrm.engine.inquest import Inquest, Leaving
from ecrm.run.slot_faults import (
    UNJUDGED,
    Fault,
    Place,
    ends_run,
    raised_before,
    together,
    together_in,
)

PlaceOfDead = Callable[[int], tuple[Place, ...] | None]
"""rank -> places of user code on a dead rank at the death; `None` if unknown to this rank."""


def _nowhere(rank: int) -> tuple[Place, ...]:
    """Default: no user code was at work on a dead rank."""
    return ()


class UserCode(Inquest):
    """The user code of this rank, and the knowledge about user code of all ranks.

    - `place_of_dead`: asked once for each dead rank.
    - `faults`: by rank, how ranks ended with user code at work. The same on all ranks after every
      recovery.
    - `seals`: number of seals known to this rank.
    """

    def __init__(self, place_of_dead: PlaceOfDead = _nowhere) -> None:
        self.place_of_dead = place_of_dead
        self.faults: dict[int, Fault] = {}
        self.seals = 0
        self._raised: dict[int, Fault] = {}  # the error of this rank, for the next recovery
        self._mine: dict[int, Fault] = {}  # faults of the present recovery known to this rank

    def leave(self, engine: Engine, place: Place, problem: str, of_data: bool = False) -> NoReturn:
        """Report the error `problem` of user code at `place`, called on this rank alone.

        If a different rank can try the slot, and no similar error came before, raises ScriptFailed
        on this rank alone, without a `speaker`: this rank must end, and the survivors recover.
        Otherwise raises ScriptFailed with a `speaker` on all ranks, or DataError if the error is
        `of_data`, about damaged data.
        """
        self._raised = {engine.rank: Fault((place,), error=problem, of_data=of_data)}
        engine.recovery.recover()
        raise AssertionError("a recovery went on with a rank that user code has failed on")

    def seal(self, engine: Engine) -> None:
        """Collective, between steps: agree on the arrival of all ranks, and add 1 to `seals`.

        Raises StepAborted after a failure. The recovery tells every rank of the newest seal, so no
        rank repeats the work before a seal known to a survivor.
        """
        with engine.recovery.recovering():
            engine.state.transport.barrier("others came to the end of their code")
            self.seals += 1

    def begin(self) -> None:
        self._mine, self._raised = self._raised, {}

    def find(self, dead: Mapping[int, Sequence[int]]) -> str:
        for rank, slots in dead.items():
            # a repeated recovery keeps the first finding
            if rank not in self.faults and rank not in self._mine:
                places = self.place_of_dead(rank)
                # unknown, as on a different host: suspect every slot of the dead rank
                if places is None:
                    self._mine[rank] = Fault.unknown(slots)
                    continue
                # ranks enter UNJUDGED parts at different times: a death proves nothing
                judged = tuple(place for place in places if place.part not in UNJUDGED)
                self._mine[rank] = Fault(judged)
        known = {**self._mine, **self.faults}
        return json.dumps([self.seals, {rank: fault.to_json() for rank, fault in known.items()}])

    def hear(
        self,
        findings: Iterable[str],
        step: int,
        phase: str,
        live: Sequence[int],
        newcomers: Collection[int] = (),
    ) -> Leaving | None:
        heard: list[tuple[int, dict[str, list[Any]]]] = [json.loads(text) for text in findings]
        self.seals = max(seals for seals, _ in heard)
        said = (
            {
                int(rank): Fault.from_json(fields)
                for rank, fields in faults.items()
                if int(rank) not in newcomers
            }
            for _, faults in heard
        )
        # a fault without places tells nothing against user code
        faults = together(said, step, phase).items()
        self.faults = {rank: fault for rank, fault in faults if fault.places}
        raising = [rank for rank, fault in self.faults.items() if fault.error and rank in live]
        if not raising:
            if problem := ends_run(self.faults):
                raise ScriptFailed(problem).on_all_ranks(live[0])
            return None
        first = self.faults[raising[0]]
        return Leaving(
            {rank: self.faults[rank].error for rank in raising},
            # a repeated error is the script's: a further try would cost a further rank
            raised_before(self.faults, raising[0]),
            # damaged data takes no second rank down
            risky=not first.of_data,
            kind=DataError if first.of_data else ScriptFailed,
        )

    def in_words(self, dead: Iterable[int]) -> str:
        return together_in(self.faults, dead)

    def events(self, dead: Iterable[int]) -> list[SlotFailed]:
        """An event for each rank that died, or left, with user code at work."""
        # a suspected place is no finding: tell only of known places
        return [
            self.faults[rank].event(rank)
            for rank in dead
            if rank in self.faults and self.faults[rank].known
        ]


def user_code_of(engine: Engine) -> UserCode:
    """The user code around an engine, which must be given to the engine's hooks."""
    inquest = engine.state.hooks.inquest
    assert isinstance(inquest, UserCode)
    return inquest
