"""Check whether the disk of a run folder has room for one checkpoint, before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path

from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.engine.dense import DenseReplica
from ecrm.placement.tables import RowSpace
from ecrm.storage.base import state_shapes

MB = 1e6


def free_on_disk(own: CheckpointFolder | None) -> int | None:
    """The free bytes on the disk of a run's checkpoints; `None` without checkpoints.

    Quotas of users and projects are not seen.
    """
    if own is None:
        return None
    there = next(path for path in (own.path, *own.path.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def judge_disk(
    folder: Path | None,
    dense: DenseReplica,
    spaces: Sequence[RowSpace],
    free: Sequence[int | None],
) -> str:
    """A warning, or "", about a checkpoint possibly too large for the disk of `folder`.

    `free` has the bytes free there as seen by each rank, `None` for a run without checkpoints.
    Raises UsageError if the dense parameters alone do not fit. Rows never updated need no room, so
    tables may fit for long.
    """
    there = min((each for each in free if each is not None), default=None)
    if there is None:
        return ""
    certain = sum(value.nbytes for _, value in dense.entries if isinstance(value, Tensor))
    most = certain + sum(map(_row_bytes, spaces))
    numbers = f"{there / MB:,.1f} MB are free in {folder}"
    remedy = "make room there, or name a folder with more room in --run-dir"
    if certain > there:
        raise UsageError(
            f"a checkpoint needs {certain / MB:,.1f} MB or more, and {numbers}: the model could "
            "not be kept",
            otherwise=remedy,
        )
    if most > there:
        return (
            f"once every row is trained a checkpoint needs {most / MB:,.1f} MB, and {numbers}: a "
            f"model without room is not kept; {remedy}"
        )
    return ""


def _row_bytes(space: RowSpace) -> int:
    """Bytes of all rows of a space in a checkpoint: number, row and optimizer state."""
    assert space.optimizer is not None
    state = sum(prod(each) for each in state_shapes(space.optimizer.name, 1, space.dim))
    return space.rows * (8 + 4 * (space.dim + state))
