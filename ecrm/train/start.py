"""What a run goes on from, checked before anything is started. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.checkpoint.fits import KEPT, began, changes, check_steps, identity, plan_resume
from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.config.schema import Config
from ecrm.errors import EcrmError
from ecrm.mapped.manifest import files_at, folder_of, read_about
from ecrm.train.kill import Kill
from ecrm.train.plan import plan


@dataclass(frozen=True)
class Start:
    """The number of `steps`, and the `identity` of what is trained; `checkpoints` to go on from, newest first, and what is said of
    others; or `mapped`, the folder of mapped files. `changed`: a line for what is otherwise than in the run to go on from."""

    steps: int
    identity: dict[str, Any]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mapped: Path | None = None
    changed: list[str] = field(default_factory=list)

    @property
    def data_began(self) -> int:
        """The step whose batch begins with the first row of the data."""
        return self.identity["data_began"]


def plan_start(config: Config, run_dir: Path | None, resume: Path | None, kills: Sequence[Kill] = ()) -> Start:
    """Raises UsageError and DataError, with what to type, where a config cannot be run, or cannot go on from `resume`."""
    if config.protection.name == "mapped":
        mine, steps = identity(config), plan(config, kills)
        folder = folder_of(config, steps, run_dir, resume)
        changed = changes(read_about(folder)["identity"], mine) if resume is not None else []
        return Start(steps, mine, mapped=folder, changed=changed)
    found, refused = plan_resume(resume, config)
    if not found:
        return Start(plan(config, kills), identity(config))
    mine = identity(config, began(found[0], config))
    steps = plan(config, kills, mine["data_began"])
    check_steps(found[0].path, found[0].step, steps)
    return Start(steps, mine, found, refused, changed=changes(found[0].manifest.identity, mine))


def kept_by(resume: Path | None) -> dict[str, Any]:
    """Config keys that a run which goes on from `resume` must have as they were, for `load_config`; none where there is no run."""
    if resume is None:
        return {}
    try:
        mapped = files_at(resume)
        said = read_about(mapped)["identity"] if mapped is not None else locate(resume)[0][0].manifest.identity
    except EcrmError:
        return {}  # plan_start says so
    return {key: said[key] for key in KEPT}
