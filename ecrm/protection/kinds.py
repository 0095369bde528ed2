"""The protections of a config: the facts about each, known before anything is built.

This file imports nothing heavy. `ecrm/protection/registry.py` builds a protection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

MOST_UNITS = 255
"""Most units of a stripe over GF(2^8)."""

Wrong = tuple[str, tuple[Mapping[str, Any], ...]]
"""A problem in words, and the ways out: config values by key."""


class Settings(Protocol):
    """The keys of a config's section [protection] that a kind reads."""

    @property
    def name(self) -> str:
        """The name of the kind."""

    @property
    def k(self) -> int:
        """Data rows per stripe."""

    @property
    def m(self) -> int:
        """Parity rows per stripe."""

    @property
    def shards_per_server(self) -> int:
        """Shards of each server."""

    @property
    def copies(self) -> int:
        """Copies of every row."""

    @property
    def last_seen_rows(self) -> int:
        """Rows remembered by a rank with slots."""


class Kind:
    """A kind of protection.

    - `name`: the value of protection.name.
    - `meaning`: a sentence for the reference page.
    - `exact`: whether the finished model equals the model of an undisturbed run, after any
      survived failures.
    - `keeps_deltas`: whether updates produce deltas. Without deltas no step can be taken back: a
      failure ends the run, unless the kind `rolls_back` or there are checkpoints.
    - `parity`: whether rows have parity, or copies, compared by scrubbing.
    - `rolls_back`: whether a failure takes all ranks back to files, whatever was lost.
    - `needs_checkpoints`: whether lost rows come back from checkpoints only.
    - `rows_in_files`: whether rows lie in memory-mapped files. A run goes on from these files, and
      needs no checkpoint.
    - `copies_at_slots`: whether ranks with slots keep copies of rows.
    - `any_k`: whether a stripe may have several rows of data.
    """

    name: str
    meaning: str
    exact = True
    keeps_deltas = True
    parity = False
    rolls_back = False
    needs_checkpoints = False
    rows_in_files = False
    copies_at_slots = False
    any_k = False

    def stripes(self, settings: Settings) -> tuple[int, int]:
        """(k, m) of the layout of rows: data and redundancy per stripe."""
        return 1, 0

    def shards_per_server(self, settings: Settings) -> int:
        """The number of shards of a server at the start."""
        return 1

    def survives(self, settings: Settings) -> int:
        """The number of ranks that may die at once without a rollback."""
        return self.stripes(settings)[1]

    def logged(self, settings: Settings) -> int:
        """The number of rows of redundancy with an entry in the undo log, for each updated row."""
        return self.stripes(settings)[1]

    def remembered(self, settings: Settings) -> int:
        """Most rows of each width remembered by a rank with slots."""
        return 0

    def wrong(self, settings: Settings, servers: int, ranks: int) -> Iterator[Wrong]:
        """The problems of a config with so many servers, and so many ranks in all."""
        yield from ()

    def in_words(self, settings: Settings) -> str:
        """Name and numbers, for a report."""
        return self.name


class _Nothing(Kind):
    name = "none"
    meaning = "Nothing is kept. A death ends the run unless there are checkpoints."
    keeps_deltas = False


class _Erasure(Kind):
    name = "erasure"
    meaning = "Reed-Solomon parity over rows and optimizer state."
    parity = True
    any_k = True

    def stripes(self, settings: Settings) -> tuple[int, int]:
        return settings.k, settings.m

    def shards_per_server(self, settings: Settings) -> int:
        return settings.shards_per_server

    def wrong(self, settings: Settings, servers: int, ranks: int) -> Iterator[Wrong]:
        k, m = settings.k, settings.m
        if k + m > MOST_UNITS:
            yield (
                f"protection.k + protection.m = {k + m}: "
                f"at most {MOST_UNITS} units fit a stripe over GF(2^8)",
                ({"protection.k": MOST_UNITS - m},),
            )
        elif k + m > servers:
            yield (
                f"protection.k + protection.m = {k + m} needs at least {k + m} servers, "
                f"cluster.servers is {servers}",
                ({"cluster.servers": k + m}, {"protection.k": servers - m}),
            )

    def in_words(self, settings: Settings) -> str:
        return f"{self.name}, k={settings.k} data and m={settings.m} parity rows per stripe"


class _Chain(Kind):
    name = "chain"
    meaning = "Chain replication: whole copies of every row, updated one after the other."
    parity = True

    def stripes(self, settings: Settings) -> tuple[int, int]:
        return 1, settings.copies - 1

    def wrong(self, settings: Settings, servers: int, ranks: int) -> Iterator[Wrong]:
        if settings.copies > servers:
            yield (
                f"protection.copies = {settings.copies} needs as many servers, "
                f"cluster.servers is {servers}",
                ({"cluster.servers": settings.copies}, {"protection.copies": servers}),
            )

    def in_words(self, settings: Settings) -> str:
        return f"{self.name}, {settings.copies} copies of every row"


class _Replicate(_Chain):
    name = "replicate"
    meaning = "Whole copies of every row, counting those that trainers hold."
    parity = False
    copies_at_slots = True

    def logged(self, settings: Settings) -> int:
        return 0


class _Stateless(Kind):
    name = "stateless"
    meaning = (
        "Training goes on with lost rows as they were last seen, until they come "
        "back from a checkpoint. The model is not exact."
    )
    exact = False
    needs_checkpoints = True

    def survives(self, settings: Settings) -> int:
        return 1  # of two dense replicas

    def remembered(self, settings: Settings) -> int:
        return settings.last_seen_rows

    def wrong(self, settings: Settings, servers: int, ranks: int) -> Iterator[Wrong]:
        if ranks < 2:
            yield (
                "protection.name is stateless, which keeps two dense replicas, "
                "but there is one rank",
                ({"cluster.spares": 1},),
            )


class _Checkpoint(_Nothing):
    name = "checkpoint"
    meaning = "A failure takes all ranks back to the newest checkpoint."
    rolls_back = True
    needs_checkpoints = True


class _Mapped(_Nothing):
    name = "mapped"
    meaning = (
        "Rows live in memory-mapped files. "
        "A failure takes all ranks back to the last commit in them."
    )
    rolls_back = True
    rows_in_files = True


WITH_PARITY = {"protection.name": "erasure"}
"""The way out for a run whose protection cannot do what the run asks for."""

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        _Nothing(),
        _Erasure(),
        _Chain(),
        _Replicate(),
        _Stateless(),
        _Checkpoint(),
        _Mapped(),
    )
}
"""The kinds of protection, by name."""
