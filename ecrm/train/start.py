"""What a run goes on from, checked before anything is started. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.checkpoint.fits import KEYS, plan_resume
from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.config.schema import Config
from ecrm.errors import EcrmError
from ecrm.mapped.manifest import files_at, folder_of, read_about


@dataclass(frozen=True)
class Start:
    """`checkpoints` to go on from, newest first, and what is said of others; or `mapped`, the folder of mapped files."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mapped: Path | None = None


def plan_start(config: Config, steps: int, run_dir: Path | None, resume: Path | None) -> Start:
    """Raises UsageError and DataError, with what to type, where a config of so many steps cannot go on from `resume`."""
    if config.protection.name == "mapped":
        return Start(mapped=folder_of(config, steps, run_dir, resume))
    found, refused = plan_resume(resume, config, steps)
    return Start(found, refused)


def kept_by(resume: Path | None) -> dict[str, Any]:
    """Config keys that a run which goes on from `resume` must have as they were, for `load_config`; none where there is no run."""
    if resume is None:
        return {}
    try:
        mapped = files_at(resume)
        said = read_about(mapped)["identity"] if mapped is not None else locate(resume)[0][0].manifest.identity
    except EcrmError:
        return {}  # plan_start says so
    return {key: said[key] for key in KEYS}
