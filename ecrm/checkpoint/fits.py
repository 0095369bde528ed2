"""Whether a checkpoint belongs to a config and its data: all that the bits of the model depend on must be the same. Light: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.config.schema import Config
from ecrm.data.manifest import read_manifest
from ecrm.errors import UsageError

KEYS = (
    "data.eval_fraction", "model.embedding_dim", "model.bottom_mlp", "model.top_mlp", "model.dense_arch", "train.global_batch", "train.slots",
    "train.seed", "train.sparse_optimizer", "train.sparse_lr", "train.sparse_eps", "train.dense_optimizer", "train.dense_lr",
)  # fmt: skip


def identity(config: Config) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on from it: config keys, tables, the data's digests."""
    values = config.to_dict()
    keys = {name: values[name.partition(".")[0]][name.partition(".")[2]] for name in KEYS}
    manifest = read_manifest(Path(config.data.path))
    cap = config.model.max_rows_per_table
    tables = {name: min(rows, cap) if cap else rows for name, rows in manifest["tables"].items()}
    data = {name: record.get("sha256") for name, record in manifest["files"].items()}
    if config.model.dense_arch == "auto":
        keys["model.dense_arch"] = "native"
    return {**keys, "train.slots": config.slots, "tables": tables, "data": {"rows": manifest["rows"], **data}}


def check_fit(checkpoint: Checkpoint, config: Config, steps: int) -> None:
    """Raise UsageError, with what to type, when a config of so many steps cannot go on from a checkpoint."""
    said, mine = checkpoint.manifest.identity, identity(config)
    for key in KEYS:
        if said.get(key) != mine[key]:
            raise UsageError(
                f"{checkpoint.path} was made with {key}={_typed(said.get(key))}, this config has {_typed(mine[key])}: "
                f"set {key}={_typed(said.get(key))}, or start without --resume"
            )
    for name, rows in mine["tables"].items():
        if (before := said.get("tables", {}).get(name)) != rows:
            raise UsageError(
                f"{checkpoint.path} has a table {name} of {before} rows, this config one of {rows}: "
                "set data.path and model.max_rows_per_table as they were, or start without --resume"
            )
    if said.get("data") != mine["data"]:
        raise UsageError(
            f"{checkpoint.path} was made from other data than {config.data.path}: set data.path as it was, or start without --resume"
        )
    if checkpoint.step > steps:
        raise UsageError(
            f"{checkpoint.path} is at step {checkpoint.step}, this config trains {steps}: set train.steps={checkpoint.step} or more"
        )


def plan_resume(given: Path | None, config: Config, steps: int) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints to go on from, newest first, and what is said of others; none without a folder given.

    Looks at manifests and sizes, not into the files. Raises UsageError and DataError as `locate` and `check_fit` do.
    """
    if given is None:
        return [], []
    found, refused = locate(given)
    check_fit(found[0], config, steps)
    return found, refused


def _typed(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
