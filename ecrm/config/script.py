"""A user's training script as typed, and its config without the keys decided by the script."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.config.load import NOT_TOML, apply, make_config, parse_overrides, read_config
from ecrm.config.schema import Config

SUFFIX = ".py"
RECIPE = Path(__file__).parents[1] / "recipes" / "train.py"
"""The script that trains the model of a config."""
DECIDED_SECTIONS = ("data", "model")
DECIDED_KEYS = {
    "train.global_batch": "the batches that the script makes",
    "train.slots": "ecrm.Session(slots=...)",
    "train.steps": "session.steps(batches, steps)",
    "train.epochs": "session.steps(batches, steps)",
    "train.sparse_optimizer": "apply_optimizer_in_backward",
    "train.sparse_lr": "apply_optimizer_in_backward",
    "train.sparse_eps": "apply_optimizer_in_backward",
    "train.dense_optimizer": "ecrm.Session(dense_optimizer=...)",
    "train.dense_lr": "ecrm.Session(dense_optimizer=...)",
    "train.wire_dtype": "ecrm.Session(wire_dtype=...)",
    "train.eval_every_steps": "the script, which evaluates its model itself",
    "train.stop_after_evaluations_without_gain": "the script, which evaluates its model itself",
    "checkpoint.keep_best": "the script, which evaluates its model itself",
}
"""Keys without a meaning for a script, each with the place of the decision in the script."""


def recipe_of(config: str, overrides: Sequence[str], slots: int) -> Script:
    """The recipe of a config, with its command line; `slots` is the run's number of slots.

    A run that goes on has the slots of the run before, and no option may say so.
    """
    settings = [word for each in (*overrides, f"train.slots={slots}") for word in ("--set", each)]
    return Script(RECIPE, None, (config, *settings), follows_config=True)


def is_script(name: str) -> bool:
    """Whether an argument typed in the place of a config is a user's script."""
    return name.endswith(SUFFIX)


@dataclass(frozen=True)
class Script:
    """A training script, with its own `arguments`.

    `config` is a TOML file or the name of a shipped config, None for the defaults of all keys.
    `follows_config`: the script is a recipe, and the run's config decides all of the training. The
    first argument is then the config.
    """

    path: Path
    config: str | None = None
    arguments: tuple[str, ...] = ()
    follows_config: bool = False

    @property
    def typed(self) -> str:
        """The script or the config as typed by the user."""
        return self.arguments[0] if self.follows_config else str(self.path)

    @property
    def digest(self) -> str:
        """SHA-256 of the script's text and arguments."""
        text = json.dumps(self.arguments).encode()
        return hashlib.sha256(self.path.read_bytes() + b"\0" + text).hexdigest()

    def check(self) -> None:
        """Raise UsageError if the script is missing."""
        if not self.path.is_file():
            raise UsageError(f"no script {str(self.path)!r}")

    def load_config(self, overrides: Sequence[str] = ()) -> Config:
        """The config for the script's run; `overrides` as in `ecrm.config.load_config`.

        Keys decided by the script have default or filled-in values, without a meaning. Raises
        UsageError for the first such key given, else naming every problem found.
        """
        label, raw = str(self.path), {}
        if self.config is not None:
            label, text = read_config(self.config)
            try:
                raw = tomllib.loads(text)
            except NOT_TOML as error:
                raise UsageError(f"{label}: not a TOML file: {error}") from None
        changes, problems = parse_overrides(overrides)
        given = apply(raw, changes)
        if decided := decided_by_script(given):
            raise UsageError(f"{label}: {decided}")
        return make_config(_without_gaps(given), label, problems)


def decided_by_script(raw: Mapping[str, Any]) -> str:
    """The problem with {section: {key: value}} for a script's run; "" for none."""
    for section in DECIDED_SECTIONS:
        if section in raw:
            return f"[{section}] is for a run of a config; a script has its own {section}"
    for name, place in DECIDED_KEYS.items():
        section, _, key = name.partition(".")
        values = raw.get(section)
        if isinstance(values, Mapping) and key in values:
            return f"{name} is for a run of a config; here it is decided by {place}"
    return ""


def _without_gaps(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with values for keys without a default, and for keys whose default may not fit."""
    filled = {**raw, "data": {"path": ""}}
    cluster, train = raw.get("cluster"), raw.get("train", {})
    trainers = cluster.get("trainers") if isinstance(cluster, Mapping) else None
    if isinstance(train, Mapping) and type(trainers) is int and trainers > 0:
        filled["train"] = {**train, "global_batch": trainers}  # a multiple of the slots
    return filled
