"""Protections by name."""

from __future__ import annotations

from ecrm.config.schema import Config
from ecrm.protection.base import Protection
from ecrm.protection.chain import ChainProtection
from ecrm.protection.checkpoint import CheckpointProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.none import NoProtection


def make_protection(config: Config) -> Protection:
    """The protection that a config names."""
    if config.protection.name == "none":
        return NoProtection(config.cluster.servers)
    if config.protection.name == "checkpoint":
        return CheckpointProtection(config.cluster.servers)
    if config.protection.name == "chain":
        return ChainProtection(config.cluster.servers, config.protection.copies)
    return ErasureProtection(config.cluster.servers, config.protection.k, config.protection.m)
