"""The input of a step: the results of the rank's slots, and the rows for the next steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from ecrm.engine.dense import SlicedSum
from ecrm.engine.lookup import Bags, Lookup
from ecrm.placement.view import View
from ecrm.protection.pooled import BagValues
from ecrm.protection.routing import DENSE, ENDS, JOIN, NOTE, OVER, SLOT_STATE, STOP, TROUBLE
from ecrm.transport.outbox import Outbox

Rows = Mapping[int, Sequence[Tensor]]
"""Row numbers by slot and row space, int64 [U], unique."""


@dataclass(frozen=True)
class StepInput:
    """Given to `Engine.apply` by every live rank; a rank without slots gives empty mappings.

    - `row_gradients[slot][space]`, float32 [U, dim]: summed gradients of the rows looked up.
    - `contributions[slot]`, float32 [P]: goes to every dense replica, which takes the sum. At least
      one slot of the run has a contribution.
    - `slot_state[slot]`, uint8 [N]: goes whole to every dense replica, for state without a sum.
    - `notes[slot]`, uint8 [N]: goes to the `log` of every dense holder. A note is kept once,
      however often the step is done. Notes and states are of slots with a contribution.
    - `troubles[slot]`: told to all ranks. The hook `troubled` gets the troubles of all slots, on
      every rank, before any change, and may end the run.
    - `skip_troubled`, the same on all ranks: the hook `skipped` is called instead of `troubled`.
      The step changes no row, and dense replicas skip the step.
    - `sit_out`: slots without a change of rows; gradients of these slots hold anything.
    - `over`: slots without a part in the next step. With all slots `over` this step is the last,
      and is committed.
    - `ends_at`: a later step before which training ends, -1 for no end. All ranks learn of the end.
    - `commit`, the same on all ranks: whether to commit the step in any case.
    - `rows_ahead`: the rows of the next `lookup`, given by every rank or by no rank. The requests
      go along, with the requests of a round of repair, and save two exchanges.
    - `rows_soon`: likely the rows of the `lookup` after the next; optional on any rank. With
      `repairs_ahead`, missing rows of `rows_soon` are recovered before a slot has to wait.
    - `bag_gradients[slot][space]`: gradients of the bags of the lookup, where `sums_elsewhere`.
      `row_gradients` are complete all the same.
    - `bags_ahead`: the bags of `rows_ahead`, as for `Engine.find`.
    """

    row_gradients: Mapping[int, Sequence[Tensor]]
    contributions: Mapping[int, Tensor]
    _: KW_ONLY
    slot_state: Mapping[int, Tensor] = field(default_factory=dict)
    notes: Mapping[int, Tensor] = field(default_factory=dict)
    troubles: Mapping[int, str] = field(default_factory=dict)
    skip_troubled: bool = False
    sit_out: Collection[int] = ()
    over: Collection[int] = ()
    ends_at: int = -1
    commit: bool = False
    rows_ahead: Rows | None = None
    rows_soon: Rows | None = None
    bag_gradients: Mapping[int, Mapping[int, BagValues]] = field(default_factory=dict)
    bags_ahead: Bags = field(default_factory=dict)

    def messages(
        self,
        view: View,
        lookup: Lookup,
        ahead: Lookup | None,
        stops: bool,
        ends_at: int,
        admits: bool,
    ) -> Outbox:
        """The messages of this rank's slots in a step's first exchange.

        Row gradients go to shards; slices, notes and states to dense holders; requests of the next
        lookup, `ahead`, to shards. A request to stop, if the rank `stops`, the end of training,
        `ends_at`, the wish to admit ranks, and troubles go to all ranks.
        """
        holders = SlicedSum(view.dense)
        outgoing = lookup.slot_side.gradients(self.row_gradients, self.sit_out, self.bag_gradients)
        for slot, contribution in sorted(self.contributions.items()):
            for holder, part in holders.slices(contribution).items():
                outgoing.add(holder, (DENSE, slot), part)
                # notes and states are not summed: every holder needs the whole tensor
                if slot in self.notes:
                    outgoing.add(holder, (NOTE, slot), self.notes[slot])
                if slot in self.slot_state:
                    outgoing.add(holder, (SLOT_STATE, slot), self.slot_state[slot])
        if ahead is not None:
            outgoing.include(ahead.requests())
        # all ranks must decide alike on a stop, an end and troubles: tell every live rank
        told: list[tuple[tuple[int, ...], Tensor]] = [((STOP,), torch.empty(0))] if stops else []
        told += [((JOIN,), torch.empty(0))] if admits else []
        told += [((OVER, slot), torch.empty(0)) for slot in self.over]
        # repeated by every rank knowing of the end: the first rank to say so may be dead by now
        told += [((ENDS, ends_at), torch.empty(0))] if ends_at >= 0 else []
        for slot, trouble in self.troubles.items():
            words = torch.tensor(list(trouble.encode()), dtype=torch.uint8)
            told.append(((TROUBLE, slot), words))
        for rank in view.live if told else ():
            for head, tensor in told:
                outgoing.add(rank, head, tensor)
        return outgoing
