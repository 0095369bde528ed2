"""testing.gpu_fault: its text, and the hook that has the imitated GPU of a rank fail."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ecrm.faults.kill import PHASES

KINDS = ("memory", "lost", "hang")


@dataclass(frozen=True)
class GpuFault:
    """The GPU of `rank` fails when `phase` begins at `step`.

    `kind`: it has no memory left, is lost, or never comes to an end with what it is given.
    """

    rank: int
    step: int
    phase: str
    kind: str


def parse_gpu_fault(text: str) -> GpuFault | None:
    """RANK@STEP:PHASE:KIND; None for anything else."""
    match = re.fullmatch(
        rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(PHASES)}):({'|'.join(KINDS)})", text
    )
    return GpuFault(int(match[1]), int(match[2]), match[3], match[4]) if match else None


class GpuFaultSwitch:
    """A phase hook after which the imitated GPU of this rank fails, whatever it is asked for."""

    def __init__(self, fault: GpuFault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None

    def __call__(self, step: int, phase: str) -> None:
        if self._fault is None or phase != self._fault.phase or step < self._fault.step:
            return
        from ecrm.imitated_gpu import fail_from_now_on

        fail_from_now_on(self._fault.kind)
