"""testing.gpu_fault: the text of the config key, and the hook letting an imitated GPU fail."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ecrm.faults.kill import PHASES

KINDS = ("memory", "lost", "hang")


@dataclass(frozen=True)
class GpuFault:
    """A failure of the GPU of `rank` when `phase` begins at `step`, or first begins after `step`.

    `kind`: the GPU has no memory left, is lost, or hangs in every operation.
    """

    rank: int
    step: int
    phase: str
    kind: str


def parse_gpu_fault(text: str) -> GpuFault | None:
    """Parse RANK@STEP:PHASE:KIND; return `None` for a text of a different form."""
    match = re.fullmatch(
        rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(PHASES)}):({'|'.join(KINDS)})", text
    )
    return GpuFault(int(match[1]), int(match[2]), match[3], match[4]) if match else None


class GpuFaultSwitch:
    """A phase hook; after the scheduled phase begins, every use of the imitated GPU fails."""

    def __init__(self, fault: GpuFault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None

    def __call__(self, step: int, phase: str) -> None:
        if self._fault is None or phase != self._fault.phase or step < self._fault.step:
            return
        from ecrm.device.imitated_gpu import fail_from_now_on

        fail_from_now_on(self._fault.kind)
