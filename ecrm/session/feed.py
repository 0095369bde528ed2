"""How a rank gets the batches of its slots: made in the rank, or ahead in workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from ecrm.session.workers import Worker, WorkerLost

STEPS_AHEAD = 2
"""Number of steps for which workers make batches ahead; at least two batches a worker."""

StepSlot = tuple[int, int]
"""A step and a slot."""


@dataclass(frozen=True)
class DrawnBatch:
    """The batch of a slot in a step.

    - `over`: the slot has no batch in this step or later.
    - `after`: the state of a stream after this batch; `None` for data without streams.
    - `before`: a replacement for the stream's state before this batch, known only after drawing;
      `None` to keep the state.
    """

    batch: Any
    over: bool = False
    after: bytes | None = None
    before: bytes | None = None


class Source(Protocol):
    """A maker of batches, usable in several processes.

    `streams` says whether the batches of a slot are a sequence with a state between batches.
    """

    streams: bool

    def draw(self, step: int, slot: int, before: bytes | None) -> DrawnBatch:
        """The batch of a slot in a step; `before` is the state of a stream, if known."""

    def slots_in(self, step: int) -> range:
        """The slots with a batch in a step, as far as known without drawing."""


def draw_in_one_thread(source: Source, step: int, slot: int, before: bytes | None) -> DrawnBatch:
    """Draw with one thread of torch: sums of several threads have other bits."""
    threads = torch.get_num_threads()
    if threads == 1:
        return source.draw(step, slot, before)
    torch.set_num_threads(1)
    try:
        return source.draw(step, slot, before)
    finally:
        torch.set_num_threads(threads)


class Task(tuple[int, int, bytes | None]):
    """(step, slot, state before) of a batch asked for from a worker."""

    def __str__(self) -> str:
        return f"the batch of step {self[0]}, slot {self[1]}"


class AskedWorker:
    """A worker, and the places asked for, in the order of making, with their rounds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.asked: deque[tuple[StepSlot, int]] = deque()


class Feed:
    """Draws batches of a `source` for a rank.

    The workers from `start` answer a Task with the result of `Source.draw`. The workers make ahead
    the next batches of this rank, up to step `steps`. Workers start with the first batch, so a
    rank without slots has no workers. If `start` gives no workers, the rank makes every batch on
    demand.
    """

    def __init__(self, source: Source, start: Callable[[], Sequence[Worker]], steps: int) -> None:
        self._source, self._steps, self._start = source, steps, start
        self._workers: list[AskedWorker] | None = None
        self._round = 0  # answers to tasks of earlier rounds are dropped
        self._wanted: dict[StepSlot, AskedWorker] = {}
        self._came: dict[StepSlot, DrawnBatch | Exception] = {}
        self._next: dict[int, int] = {}  # by slot, the next step of the stream

    @property
    def streams(self) -> bool:
        """Whether batches of a slot are a sequence with a state between batches."""
        return self._source.streams

    def slots_in(self, step: int) -> range:
        """The slots with a batch in a step, except for slots with an ended stream."""
        return self._source.slots_in(step)

    def draw(
        self, step: int, slot: int, mine: Sequence[int], before: bytes | None = None
    ) -> DrawnBatch:
        """The batch of a slot among `mine`, the slots of this rank; waits for the batch if needed.

        `before` is the state of a stream before the batch, if known. Raises any error from making
        the batch, and WorkerLost.
        """
        if self._workers is None:
            self._workers = [AskedWorker(worker) for worker in self._start()]
        if not self._workers:
            return draw_in_one_thread(self._source, step, slot, before)
        place = (step, slot)
        self._forget_before(step)
        self._ask(place, before)
        depth = max(2 * len(self._workers), STEPS_AHEAD * len(mine))
        for following in islice(_following(step, slot, sorted(mine), self._steps), depth):
            if not self.streams or self._next.get(following[1]) == following[0]:
                self._ask(following, None)
        return self._take(place)

    def draw_here(self, step: int, slot: int, before: bytes | None) -> DrawnBatch:
        """The batch of a peer rank's slot, made in this process."""
        return draw_in_one_thread(self._source, step, slot, before)

    def on_recovery(self) -> None:
        """After a recovery, forget batches of streams: `draw` gets the states for a restart."""
        if self.streams:
            self._round += 1
            self._wanted.clear()
            self._came.clear()
            self._next.clear()

    def close(self) -> None:
        """End the workers."""
        for each in self._workers or ():
            each.worker.close()

    def _forget_before(self, step: int) -> None:
        # a step is asked for again only after a recovery, when a step begins
        self._wanted = {place: by for place, by in self._wanted.items() if place[0] >= step - 1}
        self._came = {place: drawn for place, drawn in self._came.items() if place[0] >= step - 1}

    def _ask(self, place: StepSlot, before: bytes | None) -> None:
        if place in self._wanted:
            return
        step, slot = place
        assert self._workers
        if self.streams:  # a stream lives in a single process
            chosen = self._workers[slot % len(self._workers)]
        else:
            chosen = min(self._workers, key=lambda each: len(each.asked))
        chosen.worker.ask(Task((step, slot, before)))
        chosen.asked.append((place, self._round))
        self._wanted[place], self._next[slot] = chosen, step + 1

    def _take(self, place: StepSlot) -> DrawnBatch:
        chosen = self._wanted[place]
        while place not in self._came:
            came, asked_in = chosen.asked.popleft()
            try:
                drawn: DrawnBatch | Exception = chosen.worker.answer()
            except WorkerLost:
                raise
            except Exception as error:
                drawn = error
            if asked_in == self._round and self._wanted.get(came) is chosen:
                self._came[came] = drawn
        del self._wanted[place]
        drawn = self._came.pop(place)
        if isinstance(drawn, Exception):
            raise drawn
        return drawn


def _following(step: int, slot: int, mine: Sequence[int], steps: int) -> Iterator[StepSlot]:
    """The places of the slots `mine` after (step, slot), up to the last step."""
    for later in mine:
        if later > slot:
            yield step, later
    for ahead in range(step + 1, steps):
        for each in mine:
            yield ahead, each
