"""Digests of the rows asked for in steps perhaps done again, to notice a change.

A slot's batch depends on step and slot alone. Code of a script may break the rule without a word,
as with a generator of random numbers in a dataset. After a failure the slot then asks for different
rows, and the model changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ecrm.placement.stripes import RowLayout
from ecrm.protection.routing import COMPUTED, MARK, ROWS
from ecrm.transport.digests import digest_at, tensor_digest
from ecrm.transport.inbox import Groups
from ecrm.transport.message import Received, in_groups

_Known = dict[tuple[int, ...], int]
"""Digests by (slot, shard, space), of rows, and by (slot,), of batches."""


class AskedBefore:
    """Digests of the rows asked of this rank by slots, and of the slots' batches, by step."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._drawn: dict[tuple[int, int], int] = {}
        self._layouts: Sequence[RowLayout] = ()

    def drew(self, step: int, slot: int, digest: int) -> str:
        """Note the batch of a slot in a step, drawn on this rank.

        `digest`, 63 bits, is of the content. Returns the change since before, in words, or "".
        """
        same = self._drawn.setdefault((step, slot), digest) == digest
        return "" if same else _changed(step, slot, "has another batch")

    def marks(self, step: int) -> dict[int, int]:
        """The digests of this rank's batches for a step, by slot."""
        return {slot: digest for (at, slot), digest in self._drawn.items() if at == step}

    def forget(self, before: int) -> None:
        """Drop all digests of steps below `before`, not to be done again."""
        self._known = {step: known for step, known in self._known.items() if step >= before}
        self._drawn = {at: digest for at, digest in self._drawn.items() if at[0] >= before}

    def problem(
        self,
        step: int,
        requests: Mapping[int, Sequence[Received]],
        layouts: Sequence[RowLayout],
    ) -> str:
        """Note the requests of ranks in a step; return the first change, in words, or "".

        Local rows are not comparable over different `layouts`: new `layouts` drop all earlier
        digests of rows and received batches.
        """
        if layouts is not self._layouts:
            self._layouts, self._known = layouts, {}
        known = self._known.setdefault(step, {})
        for head, digest_of_rows in _with_digests(requests):
            if head[0] == MARK:
                key, digest, words = head[1:2], head[2], "has another batch"
            elif head[0] in (ROWS, COMPUTED):
                key, digest, words = head[1:], digest_of_rows(), "asks for other rows"
            else:
                continue
            if known.setdefault(key, digest) != digest:
                return _changed(step, key[0], words)
        return ""


def _with_digests(
    requests: Mapping[int, Sequence[Received]],
) -> Iterator[tuple[tuple[int, ...], Callable[[], int]]]:
    """The head of each group, and a function for the digest of the group's rows."""
    if isinstance(requests, Groups):
        words = requests.words
        ours = np.isin(words[:, 0], (MARK, ROWS, COMPUTED))
        numbers = requests.among(words[:, 0] != MARK).numbers()
        if ours.all() and numbers is not None:
            rows = iter(zip(numbers.addresses.tolist(), numbers.counts.tolist()))
            for kind, *key in words.tolist():
                at = (0, 0) if kind == MARK else next(rows)
                yield (kind, *key), partial(digest_at, *at)
            return
    for parts in requests.values():
        for head, rows_asked in in_groups(parts, 2):
            yield head, partial(tensor_digest, rows_asked)


def _changed(step: int, slot: int, words: str) -> str:
    return (
        f"step {step}, slot {slot}: the slot {words} than before a failure: let its batch depend "
        "on step and slot alone, without generators, counters or files of a process"
    )
