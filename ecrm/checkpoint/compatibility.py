"""Whether a checkpoint fits a config and its data; the allowed changes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrm.base import version_set
from ecrm.base.errors import UsageError
from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.checkpoint.manifest import as_a_run_writes
from ecrm.checkpoint.trained import Trained
from ecrm.config.schema import Config
from ecrm.data.described import describe

MODEL = (
    "model.architecture",
    "model.embedding_dim",
    "model.bottom_mlp",
    "model.top_mlp",
    "model.cross_layers",
    "model.cross_rank",
    "model.user_columns",
)
"""Keys that decide the shapes of weights."""
KEPT = (
    *MODEL,
    "model.dense_arch",
    "train.global_batch",
    "train.slots",
    "train.seed",
    "train.sparse_optimizer",
    "train.sparse_eps",
    "train.dense_optimizer",
)
"""Keys kept when a run goes on: they decide tables, model and optimizer state."""
HELD_OUT = "data.eval_fraction"
"""May change only with the data: else held-out rows would be trained on, or the reverse."""
MAY_CHANGE = ("train.sparse_lr", "train.dense_lr", HELD_OUT)
"""Keys that may change when a run goes on, and then change the bits of later training."""
TOLD = ("train.steps", "train.epochs", "train.eval_every_steps", "data.path")
"""Keys without influence on bits; recorded to report changes."""
ON = "trained_on"
"""Key of an identity: the GPU that decides the bits of the dense part, in words.

Without the key the dense part was trained on the CPU.
"""
DENSE = "dense"
"""Key of an identity: the dense part is a module's state. Versions up to 0.2.0 lack the key."""
VERSIONS = "versions"
"""Key of an identity: the set of versions for which equal bits are promised."""
COLUMNS = "columns"
"""Key of an identity: the columns and vocabularies of a prepared table."""
WIRE, FLOAT32 = "wire_dtype", "float32"
"""Key of an identity: the dtype of rows and gradients between ranks, absent for float32."""
ANEW = "start without --resume"
SAME_COLUMNS = (
    "prepare the files with the schema of the table before and --vocabularies with its folder"
)


def identity(
    config: Config, data_began: int = 0, began_as: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The identity of a run: config keys, tables, digests of the data, and the run's beginning.

    `data_began` is the step at which the data began. `began_as` has the seed of the initial rows,
    and the checksum of the checkpoint whose weights the run began with (None without a checkpoint).
    """
    values = config.to_dict()

    def of(keys: tuple[str, ...]) -> dict[str, Any]:
        return {name: values[name.partition(".")[0]][name.partition(".")[2]] for name in keys}

    data = describe(config.data.path, config.data.eval_fraction)
    keys = of((*KEPT, *MAY_CHANGE))
    return {
        **keys,
        "model.dense_arch": config.model.interaction,
        "train.slots": config.slots,
        "tables": capped(data.tables, config.model.max_rows_per_table),
        COLUMNS: data.layout,
        VERSIONS: version_set.version_set(),
        **({} if config.train.wire_dtype == FLOAT32 else {WIRE: config.train.wire_dtype}),
        "data": {"rows": data.rows, **data.sums},
        "data_began": data_began,
        DENSE: "module",
        **(began_as or begun_as(keys)),
        "told": of(TOLD),
    }


def on_gpu(said: str) -> dict[str, Any]:
    """The part of an identity for a dense part trained on a GPU; empty if `said` is "", the CPU."""
    return {ON: said} if said else {}


def check_versions(path: Path, said: dict[str, Any], mine: dict[str, Any], allowed: bool) -> None:
    """Raise UsageError if the run at `path` had another set of versions, unless `allowed`.

    A run of a version without the key, 0.2.0 or before, has an unknown set, and is not refused.
    """
    if not allowed and (changed := versions_changed(said, mine)):
        raise UsageError(
            f"{path}: {changed[0]}: bits are equal within one set",
            {"train.other_versions": True},
            otherwise="install the versions as they were",
        )


def versions_changed(said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """One line if the set of versions was another one, else nothing."""
    before, now = said.get(VERSIONS), mine[VERSIONS]
    if before is None or before == now:
        return []
    names = [version_set.name_of(versions) for versions in (before, now)]
    return [f"versions {' -> '.join(names)} ({version_set.differing(before, now)})"]


def device_changed(said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """One line if the dense part was trained on another device than now, else nothing."""
    before, now = said.get(ON, "the CPU"), mine.get(ON, "the CPU")
    if before == now:
        return []
    return [f"the model is trained on {before} -> {now}: other bits from here on"]


def begun_as(said: dict[str, Any]) -> dict[str, Any]:
    """The part of an identity about the beginning of the run."""
    return {
        "rows_seed": said.get("rows_seed", said.get("train.seed")),
        "init_from": said.get("init_from"),
    }


def same_bits(said: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether runs of two identities go on to the same bits from the same step."""

    def bits(of: dict[str, Any]) -> dict[str, Any]:
        return {"data_began": 0, **of, **begun_as(of), "told": None}

    return bits(said) == bits(mine)


def check_identity(path: Path, said: dict[str, Any], config: Config) -> None:
    """Raise UsageError, with the keys to set, if the run at `path` had other tables or model.

    `said` is the identity of the run at `path`.
    """
    _check_that_it_is_of_a_config(path, said)
    mine = identity(config)
    kept = KEPT if said["data"] != mine["data"] else (*KEPT, HELD_OUT)
    other = {key: said.get(key) for key in kept if said.get(key) != mine[key]}
    if (wire := said.get(WIRE, FLOAT32)) != config.train.wire_dtype:
        other["train.wire_dtype"] = wire
        mine = {**mine, "train.wire_dtype": config.train.wire_dtype}
    if other:
        ours = ", ".join(f"{key}={mine[key]}" for key in other)
        raise UsageError(
            f"{path} was made with another config than this one, which has {ours}",
            other,
            otherwise=ANEW,
        )
    if said["tables"] != mine["tables"]:
        raise UsageError(
            f"{path} has other tables: {tables_that_differ(said['tables'], mine['tables'])}",
            *_caps(config, said["tables"]),
            otherwise=ANEW,
        )
    if said[COLUMNS] != mine[COLUMNS]:
        raise UsageError(
            f"{path} was trained with {columns_that_differ(said[COLUMNS], mine[COLUMNS])}",
            otherwise=f"{SAME_COLUMNS}, or {ANEW}",
        )


def check_data(path: Path, said: dict[str, Any], config: Config) -> None:
    """Raise UsageError, with advice, unless the mapped files at `path` have this config's data.

    `said` is the identity of the run at `path`.
    """
    if said["data"] != identity(config)["data"]:
        raise UsageError(
            f"{path} was made from other data than {config.data.path}, "
            "and mapped files go on with their own: set data.path as it was, "
            f"go on from a checkpoint, or {ANEW}"
        )


def _check_that_it_is_of_a_config(path: Path, said: dict[str, Any]) -> None:
    if "data" not in said:
        raise UsageError(f"{path} is of the model of a script: start that script, or {ANEW}")
    if DENSE not in said:
        raise UsageError(
            f"{path} was written by ecrm 0.2.0 or before, with another layout of the dense part",
            otherwise=f"go on with ecrm 0.2.0, or {ANEW}",
        )


def check_init(path: Path, said: dict[str, Any], config: Config) -> None:
    """Raise UsageError, with the keys to set, if weights do not fit a config's model and tables.

    `said` is the identity of the run at `path`, which trained the weights.
    """
    _check_that_it_is_of_a_config(path, said)
    mine = identity(config)
    other = {key: said[key] for key in MODEL if said[key] != mine[key]}
    if other:
        ours = ", ".join(f"{key}={mine[key]}" for key in other)
        raise UsageError(
            f"--init-from {path}: the weights are of another model than this config's, "
            f"which has {ours}",
            other,
        )
    if said["tables"] != mine["tables"]:
        raise UsageError(
            f"--init-from {path}: other tables: "
            f"{tables_that_differ(said['tables'], mine['tables'])}",
            *_caps(config, said["tables"]),
            otherwise="name data with these tables",
        )
    if said[COLUMNS] != mine[COLUMNS]:
        raise UsageError(
            f"--init-from {path}: the weights were trained with "
            f"{columns_that_differ(said[COLUMNS], mine[COLUMNS])}",
            otherwise=SAME_COLUMNS,
        )


def changes(said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """One line for each difference between a run and the run before.

    `mine` is the identity of the run, `said` the identity of the run before.
    """
    before, now = {**said, **said.get("told", {})}, {**mine, **mine["told"]}
    path = before.pop("data.path", "")
    lines = [
        f"{key} {before[key]} -> {now[key]}"
        for key in (*MAY_CHANGE, *TOLD)
        if key in before and before[key] != now[key]
    ]
    if said["data"] != mine["data"]:
        rows, new = said["data"]["rows"], mine["data"]["rows"]
        lines.append(
            f"data.path {path} -> {now['data.path']}: {rows:,} -> {new:,} rows, "
            "from the first of them"
        )
    return [*lines, *device_changed(said, mine), *versions_changed(said, mine)]


def check_steps(path: Path, at: int, steps: int, of_script: bool = False) -> None:
    """Raise UsageError if the run at `path` has gone beyond `steps`.

    `of_script`: the steps are the steps of a script.
    """
    if at > steps and of_script:
        raise UsageError(
            f"{path} is at step {at}, this script trains {steps}",
            otherwise=f"have session.steps train {at} or more",
        )
    if at > steps:
        raise UsageError(
            f"{path} is at step {at}, this config trains {steps}",
            {"train.steps": at},
            otherwise="more",
        )


def capped(tables: Mapping[str, int], cap: int) -> dict[str, int]:
    """Rows of tables under model.max_rows_per_table; 0 means no cap."""
    return {name: min(rows, cap) if cap else rows for name, rows in tables.items()}


def tables_that_differ(theirs: dict[str, int], mine: dict[str, int]) -> str:
    """The rows of every table that differs, in words."""
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    return ", ".join(
        f"{name} has {theirs.get(name, 'no')} rows there, {mine.get(name, 'none')} here"
        for name in names
    )


def columns_that_differ(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The first difference of the columns of two prepared tables, in words."""
    parts = {"features": "features", "dense": "dense columns", "vocabularies": "vocabularies"}
    for part, word in parts.items():
        if theirs.get(part) != mine.get(part):
            return f"other {word} than those of data.path"
    return "data of another kind than data.path has"


def _caps(config: Config, wanted: dict[str, int]) -> list[dict[str, int]]:
    """The model.max_rows_per_table that gives a config the tables `wanted`; empty without any."""
    tables = describe(config.data.path, config.data.eval_fraction).tables
    caps = [cap for cap in (0, max(wanted.values(), default=0)) if capped(tables, cap) == wanted]
    return [{"model.max_rows_per_table": cap} for cap in caps[:1]]


def plan_resume(given: Path | None, trained: Trained) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints to go on from, newest first, and the reasons for not using the rest.

    Without a folder given, both lists are empty. After a change of the training, only the newest
    checkpoint is used: from an older checkpoint, steps would be repeated differently. Looks at
    manifests and sizes, not into the files. Raises UsageError and DataError as `locate` and
    `check_identity` do.
    """
    if given is None:
        return [], []
    found, refused = locate(given)
    said = found[0].manifest.identity
    with as_a_run_writes(found[0].path):
        trained.check_identity(found[0].path, said)
        mine = trained.identity(trained.began(found[0]), begun_as(said))
    return [
        found[0],
        *(other for other in found[1:] if same_bits(other.manifest.identity, mine)),
    ], refused


def began(checkpoint: Checkpoint, config: Config) -> int:
    """The step at which the data of a config begins, in a run that goes on from a checkpoint.

    The result is the step of the checkpoint, unless config and checkpoint have the same data and
    the same held-out share: then the data began as recorded in the checkpoint.
    """
    said, mine = checkpoint.manifest.identity, identity(config)
    same = said["data"] == mine["data"] and said[HELD_OUT] == mine[HELD_OUT]
    return said.get("data_began", 0) if same else checkpoint.step
