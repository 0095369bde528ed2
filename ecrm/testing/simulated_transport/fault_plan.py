"""Deaths of ranks: given singly, or drawn call by call from the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

BEFORE = "before"  # no rank gets data of this call from the rank
# some of the others, drawn from the seed, have the rank's data, and some have not
DURING = "during"
# the call has completed or failed at this rank; the program never learns the end
AFTER = "after"
MOMENTS = (BEFORE, DURING, AFTER)

INSIDE_RECOVERY, AT_ONCE, LOST_TOUCH, RETURNS = (
    "deaths inside recovery",
    "deaths at the instant of another",
    "calls that failed though nobody died",
    "dead ranks that come back",
)


@dataclass(frozen=True)
class Fault:
    """Kill `rank` at its call number `call_index`, counted from 0, `shrink` included."""

    rank: int
    call_index: int
    when: str

    def __post_init__(self) -> None:
        if self.when not in MOMENTS:
            raise ValueError(
                f"fault of rank {self.rank}: when is {self.when!r}, not one of {MOMENTS}"
            )


@dataclass(frozen=True)
class PhaseFault:
    """Kill `rank` when its program enters `phase` of `step`, outside any call."""

    rank: int
    step: int
    phase: str


@dataclass(frozen=True)
class RandomFaults:
    """Kill at random, at most `most` ranks in the whole run.

    per_call: chance of a rank's death at a call. per_recovery_call: the same for a `shrink` and for
    the rank's next `recovery_calls` calls. together: chance that a death takes along another rank
    at the same instant; drawn again for each further rank. lost_touch: chance that a call other
    than an agreement fails at a rank without any death, `most_lost_touch` times at most. may_kill:
    asked with (rank, the killed and the doomed until now) before each kill; no answer changes the
    chances. returns: chance that a dead rank comes back, `longest_return` calls of all ranks later
    at most.
    """

    most: int
    per_call: float = 0.002
    per_recovery_call: float = 0.05
    recovery_calls: int = 6
    together: float = 0.2
    lost_touch: float = 0.0
    most_lost_touch: int = 3
    returns: float = 0.0
    longest_return: int = 200
    may_kill: Callable[[int, tuple[int, ...]], bool] = lambda rank, killed: True

    @staticmethod
    def drawn(
        random: Random, most: int, may_kill: Callable[[int, tuple[int, ...]], bool] | None = None
    ) -> RandomFaults:
        """Draw chances from `random`, from calm to violent: schedules differ in kind too."""
        drawn = RandomFaults(
            most=most,
            per_call=10 ** random.uniform(-4, -1.5),
            per_recovery_call=random.choice((0.0, 0.02, 0.1, 0.3)),
            recovery_calls=random.randrange(1, 13),
            together=random.choice((0.0, 0.2, 0.6)),
        )
        return drawn if may_kill is None else replace(drawn, may_kill=may_kill)


class FaultPlan:
    """Decides, call by call, whether a rank dies now.

    Remembers the fired given faults, and counts the drawn faults by kind in `mix`.
    """

    def __init__(self, faults: RandomFaults | Iterable[Fault | PhaseFault], random: Random) -> None:
        self._random = random
        self._chances = faults if isinstance(faults, RandomFaults) else None
        self._given = [] if isinstance(faults, RandomFaults) else list(faults)
        self._at_call = {(f.rank, f.call_index): f for f in self._given if isinstance(f, Fault)}
        self._at_phase = {
            (f.rank, f.step, f.phase): f for f in self._given if isinstance(f, PhaseFault)
        }
        self._fired: set[Fault | PhaseFault] = set()
        self.mix: Counter[str] = Counter()
        # ranks to die by chance; some have yet to die, at the end of their call
        self._ordered: set[int] = set()

    @property
    def unfired(self) -> list[Fault | PhaseFault]:
        return [fault for fault in self._given if fault not in self._fired]

    def at_call(
        self, rank: int, call_index: int, calls_since_shrink: int, killed: tuple[int, ...]
    ) -> str | None:
        """The moment of the rank's death in this call, or `None`.

        `calls_since_shrink` is 0 for a shrink itself, -1 before the first shrink.
        """
        chances = self._chances
        if chances is None:
            fault = self._at_call.get((rank, call_index))
            if fault is None:
                return None
            self._fired.add(fault)
            return fault.when
        recovering = 0 <= calls_since_shrink <= chances.recovery_calls
        chance = chances.per_recovery_call if recovering else chances.per_call
        if self._random.random() >= chance or not self._may_kill(rank, killed):
            return None
        self._ordered.add(rank)
        self.mix[INSIDE_RECOVERY] += recovering
        return self._random.choice(MOMENTS)

    def at_phase(self, rank: int, step: int, phase: str) -> bool:
        fault = self._at_phase.get((rank, step, phase))
        if fault is not None:
            self._fired.add(fault)
        return fault is not None

    def loses_touch(self) -> bool:
        """Whether a call that would complete at a rank fails at the rank instead."""
        chances = self._chances
        if (
            chances is None
            or not chances.lost_touch
            or self.mix[LOST_TOUCH] >= chances.most_lost_touch
        ):
            return False
        fails = self._random.random() < chances.lost_touch
        self.mix[LOST_TOUCH] += fails
        return fails

    def returns(self) -> int | None:
        """Number of calls until a dead rank may join; `None` if the rank stays dead."""
        chances = self._chances
        if chances is None or not chances.returns or self._random.random() >= chances.returns:
            return None
        self.mix[RETURNS] += 1
        return self._random.randrange(chances.longest_return)

    def taken_along(self, candidates: list[int], killed: tuple[int, ...]) -> int | None:
        """A rank of `candidates` dying at the same instant as the last of `killed`, or `None`."""
        chances = self._chances
        if chances is None or not candidates or self._random.random() >= chances.together:
            return None
        rank = self._random.choice(candidates)
        if not self._may_kill(rank, killed):
            return None
        self._ordered.add(rank)
        self.mix[AT_ONCE] += 1
        return rank

    def _may_kill(self, rank: int, killed: tuple[int, ...]) -> bool:
        doomed = (*killed, *sorted(self._ordered.difference(killed, (rank,))))
        assert self._chances is not None
        return len(doomed) < self._chances.most and self._chances.may_kill(rank, doomed)
