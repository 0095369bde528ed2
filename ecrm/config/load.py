"""Makes a checked `Config` from a TOML file or a shipped config's name, and `--set` overrides."""

from __future__ import annotations

import difflib
import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import ecrm
from ecrm.base.errors import UsageError
from ecrm.base.paths import typed_path, typed_path_text
from ecrm.config.check import (
    problems_of_fit,
    problems_of_values,
    type_of,
    unknown_key,
)
from ecrm.config.schema import SECTIONS, Config, ProtectionConfig
from ecrm.protection.kinds import KINDS

CHECKPOINT_MINUTES = 30.0
"""Minutes between checkpoints under protections that need checkpoints, by default."""

NOT_TOML = (ValueError, RecursionError)
"""The errors of tomllib: its own, ValueError of int() for thousands of digits, and RecursionError.

Thousands of brackets raise RecursionError.
"""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), kept: Mapping[str, Any] | None = None
) -> Config:
    """Read and check a config as a whole.

    `path` is a TOML file or the name of a shipped config; each of `overrides` is
    "section.key=value", later ones winning. An override of train.steps drops the file's
    train.epochs, and the reverse. `kept` are keys of the run to go on from: no advice changes these
    keys, and the run's train.slots hold if the config gives none. Raises UsageError naming every
    problem found; does not check that the dataset exists.
    """
    label, text = read_config(path)
    try:
        raw = tomllib.loads(text)
    except NOT_TOML as error:
        raise UsageError(f"{label}: not a TOML file: {error}") from None
    changes, problems = parse_overrides(overrides)
    raw = apply(raw, changes)
    return make_config(raw, label, problems, kept)


def make_config(
    raw: Mapping[str, Any],
    label: str,
    problems: Iterable[str] = (),
    kept: Mapping[str, Any] | None = None,
) -> Config:
    """Check {section: {key: value}} and return the Config.

    `label` names the source in the UsageError. `kept` as in `load_config`. The error has the ways
    out of its first problem, if any.
    """
    values, found = problems_of_values(raw)
    problems, fit, kept = [*problems, *found], [], kept or {}
    if not problems:
        if not values["train"].get("slots"):
            values["train"]["slots"] = kept.get("train.slots", 0)
        if values["train"].get("steps") and "epochs" not in values["train"]:
            # the default of epochs holds only if steps are not given
            values["train"]["epochs"] = 0.0
        kind = KINDS[values["protection"].get("name", ProtectionConfig.name)]
        given = values["checkpoint"].keys() & {"every_steps", "every_minutes"}
        if kind.needs_checkpoints and not given:
            values["checkpoint"]["every_minutes"] = CHECKPOINT_MINUTES
        for section in ("data", "mapped"):
            if path := values[section].get("path"):
                values[section]["path"] = typed_path_text(path)
        config = Config(**{name: section(**values[name]) for name, section in SECTIONS.items()})
        has = {
            f"{section}.{key}": value
            for section, values in config.to_dict().items()
            for key, value in values.items()
        }
        fit = [problem.keeping(kept, has) for problem in problems_of_fit(config)]
        problems = [str(problem) for problem in fit]
    if problems:
        error = UsageError(_message(label, problems))
        error.ways_out = fit[0].ways_out if fit else ()
        raise error
    return config


def parse_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Turn ["a.b=1", ...] into ({"a.b": 1}, problems); the value is TOML, a bare word is text."""
    changes: dict[str, Any] = {}
    problems = []
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append(f"--set {override}: must look like section.key=value")
        elif problem := unknown_key(name):
            problems.append(f"--set {problem}")
        else:
            changes[name] = _parse_value(text.strip(), type_of(name))
    return changes, problems


def read_config(path: str | Path) -> tuple[str, str]:
    """Return (label for messages, text) of a file, or of the shipped config with this bare name."""
    file = typed_path(path)
    if not file.is_file():
        shipped = shipped_configs()
        bare = str(path).removesuffix(".toml")
        if bare not in shipped:
            near = difflib.get_close_matches(bare, shipped, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"no config file {str(path)!r}; shipped configs are {', '.join(shipped)}{guess}"
            )
        return f"{bare}.toml", shipped[bare].read_text(encoding="utf-8")
    try:
        return str(path), file.read_text(
            encoding="utf-8-sig"
        )  # an editor may have put a mark first
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read config file {str(path)!r}: {error}") from None


def shipped_configs() -> dict[str, Traversable]:
    """The configs installed with the package, by bare name, sorted."""
    try:
        folder = importlib.resources.files("ecrm.configs")
    except ModuleNotFoundError:  # run from a checkout, not installed
        folder = Path(ecrm.__file__).parents[1] / "configs"
    files = [f for f in folder.iterdir() if f.name.endswith(".toml")] if folder.is_dir() else []
    return {f.name.removesuffix(".toml"): f for f in sorted(files, key=lambda f: f.name)}


def _parse_value(text: str, kind: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except NOT_TOML:
        return text
    value = parsed["value"]
    if len(parsed) != 1 or (kind is str and not isinstance(value, str)):
        return text
    return value


def apply(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """{section: {key: value}} with `changes`, {"section.key": value}, made."""
    merged = {
        section: dict(values) if isinstance(values, dict) else values
        for section, values in raw.items()
    }
    for name, other in (("train.steps", "epochs"), ("train.epochs", "steps")):
        if (
            changes.get(name)
            and f"train.{other}" not in changes
            and isinstance(merged.get("train"), dict)
        ):
            merged["train"].pop(other, None)
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if isinstance(merged.setdefault(section, {}), dict):
            merged[section][key] = value
    return merged


def _message(label: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{label}: {problems[0]}"
    return "\n".join(
        [f"{label}: {len(problems)} problems", *(f"  {problem}" for problem in problems)]
    )
