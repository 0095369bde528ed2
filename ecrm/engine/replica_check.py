"""Check of equal bits on all dense holders: digests of dense parts, and the times to compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from ecrm.base.wording import listed
from ecrm.engine.dense import DenseReplica
from ecrm.transport.base import WORD_BITS, Transport
from ecrm.transport.digests import digest_of, entry_digests, plain
from ecrm.transport.message import tensors

SHARE_OF_A_STEP = 0.005
"""The most that digests may take of the time of a step, on average."""
FIRST_STEPS = 8
"""The first commits are compared at any cost of a digest: most mistakes show in the first steps."""


class ReplicaCheck:
    """The digests of a rank's dense part put into commits, and the choice of commits.

    A rank compares the first commits, and then every step at a multiple of a power of two. Every
    rank chooses the power by a clock of its own: digests take at most SHARE_OF_A_STEP of the time.
    A rank without a digest disturbs no rank. All ranks compare at the common multiples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._done, self._every = clock, 0, 1
        self._step_seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is compared."""
        return self._done < FIRST_STEPS or step % self._every == 0

    def word_if_due(self, dense: DenseReplica, step: int) -> int | None:
        """Bits of the digest for the agreement on a commit, mixed with `step`; `None` if not due.

        Two states with different digests have the same word in 1 step of 8,192 on average.
        """
        if not self.is_due(step):
            return None
        digest = digest_of(self.timed(dense))
        mixed = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), seed=step)
        return mixed >> (64 - WORD_BITS)

    def timed(
        self, dense: DenseReplica, also: Callable[[], object] = lambda: None
    ) -> dict[str, int]:
        """The digests of all entries; calls `also`, and counts the time taken by the two."""
        began = self._clock()
        digests = entry_digests(dense.entries)
        also()
        self._choose(self._clock() - began)
        return digests

    def stepped(self, seconds: float) -> None:
        """Note the seconds of a step. A rare long step, as after an evaluation, counts little."""
        last = self._step_seconds or seconds
        self._step_seconds = last + (min(seconds, 2 * last) - last) / 8

    def _choose(self, seconds: float) -> None:
        self._done += 1
        if self._step_seconds:
            least = seconds / (SHARE_OF_A_STEP * self._step_seconds)
            self._every = 1 << max(0, int(least) - 1).bit_length() if least > 1 else 1


def compare_replicas(
    transport: Transport, entries: Iterable[tuple[str, object]] | None, step: int
) -> str:
    """Collective: the difference of dense parts after `step` steps, in words; "" if equal.

    `entries` are of this rank, `None` without a dense part. The words name ranks and entries.
    Raises PeerFailure as transport calls do.
    """
    named = None if entries is None else dict(entries)
    digests = {} if named is None else entry_digests(named.items())
    whole = torch.tensor(list(digest_of(digests).to_bytes(8, "little")), dtype=torch.uint8)
    said = transport.share([whole] if digests else [])
    if len({bytes(part.tolist()) for parts in said.values() for part in tensors(parts)}) < 2:
        return ""
    words = {
        name: [digest, "" if isinstance(named[name], Tensor) else plain(named[name])]
        for name, digest in digests.items()
        if named is not None
    }
    of_ranks = {rank: heard for rank, heard in transport.gather(words).items() if heard}
    return difference(of_ranks, step)


def difference(of_ranks: Mapping[int, Mapping[str, list[object]]], step: int) -> str:
    """The first rank's difference from the lowest rank's entries, in words; "" if all are equal.

    `of_ranks` are {name: [digest, value in words]}, by rank. Numbers and words come before tensors,
    as the likely cause of differing tensors.
    """
    first = min(of_ranks)
    for rank in sorted(of_ranks):
        ours, theirs = of_ranks[first], of_ranks[rank]
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        names.sort(key=lambda name: not (ours.get(name) or theirs[name])[1])
        if names:
            found = listed(
                [_in_words(name, theirs.get(name), ours.get(name), rank, first) for name in names]
            )
            where = f"the dense part of rank {rank} is not that of rank {first}"
            return f"after step {step} {where}: {found}"
    return ""


def _in_words(
    name: str, theirs: list[object] | None, ours: list[object] | None, rank: int, first: int
) -> str:
    if theirs is None or ours is None:
        return f"{name} is missing on rank {rank if theirs is None else first}"
    if theirs[1] or ours[1]:
        return f"{name} is {theirs[1]} on rank {rank} and {ours[1]} on rank {first}"
    return f"{name} differs"
