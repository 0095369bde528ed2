"""What a run goes on from, checked before anything is started. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ecrm.checkpoint.fits import plan_resume
from ecrm.checkpoint.folder import Checkpoint
from ecrm.config.schema import Config
from ecrm.mapped.manifest import folder_of


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
