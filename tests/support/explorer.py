"""All states of a finite model, breadth first: an explicit-state model checker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Explored(Protocol):
    """A finite model. States are hashable values."""

    def start(self) -> Any: ...
    def steps(self, state: Any) -> Iterator[tuple[str, Any]]: ...
    def wrong(self, state: Any) -> str: ...
    def wrong_step(self, before: Any, after: Any) -> str: ...
    def ended(self, state: Any) -> bool: ...
    def progress(self, state: Any) -> int: ...


@dataclass(frozen=True)
class Found:
    """Numbers of states and of steps, and the first broken promise with the shortest way to it."""

    states: int
    steps: int
    ends: int
    wrong: str = ""
    way: tuple[str, ...] = ()


def explore(model: Explored, most: int = 10**9) -> Found:
    """Visit all states; stop at the first broken promise.

    Promises are those of the model, a proper end of every run, and growing `progress`: with a
    finite number of states, every run then ends. Raises AssertionError beyond `most` states.

    A visited state is kept as a hash of 64 bits. Two of 10 million states have the same hash with a
    probability of 3 in a million; the second state would then be left out.
    """
    start = model.start()
    came = {hash(start): 0}
    waiting, steps, ends = deque([start]), 0, 0

    def found(state: Any, wrong: str, *last: str) -> Found:
        return Found(len(came), steps, ends, wrong, (*_way(model, came, state), *last))

    while waiting:
        state = waiting.popleft()
        if wrong := model.wrong(state):
            return found(state, wrong)
        stands, progress, name = True, model.progress(state), hash(state)
        for label, after in model.steps(state):
            stands, steps = False, steps + 1
            if hash(after) not in came:
                came[hash(after)] = name
                waiting.append(after)
                if model.progress(after) <= progress:
                    return found(state, "a step without progress", label)
            if wrong := model.wrong_step(state, after):
                return found(state, wrong, label)
        if stands:
            ends += 1
            if not model.ended(state):
                return found(state, "nobody can go on")
        assert len(came) <= most, f"more than {most} states"
    return Found(len(came), steps, ends)


def _way(model: Explored, came: Mapping[int, int], state: Any) -> Iterator[str]:
    """The labels on the way from the start to a state."""
    names = [hash(state)]
    while came[names[-1]]:
        names.append(came[names[-1]])
    at = model.start()
    for name in reversed(names[:-1]):
        label, at = next(step for step in model.steps(at) if hash(step[1]) == name)
        yield label
