"""Build the protection named by a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ecrm.protection.base import Protection
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.kinds import Settings
from ecrm.protection.mapped import MappedProtection
from ecrm.protection.none import CheckpointProtection, NoProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.protection.restoring import RowSource
from ecrm.protection.stateless import StatelessProtection


def make_protection(
    settings: Settings,
    servers: int,
    mapped: Path | None = None,
    rows: RowSource | None = None,
    *,
    durable: bool,
) -> Protection:
    """The protection named by `settings`, over a shard for each of the `servers`.

    `mapped` is the folder of mapped files, and `durable` has each commit on the device. `rows` is
    the durable tier, read by shard.
    """

    def in_files() -> Protection:
        assert mapped is not None
        return MappedProtection(servers, mapped, durable)

    make: dict[str, Callable[[], Protection]] = {
        "none": lambda: NoProtection(servers),
        "erasure": lambda: ErasureProtection(servers, settings.k, settings.m),
        "chain": lambda: ChainProtection(servers, settings.copies),
        "replicate": lambda: ReplicateProtection(servers, settings.copies),
        "stateless": lambda: StatelessProtection(servers, rows, settings.last_seen_rows),
        "checkpoint": lambda: CheckpointProtection(servers),
        "mapped": in_files,
    }
    return make[settings.name]()
