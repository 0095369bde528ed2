"""What each protection promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.engine.rollback import Durable

ENDS = "the run ends with one message"
ROLLS_BACK = "all go back, and the bits are the undisturbed ones"
GOES_ON = "the run goes on as with fewer"
CHECKPOINT_EVERY = 3


@dataclass(frozen=True)
class Promise:
    """What a protection promises.

    `workload`, `sets`: how the simulated job, and a real run, are given it; `in_words`: what
    messages call it. `survives`: ranks that may die at once without all going back further than the
    commit, `exact` with the undisturbed bits; `beyond`: what one more costs. `redundancy`: bytes
    kept beside the rows that these can be checked against, as a share of theirs; `exactly`: nothing
    else is kept. `logs`: whether it can take back steps since the commit, or keeps a journal for
    that. `checkpoints`: whether they are written; `durable`: what is gone back to; `redone`: steps
    that may be redone then.
    """

    in_words: str
    workload: Mapping[str, Any]
    sets: Mapping[str, Any]
    survives: int = 0
    exact: bool = True
    beyond: str = ENDS
    redundancy: Fraction = Fraction(0)
    exactly: bool = True
    logs: bool = False
    checkpoints: bool = False
    durable: Callable[[Path], Durable] | None = None
    redone: int = 1


def _copies(name: str, copies: int, in_words: str, exactly: bool) -> Promise:
    return Promise(
        in_words=in_words,
        workload={"protection": name, "k": 1, "m": copies - 1},
        sets={"protection.name": name, "protection.copies": copies, "cluster.servers": 4},
        survives=copies - 1,
        redundancy=Fraction(copies - 1),
        exactly=exactly,
        logs=True,
    )


def _erasure(k: int, m: int) -> Promise:
    return Promise(
        in_words=f"erasure k={k} m={m}",
        workload={"protection": "erasure", "k": k, "m": m, "servers": k + m},
        sets={"protection.k": k, "protection.m": m, "cluster.servers": k + m},
        survives=m,
        redundancy=Fraction(m, k),
        logs=True,
    )


PROMISES = {
    "none": Promise(
        "protection none",
        {"protection": "none"},
        {"protection.name": "none"},
    ),
    "checkpoint": Promise(
        in_words="protection checkpoint",
        workload={"protection": "checkpoint"},
        sets={"protection.name": "checkpoint", "checkpoint.every_steps": CHECKPOINT_EVERY},
        beyond=ROLLS_BACK,
        checkpoints=True,
        durable=lambda folder: Restorer(CheckpointFolder(folder)),
        redone=CHECKPOINT_EVERY,
    ),
    "mapped": Promise(
        in_words="protection mapped",
        workload={"protection": "mapped"},
        sets={"protection.name": "mapped"},
        beyond=ROLLS_BACK,
        logs=True,
        durable=lambda folder: Reopened(),
    ),
    "stateless": Promise(
        in_words="stateless parameter servers",
        workload={"protection": "stateless"},
        sets={"protection.name": "stateless", "checkpoint.every_steps": CHECKPOINT_EVERY},
        survives=1,
        exact=False,
        beyond=GOES_ON,
        exactly=False,
        logs=True,
        checkpoints=True,
        durable=lambda folder: Restorer(CheckpointFolder(folder)),
    ),
    "chain 2": _copies("chain", 2, "chain replication, 2 copies", exactly=True),
    "chain 3": _copies("chain", 3, "chain replication, 3 copies", exactly=True),
    "replicate 2": _copies("replicate", 2, "ultralight replication, 2 copies", exactly=False),
    "replicate 3": _copies("replicate", 3, "ultralight replication, 3 copies", exactly=False),
    "erasure (4,1)": _erasure(4, 1),
    "erasure (2,2)": _erasure(2, 2),
}
