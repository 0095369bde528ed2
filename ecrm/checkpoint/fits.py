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
ANEW = "start without --resume"


def identity(config: Config) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on from it: config keys, tables, the data's digests."""
    values = config.to_dict()
    keys = {name: values[name.partition(".")[0]][name.partition(".")[2]] for name in KEYS}
    manifest = read_manifest(Path(config.data.path))
    tables = capped(manifest["tables"], config.model.max_rows_per_table)
    data = {name: record.get("sha256") for name, record in manifest["files"].items()}
    if config.model.dense_arch == "auto":
        keys["model.dense_arch"] = "native"
    return {**keys, "train.slots": config.slots, "tables": tables, "data": {"rows": manifest["rows"], **data}}


def check_fit(checkpoint: Checkpoint, config: Config, steps: int) -> None:
    """Raise UsageError, with what to type, when a config of so many steps cannot go on from a checkpoint."""
    check_identity(checkpoint.path, checkpoint.manifest.identity, config)
    check_steps(checkpoint.path, checkpoint.step, steps)


def check_identity(path: Path, said: dict[str, Any], config: Config) -> None:
    """Raise UsageError, with what to type, where the run at `path`, whose identity was `said`, was of another config or other data."""
    mine = identity(config)
    other = {key: said.get(key) for key in KEYS if said.get(key) != mine[key]}
    if other:
        ours = ", ".join(f"{key}={mine[key]}" for key in other)
        raise UsageError(f"{path} was made with another config than this one, which has {ours}", other, otherwise=ANEW)
    if said["tables"] != mine["tables"]:
        raise UsageError(
            f"{path} has other tables: {tables_that_differ(said['tables'], mine['tables'])}",
            *_caps(config, said["tables"]),
            otherwise=ANEW,
        )
    if said["data"] != mine["data"]:
        raise UsageError(f"{path} was made from other data than {config.data.path}", otherwise=f"set data.path as it was, or {ANEW}")


def check_steps(path: Path, at: int, steps: int) -> None:
    """Raise UsageError where the run at `path` has gone beyond `steps`."""
    if at > steps:
        raise UsageError(f"{path} is at step {at}, this config trains {steps}", {"train.steps": at}, otherwise="more")


def capped(tables: dict[str, int], cap: int) -> dict[str, int]:
    """Rows of tables with model.max_rows_per_table, 0 for none."""
    return {name: min(rows, cap) if cap else rows for name, rows in tables.items()}


def tables_that_differ(theirs: dict[str, int], mine: dict[str, int]) -> str:
    """Table by table, what rows they have."""
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    return ", ".join(f"{name} has {theirs.get(name, 'no')} rows there, {mine.get(name, 'none')} here" for name in names)


def _caps(config: Config, wanted: dict[str, int]) -> list[dict[str, int]]:
    """The model.max_rows_per_table with which a config has the tables `wanted`, if there is one."""
    tables = read_manifest(Path(config.data.path))["tables"]
    caps = [cap for cap in (0, max(wanted.values(), default=0)) if capped(tables, cap) == wanted]
    return [{"model.max_rows_per_table": cap} for cap in caps[:1]]


def plan_resume(given: Path | None, config: Config, steps: int) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints to go on from, newest first, and what is said of others; none without a folder given.

    Looks at manifests and sizes, not into the files. Raises UsageError and DataError as `locate` and `check_fit` do.
    """
    if given is None:
        return [], []
    found, refused = locate(given)
    check_fit(found[0], config, steps)
    return found, refused
