"""Build the protection named by a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ecrm.protection.base import Protection
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.kinds import Settings
from ecrm.protection.mapped import MappedProtection
from ecrm.protection.none import CheckpointProtection, NoProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.protection.restoring import DurableRows
from ecrm.protection.stateless import StatelessProtection


@dataclass(frozen=True)
class ProtectionInputs:
    """The values that a protection may be built from.

    - `servers`: the number of servers at the start.
    - `mapped`: the folder of mapped files. `durable`: whether each commit reaches the device.
    - `rows`: the durable tier, read by shard.
    """

    settings: Settings
    servers: int
    mapped: Path | None
    rows: DurableRows | None
    durable: bool


def _mapped(given: ProtectionInputs) -> Protection:
    assert given.mapped is not None
    return MappedProtection(given.servers, given.mapped, given.durable)


PROTECTIONS: dict[str, Callable[[ProtectionInputs], Protection]] = {
    "none": lambda given: NoProtection(given.servers),
    "erasure": lambda given: ErasureProtection(
        given.servers * given.settings.shards_per_server, given.settings.k, given.settings.m
    ),
    "chain": lambda given: ChainProtection(given.servers, given.settings.copies),
    "replicate": lambda given: ReplicateProtection(given.servers, given.settings.copies),
    "stateless": lambda given: StatelessProtection(
        given.servers, given.rows, given.settings.last_seen_rows
    ),
    "checkpoint": lambda given: CheckpointProtection(given.servers),
    "mapped": _mapped,
}
"""A maker of each protection, by the name of the kind."""


def make_protection(
    settings: Settings,
    servers: int,
    mapped: Path | None = None,
    rows: DurableRows | None = None,
    *,
    durable: bool,
) -> Protection:
    """The protection named by `settings`, over the shards of the `servers`.

    The arguments are the fields of `ProtectionInputs`.
    """
    return PROTECTIONS[settings.name](ProtectionInputs(settings, servers, mapped, rows, durable))
