"""Many simulated ranks in a single process, from a single seed; see `cluster`."""

from ecrm.transport.simulated.cluster import SimulatedCluster
from ecrm.transport.simulated.fault_plan import (
    AFTER,
    BEFORE,
    DURING,
    Fault,
    PhaseFault,
    RandomFaults,
)
from ecrm.transport.simulated.outcome import (
    Event,
    Kill,
    Outcome,
    ProgramFailed,
    RankKilled,
    SimulationDeadlock,
    SimulationError,
    SimulationMismatch,
    SimulationTooLong,
)

__all__ = [
    "AFTER",
    "BEFORE",
    "DURING",
    "Event",
    "Fault",
    "Kill",
    "Outcome",
    "PhaseFault",
    "ProgramFailed",
    "RandomFaults",
    "RankKilled",
    "SimulatedCluster",
    "SimulationDeadlock",
    "SimulationError",
    "SimulationMismatch",
    "SimulationTooLong",
]
