"""Batches of streams that know where they are, one stream for each slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ecrm.errors import UsageError
from ecrm.model.determinism import seed_slot
from ecrm.model.nested_state import check_readable, read, written
from ecrm.session.feed import Drawn
from ecrm.session.whole_number import whole

ENDED = b""
"""The state of a stream that has no batch any more."""


class Stream(Protocol):
    """Batches one after the other, and the place in them: torchdata's StatefulDataLoader is one."""

    def __iter__(self) -> Iterator[Any]:
        """The batches from where the loaded state says, or from the first one on."""

    def state_dict(self) -> Any:
        """Nested state of tensors, numbers and words: where the running iterator is."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Have the next iterator go on from there."""


class Streams:
    """The batches of streams, one stream for each slot.

    - `make(slot)` gives the stream of a slot: anything with `__iter__`, `state_dict` and
      `load_state_dict`, such as torchdata's StatefulDataLoader. A stream reads samples that no
      other stream reads: give each its part of the data.
    - `workers`: how many processes of each rank draw from its streams ahead, as with `Indexed`; a
      stream is in one of them. By default batches are drawn in the rank itself.
    - `epochs`: how many streams a slot goes through, one after the other. `make(slot, epoch)` then
      gives each of them. By default it is one, and `make(slot)` gives it.

    The state of each stream before a step is part of the model's state: a failure, a checkpoint and
    a resume go on with the batches that follow. Whoever takes over a slot makes its stream anew and
    loads that state. Each batch is drawn with random numbers seeded by (seed, step, slot).

    A slot whose stream has ended has no batch in later steps, while others go on. Gradients are
    divided by the number of slots that have one. Buffers, as of BatchNorm, are then those of the
    lowest such slot. Training ends with the last stream, or with the steps if they are fewer. A
    stream without a single batch is an error. One batch more is drawn than is trained.

    Not checked: that a stream which has loaded a state gives the same batches as the one that gave
    it. So a generator that draws random numbers before its first batch must have seeded them
    itself, and a loop over a loader's epochs is no stream: give `epochs`. Nor that each batch has
    memory of its own. Raises UsageError for fewer than 0 workers or 1 epoch. A loader with workers
    of its own is an error: random numbers drawn in them are not kept.
    """

    def __init__(
        self, make: Callable[..., Stream], workers: int = 0, epochs: int | None = None
    ) -> None:
        workers = whole(workers, "Streams(workers", 0)
        if epochs is not None:
            epochs = whole(epochs, "Streams(epochs", 1, ", or None for one")
        self._make, self.workers, self.epochs = make, workers, epochs

    def make(self, slot: int, epoch: int) -> Stream:
        """The stream of a slot in an epoch."""
        return self._make(slot) if self.epochs is None else self._make(slot, epoch)


@dataclass
class _Running:
    """A stream that is being drawn from: `step` is that of its next batch."""

    stream: Stream
    batches: Iterator[Any]
    step: int
    epoch: int
    drawn: bool
    """Whether it has given a batch, here or before its state was loaded."""
    readable: bool = False
    """Whether its state is known to be one that another rank can load."""


class StreamSource:
    """Draws from the streams of some of a run's slots."""

    streams = True

    def __init__(self, streams: Streams, slots: int, seed: int) -> None:
        self._all, self._slots, self._seed = streams, slots, seed
        self._running: dict[int, _Running] = {}
        self._ends: dict[int, int] = {}

    def slots_in(self, step: int) -> range:
        """All of them: what has ended is known from states."""
        return range(self._slots)

    def draw(self, step: int, slot: int, before: bytes | None) -> Drawn:
        """The batch of a slot in a step.

        A stream that is elsewhere is made anew, with the state `before`; in step 0 it needs none.
        Raises UsageError where a stream, or a state, cannot be used.
        """
        if before == ENDED:
            self._ends[slot] = step
        if not before and self._ends.get(slot, step + 1) <= step:
            return Drawn(None, over=True, after=ENDED)
        seed_slot(self._seed, step, -1 - slot)
        running = self._running.get(slot)
        if running is None or running.step != step:
            running = self._begun(step, slot, before)
        known = None
        while running is not None:
            self._running[slot] = running
            try:
                batch = next(running.batches)
            except StopIteration:
                running = self._next_epoch(running, step, slot)
                # a loader that has come to its end may begin anew with the state that it has there
                known = None if running is None else _written({"epoch": running.epoch})
            else:
                running.step, running.drawn = step + 1, True
                return Drawn(batch, after=self._state(running, slot), before=known)
        del self._running[slot]
        self._ends[slot] = step
        return Drawn(None, over=True, after=ENDED)

    def _state(self, running: _Running, slot: int) -> bytes:
        state = running.stream.state_dict()
        if not running.readable:
            check_readable(state, f"the stream of slot {slot}")
            running.readable = True
        if self._all.epochs is not None:
            state = {"epoch": running.epoch, "stream": state}
        return _written(state)

    def _next_epoch(self, running: _Running, step: int, slot: int) -> _Running | None:
        """What follows a stream that has ended; None after the last epoch."""
        if not running.drawn:
            epoch = "" if self._all.epochs is None else f" in epoch {running.epoch}"
            raise UsageError(
                f"the stream of slot {slot} has no batch{epoch}: each needs one at least"
            )
        if running.epoch + 1 >= (self._all.epochs or 1):
            return None
        seed_slot(self._seed, step, -1 - slot)  # whatever it takes to find that a stream has ended
        return self._made(step, slot, running.epoch + 1)

    def _begun(self, step: int, slot: int, before: bytes | None) -> _Running:
        if step and before is None:
            raise UsageError(
                f"nobody has the state of the stream of slot {slot} before step {step}",
                otherwise="go on with data of the kind that the run has begun with",
            )
        if before is None:
            return self._made(step, slot, 0)
        state, epoch = read(torch.frombuffer(bytearray(before), dtype=torch.uint8)), 0
        begins = isinstance(state, dict) and state.keys() == {"epoch"}
        in_epochs = begins or (isinstance(state, dict) and state.keys() == {"epoch", "stream"})
        if in_epochs != (self._all.epochs is not None):
            had = "with" if in_epochs else "without"
            raise UsageError(
                f"the stream of slot {slot} goes on from one {had} epochs",
                otherwise=f"give ecrm.Streams {had} epochs=",
            )
        if begins:
            return self._made(step, slot, state["epoch"])
        if in_epochs:
            state, epoch = state["stream"], state["epoch"]
        return self._made(step, slot, epoch, [state])

    def _made(self, step: int, slot: int, epoch: int, state: Sequence[Any] = ()) -> _Running:
        """A stream at its begin, or where the one `state` is, and random numbers seeded."""
        stream = self._all.make(slot, epoch)
        for method in ("__iter__", "state_dict", "load_state_dict"):
            if not hasattr(stream, method):
                raise UsageError(
                    f"the stream of slot {slot} is a {type(stream).__name__} without {method}",
                    otherwise="give ecrm.Streams a function that makes streams with a state, such "
                    "as torchdata's StatefulDataLoader",
                )
        if own := getattr(stream, "num_workers", 0):
            raise UsageError(
                f"the stream of slot {slot} is a {type(stream).__name__}(num_workers={own}), and "
                "random numbers drawn in its workers would be lost with its rank",
                otherwise=f"leave out num_workers, and type ecrm.Streams(..., workers={own})",
            )
        for one in state:
            stream.load_state_dict(one)
        batches = iter(stream)
        seed_slot(self._seed, step, -1 - slot)  # as where the stream runs on
        return _Running(stream, batches, step, epoch, drawn=bool(state))


def _written(state: Any) -> bytes:
    return written(state).numpy().tobytes()
