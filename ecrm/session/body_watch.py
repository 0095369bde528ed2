"""Whether the user's code on a slot leaves the dense part as it is."""

from __future__ import annotations

import time
from typing import Any

from ecrm.engine.replica_check import ReplicaCheck
from ecrm.errors import UsageError
from ecrm.model.module_replica import ModuleReplica
from ecrm.transport.digests import entry_digests, plain


class BodyWatch:
    """Compares the dense part of a rank before and after the user's code on a slot.

    Numbers of the optimizer and counts of in-place changes are compared in each slot. All bits are,
    also those changed behind torch's back, in the first steps, and then as often as `ReplicaCheck`
    has time for.
    """

    def __init__(self) -> None:
        self._check = ReplicaCheck()
        self._step, self._began = -1, 0.0
        self._versions = 0
        self._numbers: list[tuple[str, Any]] = []
        self._before: dict[str, int] | None = None

    def begin(self, replica: ModuleReplica, step: int) -> None:
        """The user's code begins on a slot of a step; `replica` is this rank's dense part."""
        self._replica = replica
        if step != self._step:
            now = time.monotonic()
            if self._step >= 0:
                self._check.stepped(now - self._began)
            self._step, self._began = step, now
        self._versions, self._numbers = self._replica.versions, self._replica.numbers
        due = self._check.is_due(step)
        self._before = self._check.timed(self._replica) if due else None

    def check(self, place: str) -> None:
        """Raise UsageError where the user's code has changed the dense part at a place."""
        self._replica.check_frozen(place)
        for (name, before), (_, now) in zip(self._numbers, self._replica.numbers):
            if plain(before) != plain(now):
                raise UsageError(
                    f"{place}: the body of the loop changed {name} from {plain(before)} to "
                    f"{plain(now)}",
                    otherwise="give the Session a scheduler=, or change the number in "
                    "before_step: both run alike on all ranks",
                )
        if self._replica.versions != self._versions:
            raise self._changed(place, "parameters were")
        if self._before is not None:
            now_digests = entry_digests(self._replica.entries)
            for name in {**self._before, **now_digests}:
                if self._before.get(name) != now_digests.get(name):
                    raise self._changed(place, f"{name} was")

    @staticmethod
    def _changed(place: str, what: str) -> UsageError:
        return UsageError(
            f"{place}: {what} changed in the body of the loop",
            otherwise="leave out optimizer.step() and scheduler.step(), which the session does, "
            "and change parameters in before_step, alike on all ranks",
        )
