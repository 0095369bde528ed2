"""Small notes of slots on finished steps: the engine carries, keeps and undoes them unread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class StepLog:
    """Notes of slots by step, one per step and slot: uint8 [N], any N.

    Every holder of the dense replica has the same, as far back as it remembers. They are part of
    the state: a step that is undone takes its notes along, a new holder gets them, and checkpoints
    have them.
    """

    def __init__(self, state: Sequence[Tensor] = ()) -> None:
        """Empty, or as `export` gave it."""
        self._notes: dict[int, dict[int, Tensor]] = {}
        if state:
            numbers, data = state
            heads = numbers.view(-1, 3).tolist()
            for (step, slot, _), note in zip(
                heads, data.split([size for *_, size in heads]), strict=True
            ):
                self._notes.setdefault(step, {})[slot] = note.clone()

    def add(self, step: int, notes: Mapping[int, Tensor]) -> None:
        """Keep what slots have noted of a step, {slot: note}; the notes are copied."""
        self._notes[step] = {slot: note.clone() for slot, note in sorted(notes.items())}

    def of(self, step: int) -> Mapping[int, Tensor]:
        """{slot: note} of a step, slots ascending; empty where nothing is known of it."""
        return self._notes.get(step, {})

    def undo(self, step: int) -> None:
        """Drop the notes of `step` and of all later ones."""
        self._notes = {known: notes for known, notes in self._notes.items() if known < step}

    def forget(self, before: int) -> None:
        """Drop the notes of all steps before `before`."""
        self._notes = {known: notes for known, notes in self._notes.items() if known >= before}

    def export(self, before: int) -> list[Tensor]:
        """All notes of steps before `before`; nothing where there are none.

        Two tensors: step, slot and size of each note, int64 [n, 3], and all notes, uint8.
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
