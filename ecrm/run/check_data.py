"""Whether a dataset fits a config, before any process starts. Imports no torch."""

from __future__ import annotations

from difflib import get_close_matches

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted, listed
from ecrm.config.schema import Config, DataConfig
from ecrm.data.described import Described


def check_data(config: Config, data: Described) -> None:
    """Raise UsageError, with what to type, unless the config can train from the dataset."""
    if data.is_table:
        _check_split(config, data)
    if not data.binary:
        raise UsageError(
            f"{config.data.path}: some labels are neither 0 nor 1, and a config trains a "
            "probability",
            otherwise='type above = NUMBER or equals = "TEXT" for the label in the schema, and '
            "prepare the files again; a script of your own trains on any label",
        )
    if config.model.architecture == "two_tower":
        _check_towers(config, data)


def _check_split(config: Config, data: Described) -> None:
    share = config.data.eval_fraction
    if share != DataConfig.eval_fraction:
        raise UsageError(
            f"data.eval_fraction is {share}, but {config.data.path} is a prepared table with "
            f"{counted(data.rows - data.train_rows, 'held-out row')} of its own",
            {"data.eval_fraction": DataConfig.eval_fraction},
            otherwise=_hold_out(data),
        )
    if data.train_rows < data.rows:
        return
    for name, value, off in (
        ("checkpoint.keep_best", config.checkpoint.keep_best, "none"),
        (
            "train.stop_after_evaluations_without_gain",
            config.train.stop_after_evaluations_without_gain,
            0,
        ),
    ):
        if value != off:
            raise UsageError(
                f"{name} is {value}, but {config.data.path} has no held-out rows to evaluate",
                {name: off},
                otherwise=_hold_out(data),
            )


def _hold_out(data: Described) -> str:
    """The words to type for other held-out rows of a table."""
    what = f"values in held_out of the column {data.split}" if data.split else "held_out = SHARE"
    return f"type {what} in the schema, and prepare the files again"


def _check_towers(config: Config, data: Described) -> None:
    """Check the columns of both towers of a two-tower model."""
    users, path = config.model.user_columns, config.data.path
    for name in users:
        if name in data.columns:
            continue
        wrong = f"model.user_columns has {name!r}, no column of {path}"
        near = get_close_matches(name, data.columns, 1)
        if not near:
            raise UsageError(wrong, otherwise=f"there are {listed(data.columns)}")
        corrected = tuple(near[0] if one == name else one for one in users)
        raise UsageError(wrong, {"model.user_columns": corrected})
    if users and set(users) != set(data.columns):
        return
    no_towers = {"model.architecture": "dlrm"}
    if len(data.columns) == 1:
        raise UsageError(f"{path} has one column for two towers", no_towers)
    wrong = (
        f"model.user_columns has all columns of {path}, and the item's tower none"
        if users
        else f"model.user_columns is empty, and the columns of {path} are {listed(data.columns)}"
    )
    example = next((name for name in data.columns if "user" in name.lower()), data.columns[0])
    raise UsageError(wrong, {"model.user_columns": (example,)}, no_towers)
