"""Checkpoints alone: no redundancy and no deltas, so that a step costs nothing beyond itself, and any failure takes everyone
back to the newest checkpoint (`ecrm/engine/rollback.py`). What is promised is the undisturbed model, bit for bit; what is lost
is the time since that checkpoint."""

from __future__ import annotations

from ecrm.protection.none import NoProtection


class CheckpointProtection(NoProtection):
    """`none`, by a name that demands checkpoints."""

    name = "checkpoint"

    @property
    def after_deaths(self) -> str:
        return "only checkpoints have their rows"
