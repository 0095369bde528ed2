"""The state of a rank at the beginning of a recovery, and the joint state of the survivors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ecrm.placement.view import View
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Received, json_part, of_json_part, tensors

_DOING = "others told of their state"


class Noticed(NamedTuple):
    """Step and phase of a rank on noticing a death, and the number of steps `begun` by then."""

    step: int
    phase: str
    begun: int


@dataclass(frozen=True)
class Ledger:
    """The report of a rank, or of all ranks together, at the beginning of a recovery.

    - `commits`: number of commits accepted. `view`: the view of the rank.
    - `begun`: steps begun since the last commit, perhaps with changed rows.
    - `asks`: whether the rank asks to stop.
    - `state_lost`: whether the rank was rolling back, and has no state.
    - `dense`: ranks known to hold a dense replica.
    - `noticed`: step and phase of noticing the failure.
    - `replays`: the step for the rank to replay, if next; -1 for no step. `told`, by rank: requests
      of the rank's slots to lost shards for the replay.
    - `futile`: as in `FailureLog`.
    - `newcomers`: ranks that have just joined, without any state. `newest`: other ranks with the
      newest commit.
    - `why`, by rank: the failure seen, in words. `refusals`, by rank: class and message of the
      error to end all ranks with.
    - `findings`, by rank: a text for the inquest of all ranks, carried unread.
    """

    commits: int
    view: View
    begun: int
    asks: bool
    state_lost: bool
    dense: tuple[int, ...]
    noticed: Noticed
    replays: int = -1
    told: Mapping[int, Sequence[Received]] = field(default_factory=dict)
    futile: int = 0
    why: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    findings: Mapping[int, str] = field(default_factory=dict)
    newcomers: tuple[int, ...] = ()
    newest: tuple[int, ...] = ()

    @property
    def why_in_words(self) -> str:
        """The failures seen, with the ranks, in words."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self.why.items()))

    def agreed(self, transport: Transport) -> Ledger:
        """Collective: the joint ledger of all survivors.

        The newest commit and view of ranks with rows; the most steps begun since that commit;
        whether any rank asks or has lost state; all dense holders; the place noticed by
        most ranks with a failed call, of equal numbers the lowest rank's; the step replayed by all
        ranks from a common view, or -1; all reasons, refusals and findings. The lowest `futile` is
        right, from a rank with the newest commit.
        Raises PeerFailure if a rank died meanwhile: the dead rank may have told the survivors
        different things.
        """
        mine = transport.rank
        flags = self.asks, self.state_lost, mine in self.dense, mine in self.newcomers
        # in a broken recovery a newcomer may have learned of a commit and a view that no rank with
        # rows knows: the rank that told has died
        commits, epoch = (-1, -1) if mine in self.newcomers else (self.commits, self.view.epoch)
        numbers = torch.tensor([commits, self.begun, *flags, self.replays, self.futile, epoch])
        texts = [by_rank.get(mine, "") for by_rank in (self.why, self.refusals, self.findings)]
        words = json_part([self.noticed, *texts])
        shared = transport.share([numbers, words, *self.told.get(mine, ())])
        if any(isinstance(parts[0], tuple) for parts in shared.values()):
            raise PeerFailure("a rank was still at the start")  # and has learned of the engines now
        transport.barrier(_DOING)  # until then, survivors may hold different ledgers
        heard = {rank: _said(parts) for rank, parts in sorted(shared.items())}
        epochs = {rank: numbers_said[-1] for rank, (numbers_said, *_) in heard.items()}
        newest = self._newest_view(transport, epochs)
        said = []
        for rank, (numbers_said, reasons, told) in heard.items():
            commits, begun, asks, state_lost, holds, new, replays, futile, _ = numbers_said
            noticed, *texts = reasons
            why, refusal, found = ({rank: text} if text else {} for text in texts)
            said.append(
                Ledger(
                    commits,
                    newest,
                    begun,
                    bool(asks),
                    bool(state_lost),
                    (rank,) if holds else (),
                    Noticed(*noticed),
                    replays,
                    {rank: told},
                    futile,
                    why,
                    refusal,
                    found,
                    (rank,) if new else (),
                )
            )
        replayed = {
            (ledger.replays, epoch) for ledger, epoch in zip(said, epochs.values(), strict=True)
        }
        commits, seen = max(ledger.commits for ledger in said), any(ledger.why for ledger in said)
        noticed = Counter(
            ledger.noticed for ledger in said if (ledger.why or not seen) and not ledger.newcomers
        ).most_common(1)
        return Ledger(
            commits,
            newest,
            max(ledger.begun for ledger in said if ledger.commits == commits),
            any(ledger.asks for ledger in said),
            any(ledger.state_lost for ledger in said),
            tuple(sorted(rank for ledger in said for rank in ledger.dense)),
            noticed[0][0] if noticed else self.noticed,
            replayed.pop()[0] if len(replayed) == 1 else -1,
            {rank: told for ledger in said for rank, told in ledger.told.items()},
            min((ledger.futile for ledger in said if not ledger.newcomers), default=0),
            {rank: why for ledger in said for rank, why in ledger.why.items()},
            {rank: refusal for ledger in said for rank, refusal in ledger.refusals.items()},
            {rank: text for ledger in said for rank, text in ledger.findings.items()},
            tuple(rank for ledger in said for rank in ledger.newcomers),
            tuple(
                rank
                for rank, ledger in zip(heard, said, strict=True)
                if ledger.commits == commits and not ledger.newcomers
            ),
        )

    def _newest_view(self, transport: Transport, epochs: Mapping[int, int]) -> View:
        """Collective: the view of the newest of `epochs`, by rank.

        Views of one epoch are equal. So a view, 24 KB for a thousand ranks, is shared only with
        ranks that have missed a recovery.
        """
        newest = max(epochs.values())
        if all(epoch == newest for epoch in epochs.values()):
            return self.view
        first = min(rank for rank, epoch in epochs.items() if epoch == newest)
        text = self.view.to_json() if transport.rank == first else ""
        shared = transport.share([json_part(text)])
        transport.barrier(_DOING)
        return View.from_json(of_json_part(shared[first][0]))


def _said(parts: Sequence[Received]) -> tuple[list[int], list[Any], Sequence[Received]]:
    """The parts shared by a rank: numbers, words, and requests of slots."""
    return tensors(parts[:1])[0].tolist(), of_json_part(parts[1]), parts[2:]
