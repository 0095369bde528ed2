"""testing.gpu_fault: the hook letting an imitated GPU fail."""

from __future__ import annotations

from ecrm.config.faults import GpuFault
from ecrm.testing.imitated_gpu import fail_from_now_on


class GpuFaultSwitch:
    """A phase hook; after the scheduled phase begins, every use of the imitated GPU fails."""

    def __init__(self, fault: GpuFault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None

    def __call__(self, step: int, phase: str) -> None:
        if self._fault is None or phase != self._fault.phase or step < self._fault.step:
            return
        fail_from_now_on(self._fault.kind)
