"""Whether the user's code on a slot leaves the dense part unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ecrm.base.errors import UsageError
from ecrm.engine.replica_check import ReplicaCheck
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.unseen_state import Seen, numbers_of
from ecrm.transport.digests import entry_digests, plain


class Modes:
    """The modes of a module's parts, training or not, at the start of the loop."""

    def __init__(self, module: nn.Module) -> None:
        self._began = [(name, part, part.training) for name, part in module.named_modules()]

    def check(self, place: str) -> None:
        """Raise UsageError if a part has changed its mode: peer ranks would not know the change."""
        for name, part, training in self._began:
            if part.training != training:
                raise UsageError(
                    f"{place}: {name or 'the model'} is in {_mode(part.training)} mode now, and "
                    f"was in {_mode(training)} mode as the loop began",
                    otherwise="set modes before the loop over session.steps, and put them back "
                    "where the body changes them",
                )


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


class BodyWatch:
    """Compares the dense part of a rank before and after the user's code on a slot.

    Optimizer numbers and counts of in-place changes are compared in every slot. All bits are
    compared in the first steps, and later as often as `ReplicaCheck` has time. Only comparing all
    bits finds changes unknown to torch. `looks` says whether all bits are compared in the current
    slot; if so, `tell` reports changed numbers on modules.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._seen = tell, Seen()
        self._check, self.looks = ReplicaCheck(), False
        self._step, self._began = -1, 0.0
        self._versions = 0
        self._numbers: list[tuple[str, Any]] = []
        self._before: dict[str, int] | None = None

    def begin(self, replica: ModuleReplica, step: int) -> None:
        """Note the state before the user's code on a slot; `replica` is this rank's dense part."""
        self._replica = replica
        if step != self._step:
            now = time.monotonic()
            if self._step >= 0:
                self._check.stepped(now - self._began)
            self._step, self._began = step, now
        self._versions, self._numbers = self._replica.versions, self._replica.numbers
        self.looks = self._check.is_due(step)
        self._before = self._check.timed(self._replica, self._look) if self.looks else None

    def _look(self) -> None:
        """Report every number on a module changed since the previous look of this rank."""
        seen = numbers_of(self._replica.module)
        for name, value in seen.items():
            before = self._seen.get(name)
            if before is not None and before != value:
                self._tell(
                    f"! {name} of the model has changed from {before!r} to {value!r} by step "
                    f"{self._step}: where a result depends on it, a failure changes the trained "
                    "model; keep it in a buffer then"
                )
        self._seen = seen

    def check(self, place: str) -> None:
        """Raise UsageError if the user's code at `place` has changed the dense part."""
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
