"""The faults that a run injects into itself, loaded only when the run asks for a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ecrm.base.testing_part import testing_part
from ecrm.config.faults import Kill
from ecrm.config.schema import TestingConfig
from ecrm.engine.engine import Engine
from ecrm.engine.events import Event


class Faults(Protocol):
    """The faults of one rank."""

    def watch(self, engine: Engine) -> None:
        """Inject faults into this engine from now on."""

    def phase(self, step: int, name: str) -> None:
        """Inject the faults due at the beginning of a phase."""


def injected_faults(
    kills: Sequence[Kill],
    testing: TestingConfig,
    rank: int,
    before_kill: Callable[[Kill, int], None],
    write: Callable[[Event], None],
) -> Faults | None:
    """The faults of this rank, see `InjectedFaults`; `None` for a run without any."""
    if not (kills or testing.flip or testing.gpu_fault or testing.skip_undo):
        return None
    injected = testing_part("faults.injected").InjectedFaults
    faults: Faults = injected(kills, testing, rank, before_kill, write)
    return faults
