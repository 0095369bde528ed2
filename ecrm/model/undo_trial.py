"""A test whether an undo brings back everything changed by a step of the dense part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from ecrm.base.errors import UsageError
from ecrm.model.unseen_state import (
    Seen,
    first_change,
    first_growth,
    of_module,
    of_objects,
    state_of,
)
from ecrm.transport.digests import entry_digests


class UndoTrial:
    """Takes a step, undoes the step, takes the step again, and compares the two results.

    `entries()` are the entries of the replica's state, `undo()` goes back to the last commit, and
    `things()` are the objects that a step may change, by name. Among their parts, objects with an
    id in `kept()` are compared as state already. `module` is the replica's module.
    """

    def __init__(
        self,
        module: nn.Module,
        entries: Callable[[], Iterable[tuple[str, object]]],
        undo: Callable[[], None],
        things: Callable[[], Mapping[str, object]],
        kept: Callable[[], set[int]],
    ) -> None:
        self._module, self._entries, self._undo = module, entries, undo
        self._things, self._kept = things, kept
        self.grown = ""
        """A list made longer by each step, "" for none; the list may be a log."""

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Take the step by `first`, again by `second`. Raises UsageError if the results differ."""
        first()
        digests, unseen = entry_digests(self._entries()), self._unseen()
        self._undo()
        second()
        if changed := first_change(unseen, self._unseen()):
            raise UsageError(
                f"a step changes what an undo does not bring back: {changed}",
                otherwise="keep it in the optimizer's state, or give its owner state_dict and "
                "load_state_dict, and call session.register(name, owner) before session.steps",
            )
        self.grown = first_growth(unseen, self._unseen())
        for name, digest in entry_digests(self._entries()).items():
            if digests.get(name) != digest:
                raise UsageError(
                    f"a step was undone and taken again, and {name} came out otherwise",
                    otherwise="let before_step, the optimizer and the scheduler draw random "
                    "numbers from torch, random or numpy, which are seeded, and keep nothing",
                )

    def _unseen(self) -> Seen:
        """State that steps may change besides the kept state."""
        things, known = self._things(), self._kept() | state_of(self._module)
        for thing in things.values():
            known |= state_of(thing) if isinstance(thing, nn.Module) else set()
        of_steps = of_objects(things, known)
        return {**of_steps, **{f"the model's {n}": v for n, v in of_module(self._module).items()}}
