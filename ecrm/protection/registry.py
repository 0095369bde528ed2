"""The protections by the names of a config."""

from __future__ import annotations

from pathlib import Path

from ecrm.config.schema import Config
from ecrm.protection.base import Protection
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.mapped import MappedProtection
from ecrm.protection.none import CheckpointProtection, NoProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.protection.restoring import RowSource
from ecrm.protection.stateless import StatelessProtection


def make_protection(
    config: Config, mapped: Path | None = None, rows: RowSource | None = None
) -> Protection:
    """The protection named by a config.

    `mapped` is the folder of mapped files, `rows` the durable tier, read by shard.
    """
    if config.protection.name == "mapped":
        assert mapped is not None
        return MappedProtection(config.cluster.servers, mapped, config.mapped.flush == "commit")
    if config.protection.name == "stateless":
        return StatelessProtection(config.cluster.servers, rows, config.protection.last_seen_rows)
    if config.protection.name == "none":
        return NoProtection(config.cluster.servers)
    if config.protection.name == "checkpoint":
        return CheckpointProtection(config.cluster.servers)
    if config.protection.name == "replicate":
        return ReplicateProtection(config.cluster.servers, config.protection.copies)
    if config.protection.name == "chain":
        return ChainProtection(config.cluster.servers, config.protection.copies)
    return ErasureProtection(config.cluster.servers, config.protection.k, config.protection.m)
