"""Check whether the disk of a run folder has room for the checkpoints, before the first step."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path

from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.config.schema import Config
from ecrm.engine.dense import DenseReplica
from ecrm.placement.tables import RowSpace
from ecrm.storage.base import state_shapes

MB = 1e6


def free_on_disk(own: CheckpointFolder | None) -> int | None:
    """The bytes for a run's checkpoints on their disk; `None` without checkpoints.

    These are free bytes, and bytes of earlier checkpoints of the run, which make room for later
    checkpoints. Quotas of users and projects are not seen.
    """
    if own is None:
        return None
    there = next(path for path in (own.path, *own.path.absolute().parents) if path.exists())
    held = 0
    for file in own.path.rglob("*"):
        with contextlib.suppress(OSError):  # an earlier start may still be removing files
            held += file.lstat().st_blocks * 512
    return shutil.disk_usage(there).free + held


def most_at_once(config: Config, steps: int, keeps_best: bool = False) -> int:
    """The number of full checkpoints on the disk at once, at most, in a run of `steps` steps.

    checkpoint.keep of them are complete while the next one is written. Not counted are incremental
    checkpoints, and full checkpoints kept for their sake. `keeps_best`: a script keeps
    the best model, as checkpoint.keep_best does for a config.
    """
    checkpoint = config.checkpoint
    best = int(keeps_best or checkpoint.keep_best != "none")
    if checkpoint.every_minutes:
        periodic = checkpoint.keep + 1
    elif checkpoint.every_steps:
        periodic = min(checkpoint.keep + 1, -(-steps // checkpoint.every_steps))
    else:
        periodic = 1
    return max(periodic, 1) + best


def judge_disk(
    folder: Path | None,
    dense: DenseReplica,
    spaces: Sequence[RowSpace],
    free: Sequence[int | None],
    at_once: int = 1,
) -> str:
    """A warning, or "", about checkpoints possibly too large for the disk of `folder`.

    `free` has the bytes for checkpoints there as seen by each rank, `None` for a run without
    checkpoints. `at_once` is the number of full checkpoints on the disk at once, at most. Raises
    UsageError if the dense parameters alone do not fit. Rows never updated need no room, so tables
    may fit for long.
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
    if at_once * most > there:
        return (
            f"once every row is trained {at_once} checkpoints at once need "
            f"{at_once * most / MB:,.1f} MB, and {numbers}: {remedy}"
            + (", or set a lower checkpoint.keep" if at_once > 2 else "")
        )
    return ""


def _row_bytes(space: RowSpace) -> int:
    """Bytes of all rows of a space in a checkpoint: number, row and optimizer state."""
    assert space.optimizer is not None
    state = sum(prod(each) for each in state_shapes(space.optimizer.name, 1, space.dim))
    return space.rows * (8 + 4 * (space.dim + state))
