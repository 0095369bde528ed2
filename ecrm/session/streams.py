"""Batches of streams with a saved position, one stream for each slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ecrm.base.errors import UsageError
from ecrm.model.determinism import seed_slot
from ecrm.model.nested_state import check_readable, read, written
from ecrm.session.feed import DrawnBatch
from ecrm.session.whole_number import whole

ENDED = b""
"""The state of a stream without further batches."""


class Stream(Protocol):
    """Successive batches with a position, such as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position of the loaded state, or from the first batch on."""

    def state_dict(self) -> Any:
        """Nested state of tensors, numbers and text: the position of the running iterator."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Have the next iterator go on from the position in a state."""


class Streams:
    """The batches of streams, one stream for each slot.

    - `make(slot)` returns the stream of a slot: any object with `__iter__`, `state_dict` and
      `load_state_dict`, such as torchdata's StatefulDataLoader. Streams must not share samples:
      give every stream its own part of the data.
    - `workers`: the number of processes per rank drawing ahead from the rank's streams, as with
      `Indexed`; a stream is in one worker. By default the rank itself draws batches.
    - `epochs`: the number of streams of a slot, one after the other. `make(slot, epoch)` then
      returns the stream of an epoch. By default a slot has one stream, from `make(slot)`.

    The state of every stream before a step is part of the model's state: after a failure, from a
    checkpoint and in a resumed run, training goes on with the next batches. A rank taking over a
    slot makes the stream anew and loads the state. Every batch is drawn with random numbers seeded
    by (seed, step, slot).

    A slot with an ended stream has no batch in later steps, while other slots go on. Gradients are
    divided by the number of slots with a batch. Buffers, as of BatchNorm, are then from the lowest
    slot with a batch. Training ends with the last stream, or with the steps if fewer. A stream
    without any batch is an error. One batch more is drawn than trained.

    Not checked: whether a stream with a loaded state gives the same batches as the stream with the
    saved state. So a generator drawing random numbers before its first batch must seed the numbers
    itself. A loop over a loader's epochs is no stream: give `epochs`. Also not checked: whether
    every batch has memory of its own. Raises UsageError for fewer than 0 workers or 1 epoch. A
    loader with workers of its own is an error: random numbers drawn in such workers are lost.
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
    """A stream in use."""

    stream: Stream
    batches: Iterator[Any]
    epoch: int
    drawn: bool
    """Whether the stream has given a batch, in this process or before the state was loaded."""
    readable: bool = False
    """Whether the state is known to be loadable on another rank."""


class StreamSource:
    """Draws from the streams of some slots of a run."""

    streams = True

    def __init__(self, streams: Streams, slots: int, seed: int) -> None:
        self._all, self._slots, self._seed = streams, slots, seed
        # by slot and the step of the next batch: a batch made once more has a stream of its own,
        # and the stream further ahead goes on
        self._running: dict[int, dict[int, _Running]] = {}
        self._ends: dict[int, int] = {}

    def slots_in(self, step: int) -> range:
        """All slots: ended streams are known from states."""
        return range(self._slots)

    def draw(self, step: int, slot: int, before: bytes | None) -> DrawnBatch:
        """The batch of a slot in a step.

        A stream not in use in this process is made anew, with the state `before`; step 0 needs no
        state. Raises UsageError for an unusable stream or state.
        """
        if before == ENDED:
            self._ends[slot] = step
        if not before and self._ends.get(slot, step + 1) <= step:
            return DrawnBatch(None, over=True, after=ENDED)
        seed_slot(self._seed, step, -1 - slot)
        ahead = {at: each for at, each in self._running.get(slot, {}).items() if at >= step}
        running = ahead.pop(step, None)
        if running is None:
            running = self._begun(step, slot, before)
        self._running[slot], known = ahead, None
        while running is not None:
            try:
                batch = next(running.batches)
            except StopIteration:
                running = self._next_epoch(running, step, slot)
                # a loader may begin anew from the state that it has at its end
                known = None if running is None else _written({"epoch": running.epoch})
            else:
                running.drawn, ahead[step + 1] = True, running
                return DrawnBatch(batch, after=self._state(running, slot), before=known)
        self._ends[slot] = step
        return DrawnBatch(None, over=True, after=ENDED)

    def _state(self, running: _Running, slot: int) -> bytes:
        state = running.stream.state_dict()
        if not running.readable:
            check_readable(state, f"the stream of slot {slot}")
            running.readable = True
        if self._all.epochs is not None:
            state = {"epoch": running.epoch, "stream": state}
        return _written(state)

    def _next_epoch(self, running: _Running, step: int, slot: int) -> _Running | None:
        """The stream after an ended stream; `None` after the last epoch."""
        if not running.drawn:
            epoch = "" if self._all.epochs is None else f" in epoch {running.epoch}"
            raise UsageError(
                f"the stream of slot {slot} has no batch{epoch}: each needs one at least"
            )
        if running.epoch + 1 >= (self._all.epochs or 1):
            return None
        seed_slot(self._seed, step, -1 - slot)  # the ended stream may have drawn numbers
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
        """A stream at its beginning, or at the one entry of `state`; seeds random numbers."""
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
        seed_slot(self._seed, step, -1 - slot)  # as for a stream in use
        return _Running(stream, batches, epoch, drawn=bool(state))


def _written(state: Any) -> bytes:
    return written(state).numpy().tobytes()
