"""Small notes of slots on finished steps: carried, kept and undone by the engine, unread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class StepLog:
    """Notes of slots by step, a note per step and slot: uint8 [N], any N.

    Every dense holder has the same notes, as far back as the holder remembers. Notes are part of
    the state: undoing a step drops the notes of the step, a new holder gets all notes, and
    checkpoints have the notes.
    """

    def __init__(self, state: Sequence[Tensor] = ()) -> None:
        """Begin empty, or with the notes from `export`."""
        self._notes: dict[int, dict[int, Tensor]] = {}
        if state:
            numbers, data = state
            heads = numbers.view(-1, 3).tolist()
            for (step, slot, _), note in zip(
                heads, data.split([size for *_, size in heads]), strict=True
            ):
                self._notes.setdefault(step, {})[slot] = note.clone()

    def add(self, step: int, notes: Mapping[int, Tensor]) -> None:
        """Keep copies of the slots' notes on a step, {slot: note}."""
        self._notes[step] = {slot: note.clone() for slot, note in sorted(notes.items())}

    def of(self, step: int) -> Mapping[int, Tensor]:
        """{slot: note} of a step, slots ascending; empty without notes."""
        return self._notes.get(step, {})

    def undo(self, step: int) -> None:
        """Drop the notes of `step` and of all later steps."""
        self._notes = {known: notes for known, notes in self._notes.items() if known < step}

    def forget(self, before: int) -> None:
        """Drop the notes of all steps before `before`."""
        self._notes = {known: notes for known, notes in self._notes.items() if known >= before}

    def export(self, before: int) -> list[Tensor]:
        """All notes of steps before `before`; an empty list without notes.

        Two tensors: step, slot and size of every note, int64 [n, 3], and all notes, uint8.
        """
        kept = [
            (step, slot, note)
            for step, notes in sorted(self._notes.items())
            if step < before
            for slot, note in notes.items()
        ]
        if not kept:
            return []
        return [
            torch.tensor([[step, slot, len(note)] for step, slot, note in kept]),
            torch.cat([note for *_, note in kept]),
        ]
