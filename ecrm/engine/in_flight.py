"""The step under way on a rank, given up by a recovery."""

from __future__ import annotations

from dataclasses import dataclass

from ecrm.engine.lookup import Lookup
from ecrm.engine.step_replay import StepReplay
from ecrm.protection.rebuild_pace import RebuildPace


@dataclass
class StepInFlight:
    """The knowledge of a rank on the step under way.

    - `phase`: the name of the phase, for hooks and records.
    - `updating`: whether the step is being applied. `changed`: whether rows may have changed.
    - `lookup`: the lookup of the step. `ahead`: the lookup of the next step.
    - `replay`: the means to repeat the step, with all slots computed.
    - `replayed`: a lookup for the next step without a message.
    - `recovered`: whether no lookup was made since a recovery.
    - `confirmed`: whether all rows returned by the last lookup came with the `apply` before: an
      agreement has confirmed that no rank died meanwhile.
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
        """Forget all lookups; return the means to replay the step."""
        replay, self.replay = self.replay, None
        self.lookup = self.ahead = self.replayed = None
        self.recovered = True
        return replay

    def rebuild_rows(self, pace: RebuildPace, step: int) -> int:
        """Number of background rows of the round of repair answered in `step`.

        0 in the first round after a recovery, since all ranks wait for the round.
        """
        return 0 if self.recovered else pace.rows(step)
