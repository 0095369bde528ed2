"""Frequency of commits and speed of rebuilding, as set in a config."""

from __future__ import annotations

from ecrm.config.schema import Config
from ecrm.engine.hooks import EnginePolicy
from ecrm.protection.base import Protection


def policy_of(config: Config, protection: Protection) -> EnginePolicy:
    """An engine's policy, by the config and the protection named in the config."""
    wanted = config.protection
    return EnginePolicy(
        commit_interval=wanted.commit_interval,
        rebuild_rows_per_step=wanted.rebuild_rows_per_step,
        rebuild_share=wanted.rebuild_share,
        dense_replicas=protection.dense_replicas,
        scrub_rows_per_step=wanted.scrub_rows_per_step,
        reshape=wanted.reshape,
    )
