"""Where a rank stands when a recovery begins, and where the survivors stand together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ecrm.engine.slot_faults import Fault, together
from ecrm.placement.view import View
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Received, tensors


class Noticed(NamedTuple):
    """Where a rank noticed a death: in which phase of which step, having begun so many steps."""

    step: int
    phase: str
    begun: int


@dataclass(frozen=True)
class Ledger:
    """What one rank, or all of them together, say when a recovery begins.

    - `commits`: how many it has accepted. `view`: its view.
    - `begun`: steps begun since the last commit that may have changed rows.
    - `asks`: whether it asks to stop. `doubts`: whether it doubts its input.
    - `state_lost`: whether it was rolling back, so that it has no state.
    - `dense`: ranks that hold a dense replica, as far as is known.
    - `noticed`: where it noticed that a recovery is needed.
    - `replays`: the step that it can replay if that is next, -1 for none. `told`, by rank: what its
      slots ask of lost shards then.
    - `in_vain`: as in `FailureLog`.
    - `why`, by rank: what failed, where it was seen. `refusals`, by rank: the error with
      which all are to end, its class and its message.
    - `faults`, by rank: how ranks that ran slots have ended, or want to.
    - `seals`: how often all ranks have come through something between steps, as far as it knows.
    """

    commits: int
    view: View
    begun: int
    asks: bool
    doubts: bool
    state_lost: bool
    dense: tuple[int, ...]
    noticed: Noticed
    replays: int = -1
    told: Mapping[int, Sequence[Received]] = field(default_factory=dict)
    in_vain: int = 0
    why: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    faults: Mapping[int, Fault] = field(default_factory=dict)
    seals: int = 0

    @property
    def why_in_words(self) -> str:
        """What failed, by all ranks that have seen it."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self.why.items()))

    def agreed(self, transport: Transport) -> Ledger:
        """Collective: what all survivors say together.

        That is the newest commit, view and seal; the most steps begun since that commit; whether
        any asks, doubts or has lost its state; all holders of a dense replica; where most of those
        who have seen a call fail noticed it, and of equal numbers the lowest rank's; the step that
        all replay, from one view; and all reasons and refusals. Of the counts `in_vain` the lowest
        is right, since that rank has seen the newest commit.
        Raises PeerFailure if a rank died meanwhile: it may have shared something else with others.
        """
        mine = transport.rank
        flags = self.asks, self.doubts, self.state_lost, mine in self.dense
        numbers = torch.tensor(
            [self.commits, self.begun, *flags, self.replays, self.in_vain, self.seals]
        )
        ended = {rank: fault.to_json() for rank, fault in self.faults.items()}
        words = json.dumps(
            [self.noticed, ended, self.why.get(mine, ""), self.refusals.get(mine, "")]
        )
        shared = transport.share(
            [numbers, _to_bytes(self.view.to_json()), _to_bytes(words), *self.told.get(mine, ())]
        )
        if not transport.agree(True):
            raise PeerFailure("a rank died in recovery")
        said = []
        for rank, parts in sorted(shared.items()):
            numbers_said, view, reasons, told = _said(parts)
            commits, begun, asks, doubts, state_lost, holds, replays, in_vain, seals = numbers_said
            noticed, ended, *texts = json.loads(reasons)
            why, refusal = ({rank: text} if text else {} for text in texts)
            said.append(
                Ledger(
                    commits,
                    View.from_json(view),
                    begun,
                    bool(asks),
                    bool(doubts),
                    bool(state_lost),
                    (rank,) if holds else (),
                    Noticed(*noticed),
                    replays,
                    {rank: told},
                    in_vain,
                    why,
                    refusal,
                    {int(of): Fault.from_json(fault) for of, fault in ended.items()},
                    seals,
                )
            )
        replayed = {(ledger.replays, ledger.view.epoch) for ledger in said}
        commits, seen = max(ledger.commits for ledger in said), any(ledger.why for ledger in said)
        noticed = Counter(ledger.noticed for ledger in said if ledger.why or not seen).most_common(
            1
        )[0][0]
        return Ledger(
            commits,
            max((ledger.view for ledger in said), key=lambda view: view.epoch),
            max(ledger.begun for ledger in said if ledger.commits == commits),
            any(ledger.asks for ledger in said),
            any(ledger.doubts for ledger in said),
            any(ledger.state_lost for ledger in said),
            tuple(sorted(rank for ledger in said for rank in ledger.dense)),
            noticed,
            replayed.pop()[0] if len(replayed) == 1 else -1,
            {rank: told for ledger in said for rank, told in ledger.told.items()},
            min(ledger.in_vain for ledger in said),
            {rank: why for ledger in said for rank, why in ledger.why.items()},
            {rank: refusal for ledger in said for rank, refusal in ledger.refusals.items()},
            together((ledger.faults for ledger in said), noticed.step, noticed.phase),
            max(ledger.seals for ledger in said),
        )


def _said(parts: Sequence[Received]) -> tuple[list[int], str, str, Sequence[Received]]:
    """What a rank has shared: numbers, its view, what it has to say, and what its slots ask for."""
    numbers, view, words = tensors(parts[:3])
    return numbers.tolist(), _from_bytes(view), _from_bytes(words), parts[3:]


def _to_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> str:
    return bytes(data.tolist()).decode()
