"""The protections that bench_protections.py compares, and how often checkpoints come.

A protection more is one entry of CONTENDERS.

The papers write checkpoints every 30 or 60 minutes of runs that take hours. What such an interval
costs is the ratio of the interval to the seconds that a checkpoint takes, and that ratio is kept
here: PAPER says what it rests on. Of ECRec's public experiment configuration are the rows (Criteo
Terabyte's 197,767,405, times 8 in the largest model, Criteo-8S), their width (128 floats) and the
servers (5); a float of optimizer state for each float of a row is what a momentum or full Adagrad
optimizer keeps. How fast a server writes was not published: 10 Gbit/s is assumed
(`--storage-gbit`). So a checkpoint of 324 GB per server takes 259 s, and 30 minutes are 6.9 such
times, 60 minutes 13.9. The same multiples of the time that a checkpoint takes here, which is
measured, are the intervals here. So what synchronous checkpoints cost without failures, 1/6.9 and
1/13.9, is fixed by that assumption; with tables half as large it is half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ecrm.protection.kinds import KINDS, Kind


@dataclass(frozen=True)
class Contender:
    """One protection and its numbers.

    `sets` are config keys. `minutes`: the papers' interval between checkpoints that is to be scaled
    to this run, 0 for no checkpoints. `survives`: whether a run in which a server dies comes to its
    end. `sweep`: compared with erasure-k4 only, on embedding-heavy. `timeline`: shown in the figure
    of throughput around a kill. `redundancy`: bytes kept beside each byte of a row in other ranks'
    memory.
    """

    sets: Mapping[str, Any]
    minutes: int = 0
    survives: bool = True
    sweep: bool = False
    timeline: bool = False
    redundancy: float = 0.0

    @property
    def kind(self) -> Kind:
        """The kind of protection."""
        return KINDS[self.sets["protection.name"]]

    @property
    def in_background(self) -> bool:
        """Whether its checkpoints are written beside the steps."""
        return self.sets.get("checkpoint.mode") == "async"


def _checkpoint(minutes: int, mode: str) -> Contender:
    return Contender(
        {"protection.name": "checkpoint", "checkpoint.mode": mode}, minutes, timeline=minutes == 30
    )


def _erasure(k: int, sweep: bool = False, timeline: bool = False, **more: Any) -> Contender:
    sets = {
        "protection.name": "erasure",
        "protection.k": k,
        "protection.m": 1,
        **{f"protection.{key}": value for key, value in more.items()},
    }
    return Contender(sets, sweep=sweep, timeline=timeline, redundancy=1 / k)


def _copies(name: str, copies: int) -> Contender:
    return Contender(
        {"protection.name": name, "protection.copies": copies},
        timeline=copies == 2,
        redundancy=copies - 1,
    )


FULL_EVERY = 8
"""Of incremental checkpoints so many form a chain that begins with a full one."""

REBUILD_ROWS = {"dense-heavy": 4096, "embedding-heavy": 4096, "criteo": 1024}
"""protection.rebuild_rows_per_step by regime: a longer step has time for more rows.

The sweep sets its own.
"""

CONTENDERS = {
    "none": Contender({"protection.name": "none"}, survives=False),
    "erasure-k2": _erasure(2),
    "erasure-k4": _erasure(4, timeline=True),
    "none-commit-16": Contender(
        {"protection.name": "none", "protection.commit_interval": 16}, survives=False
    ),
    "erasure-k4-commit-16": _erasure(4, commit_interval=16),
    "chain-2": _copies("chain", 2),
    "chain-3": _copies("chain", 3),
    "replicate-2": _copies("replicate", 2),
    "replicate-3": _copies("replicate", 3),
    "checkpoint-30-sync": _checkpoint(30, "sync"),
    "checkpoint-60-sync": _checkpoint(60, "sync"),
    "checkpoint-30-async": _checkpoint(30, "async"),
    "checkpoint-60-async": _checkpoint(60, "async"),
    "checkpoint-30-incremental": Contender(
        {
            "protection.name": "checkpoint",
            "checkpoint.mode": "async",
            "checkpoint.kind": "incremental",
            "checkpoint.full_every": FULL_EVERY,
        },
        minutes=30,
    ),
    "stateless-30": Contender(
        {"protection.name": "stateless", "checkpoint.mode": "sync"}, minutes=30, timeline=True
    ),
    "mapped-none": Contender({"protection.name": "mapped", "mapped.flush": "none"}, timeline=True),
    "mapped-commit": Contender({"protection.name": "mapped", "mapped.flush": "commit"}),
    **{
        f"erasure-k4-rebuild-{rows}": _erasure(4, sweep=True, rebuild_rows_per_step=rows)
        for rows in (1024, 16384, 65536)
    },
}
SMOKE = (
    "none",
    "erasure-k2",
    "chain-2",
    "replicate-2",
    "checkpoint-30-sync",
    "checkpoint-30-async",
    "checkpoint-30-incremental",
    "stateless-30",
    "mapped-none",
)

SHORT = (
    "none",
    "erasure-k4",
    "none-commit-16",
    "erasure-k4-commit-16",
    "chain-2",
    "replicate-2",
    "checkpoint-30-sync",
    "checkpoint-30-incremental",
    "stateless-30",
    "mapped-none",
)
"""Those in the short table of docs/benchmarks/protections.md."""


@dataclass(frozen=True)
class Setting:
    """Tables of `rows` of `row_bytes` with optimizer state over `servers`.

    Each server writes `storage_gbit` Gbit/s.
    """

    rows: int
    row_bytes: int
    servers: int
    storage_gbit: float

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds in which all servers together write everything once."""
        return self.rows * self.row_bytes / self.servers / (self.storage_gbit * 1e9 / 8)

    def checkpoints_per_interval(self, minutes: float) -> float:
        """How many times a checkpoint could be written within an interval."""
        return 60 * minutes / self.checkpoint_seconds


PAPER = Setting(rows=8 * 197_767_405, row_bytes=2 * 128 * 4, servers=5, storage_gbit=10.0)


def interval_steps(
    setting: Setting, minutes: float, checkpoint_seconds: float, step_seconds: float
) -> int:
    """Steps between checkpoints, at least 1.

    The interval is as many times a checkpoint's seconds as in `setting`.
    """
    return max(
        1, round(setting.checkpoints_per_interval(minutes) * checkpoint_seconds / step_seconds)
    )
