"""All faults injected by a run into itself on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecrm.config.faults import Kill, parse_flip, parse_gpu_fault
from ecrm.config.schema import TestingConfig
from ecrm.engine.engine import Engine
from ecrm.engine.events import Event
from ecrm.testing.faults.flip import FlipSwitch
from ecrm.testing.faults.gpu_fault import GpuFaultSwitch
from ecrm.testing.faults.kill_switch import KillSwitch
from ecrm.testing.faults.without_undo import leave_updates_in_place


class InjectedFaults:
    """The faults of one rank: scheduled kills, a flipped bit, a GPU fault, a missing undo.

    `before_kill(kill, step)` is called just before this rank kills itself; `write` gets the event
    of a kill due from outside (`ecrm drill`).
    """

    def __init__(
        self,
        kills: Sequence[Kill],
        testing: TestingConfig,
        rank: int,
        before_kill: Callable[[Kill, int], None],
        write: Callable[[Event], None],
    ) -> None:
        self._kill = KillSwitch(kills, rank, before_kill, write)
        self._flip = FlipSwitch(parse_flip(testing.flip), rank)
        self._gpu = GpuFaultSwitch(parse_gpu_fault(testing.gpu_fault), rank)
        self._skip_undo = testing.skip_undo

    def watch(self, engine: Engine) -> None:
        """Inject faults into this engine from now on."""
        self._flip.watch(engine)
        if self._skip_undo:
            leave_updates_in_place(engine)

    def phase(self, step: int, name: str) -> None:
        """Inject the faults due at the beginning of a phase."""
        self._flip(step, name)
        self._gpu(step, name)
        self._kill(step, name)
