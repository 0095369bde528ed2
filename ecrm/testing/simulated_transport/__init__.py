"""Many simulated ranks in a single process, from a single seed; see `cluster`."""

from ecrm.testing.simulated_transport.cluster import SimulatedCluster
from ecrm.testing.simulated_transport.fault_plan import (
    AFTER,
    BEFORE,
    DURING,
    Fault,
    PhaseFault,
    RandomFaults,
)
from ecrm.testing.simulated_transport.link_cluster import LinkCluster
from ecrm.testing.simulated_transport.network import LinkFaults
from ecrm.testing.simulated_transport.outcome import (
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
    "LinkCluster",
    "LinkFaults",
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
