"""What a run goes on from, checked before anything is started. Light: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.checkpoint.compatibility import (
    KEPT,
    began,
    begun_as,
    changes,
    check_init,
    check_steps,
    identity,
    plan_resume,
)
from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.checkpoint.mapped_folder import files_at, folder_of, read_about
from ecrm.config.schema import Config
from ecrm.errors import EcrmError, UsageError
from ecrm.faults.kill import Kill
from ecrm.run.plan import plan


@dataclass(frozen=True)
class Start:
    """The number of `steps`, and the `identity` of what is trained; `checkpoints` to go on from, newest first, and what is said of
    others; or `mapped`, the folder of mapped files. `changed`: a line for what is otherwise than in the run to go on from. `begins_with`: another run's checkpoint, whose weights are those of step 0."""

    steps: int
    identity: dict[str, Any]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mapped: Path | None = None
    changed: list[str] = field(default_factory=list)
    begins_with: Checkpoint | None = None

    @property
    def data_began(self) -> int:
        """The step whose batch begins with the first row of the data."""
        return self.identity["data_began"]


def plan_start(
    config: Config,
    run_dir: Path | None,
    resume: Path | None,
    kills: Sequence[Kill] = (),
    init_from: Path | None = None,
) -> Start:
    """Raises UsageError and DataError, with what to type, where a config cannot be run, or cannot go on from `resume`, or begin with
    the weights of `init_from`, which do not count where the run goes on."""
    if init_from is not None and resume is None:
        return _begin(config, kills, init_from)
    if config.protection.name == "mapped":
        mine, steps = identity(config), plan(config, kills)
        folder = folder_of(config, steps, run_dir, resume)
        changed = changes(read_about(folder)["identity"], mine) if resume is not None else []
        return Start(steps, mine, mapped=folder, changed=changed)
    found, refused = plan_resume(resume, config)
    if not found:
        return Start(plan(config, kills), identity(config))
    said = found[0].manifest.identity
    mine = identity(config, began(found[0], config), begun_as(said))
    steps = plan(config, kills, mine["data_began"])
    check_steps(found[0].path, found[0].step, steps)
    return Start(steps, mine, found, refused, changed=changes(said, mine))


def _begin(config: Config, kills: Sequence[Kill], init_from: Path) -> Start:
    """A run at step 0 with the weights of the newest checkpoint at `init_from`. Rows that it does not have begin as there, too."""
    if config.protection.name == "mapped":
        raise UsageError(
            "--init-from: with protection.name=mapped a run cannot begin with the weights of another",
            {"protection.name": "erasure"},
        )
    newest = locate(init_from)[0][0]
    check_init(newest.path, newest.manifest.identity, config)
    began_as = {**begun_as(newest.manifest.identity), "init_from": newest.manifest.checksum}
    return Start(plan(config, kills), identity(config, 0, began_as), begins_with=newest)


def kept_by(resume: Path | None) -> dict[str, Any]:
    """Config keys that a run which goes on from `resume` must have as they were, for `load_config`; none where there is no run."""
    if resume is None:
        return {}
    try:
        mapped = files_at(resume)
        said = (
            read_about(mapped)["identity"]
            if mapped is not None
            else locate(resume)[0][0].manifest.identity
        )
    except EcrmError:
        return {}  # plan_start says so
    return {key: said[key] for key in KEPT}
