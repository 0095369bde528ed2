"""What a run will do, from its config and the data's manifest alone: all that can be refused before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ecrm.config import Config
from ecrm.data.dataset_info import check_files, read_manifest, split_rows
from ecrm.errors import UsageError
from ecrm.faults.kill import Kill, check_kills


def plan(config: Config, kills: Sequence[Kill] = (), data_began: int = 0) -> int:
    """Return the number of steps; looks at the manifest and at the sizes of the dataset's files, not into them.

    Passes over the data count from the step `data_began` on, train.steps from the first step of the
    model.

    Raises UsageError where there is no dataset, it is too small for the config, or a kill names a
    rank or step outside the run; DataError where the dataset is damaged.
    """
    path = Path(config.data.path)
    manifest = read_manifest(path)
    check_files(path, manifest)
    train_rows, _ = split_rows(manifest["rows"], config.data.eval_fraction)
    steps = _steps(config, train_rows, data_began)
    check_kills(kills, config.world_size, steps)
    return steps


def _steps(config: Config, train_rows: int, data_began: int) -> int:
    train = config.train
    has = f"{config.data.path} has {train_rows} training rows"
    if train.global_batch > train_rows:
        below = train_rows // config.slots * config.slots
        ways_out = [{"train.global_batch": below}] if below else []
        raise UsageError(
            f"{has}, fewer than train.global_batch, {train.global_batch}",
            *ways_out,
            otherwise="prepare more data",
        )
    steps = train.steps or data_began + int(train.epochs * train_rows) // train.global_batch
    if steps <= (0 if train.steps else data_began):
        least = -(-train.global_batch * 1000 // train_rows)
        least += int(least / 1000 * train_rows) < train.global_batch  # floats round down
        raise UsageError(
            f"{has}: train.epochs={train.epochs} of them is less than one step of train.global_batch={train.global_batch}",
            {"train.epochs": least / 1000},
            otherwise="more",
        )
    return steps
