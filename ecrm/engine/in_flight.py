"""The step that is under way on one rank, which a recovery gives up."""

from __future__ import annotations

from dataclasses import dataclass

from ecrm.engine.hooks import EnginePolicy
from ecrm.engine.lookup import Lookup
from ecrm.engine.step_replay import StepReplay


@dataclass
class StepInFlight:
    """What one rank knows of the step under way.

    `phase` is its name for hooks and records, `updating` whether it is being applied, `changed`
    whether rows may have changed, `lookup` what was asked for it, `ahead` what was asked for the
    next one. `replay` is what it can be done again with once all slots have computed, `replayed`
    the lookup for which the next one needs no message, `recovered` whether nothing was looked up
    since a recovery. `confirmed` is whether all rows that the last lookup returned here had come
    with the `apply` before it: an agreement has confirmed since that nobody died while they came.
    """

    phase: str = "start"
    updating: bool = False
    changed: bool = False
    lookup: Lookup | None = None
    ahead: Lookup | None = None
    replay: StepReplay | None = None
    replayed: Lookup | None = None
    recovered: bool = False
    confirmed: bool = False

    def give_up(self) -> StepReplay | None:
        """Forget what was asked; returns what the step can be replayed with."""
        replay, self.replay = self.replay, None
        self.lookup = self.ahead = self.replayed = None
        self.recovered = True
        return replay

    def rebuild_rows(self, policy: EnginePolicy) -> int:
        """Background rows of a round of repair.

        None in the first round after a recovery, for which all ranks stand still.
        """
        return 0 if self.recovered else policy.rebuild_rows_per_step
