"""A run as settled by its launch: the training, the folder, the kills, and the run to go on from.

`ecrm launch` settles the run once, and hands the `RunSpec` to every rank: the text in a variable,
and the digest on the command line. A variable reaches hosts without a shared folder, and leaves
nothing behind. Ranks of a line of mpirun typed by hand settle the run from the words of the line.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.config import Config, load_config
from ecrm.config.faults import Kill, check_ranks, parse_kill
from ecrm.config.load import make_config
from ecrm.config.script import Script, recipe_of
from ecrm.run.auto_resume import AUTO_RESUME, about, check_same, look
from ecrm.run.plan import Start, find_starting_point, kept_by
from ecrm.run.run_lock import check_run_dir

VARIABLE = "ECRM_RUN_SPEC"
"""The environment variable with the text of the launch's `RunSpec`."""


@dataclass(frozen=True)
class RunSpec:
    """A run as settled by its launch; the same on all ranks.

    `script` trains; the script of a config's run is a recipe. `resume` may be AUTO_RESUME.
    `is_through`: a later session of the script has begun in an earlier start. This session is then
    complete, and is loaded for the script's work behind the loop.
    """

    script: Script
    config: Config
    run_dir: Path | None = None
    kills: Sequence[Kill] = ()
    resume: Path | None = None
    init_from: Path | None = None
    is_through: bool = False

    @property
    def text(self) -> str:
        """The spec as JSON, for `of_text`."""
        fields: dict[str, Any] = {
            "script": asdict(self.script),
            "config": self.config.to_dict(),
            "run_dir": self.run_dir,
            "kills": [str(kill) for kill in self.kills],
            "resume": self.resume,
            "init_from": self.init_from,
        }
        return json.dumps(fields, default=str, sort_keys=True)

    @property
    def digest(self) -> str:
        """SHA-256 of `text`, the first 16 hexadecimal digits."""
        return _digest(self.text)

    @staticmethod
    def of_text(text: str) -> RunSpec:
        """The spec with the `text`, as written by an ecrm of the same version."""
        said = json.loads(text)
        script = said["script"]
        return RunSpec(
            Script(
                Path(script["path"]),
                script["config"],
                tuple(script["arguments"]),
                script["follows_config"],
            ),
            make_config(said["config"], "the launch"),
            _path(said["run_dir"]),
            [parse_kill(kill) for kill in said["kills"]],
            _path(said["resume"]),
            _path(said["init_from"]),
        )


@dataclass(frozen=True)
class Settled:
    """A run whose words have passed all checks before anything starts.

    `complete`: no work is left. `start` is the starting point; without steps for a script, whose
    steps and tables only the ranks know.
    """

    spec: RunSpec
    complete: bool
    start: Start


def settle(
    trained: str | Script,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    kills: Sequence[str] = (),
    resume: Path | None = None,
    init_from: Path | None = None,
    fresh: Path | None = None,
) -> Settled:
    """Check the words of a run, the config, the data, and the folders; write nothing.

    `fresh` is the run folder of a launch without a typed `run_dir`. Raises UsageError and
    DataError.
    """
    found, folder = look(run_dir, resume), run_dir if fresh is None else fresh
    if isinstance(trained, Script):
        script, config = trained, trained.load_config(overrides)
    else:
        config = load_config(trained, overrides, kept_by(found.resume))
        script = recipe_of(trained, overrides, config.slots)
    parsed = [parse_kill(kill) for kill in kills]
    check_ranks(parsed, config.world_size)
    if config.checkpoints and folder is None:
        raise UsageError("checkpoints go into the run folder: type --run-dir DIR")
    spec = RunSpec(script, config, folder, parsed, resume, init_from)
    if script.follows_config and resume == AUTO_RESUME:
        assert run_dir is not None  # `look` refuses to go on without a folder
        check_same(run_dir, about(config))
    if found.complete or not script.follows_config:
        start = Start(steps=0, identity={})
    else:
        start = find_starting_point(config, folder, found.resume, parsed, init_from)
    if run_dir is not None and resume != AUTO_RESUME:
        # no rank writes into the folder before all ranks have reached MPI
        check_run_dir(run_dir)
    return Settled(spec, found.complete, start)


def handed_over(digest: str, environ: Mapping[str, str] = os.environ) -> RunSpec:
    """The spec from the launch of this rank, with the `digest` on the rank's command line.

    Raises UsageError without a launch, and if the spec of the launch has another digest.
    """
    text = environ.get(VARIABLE, "")
    if _digest(text) != digest:
        raise UsageError(
            f"--spec {digest}: `ecrm launch` has handed over no such run",
            otherwise="leave the option out, or type ecrm launch",
        )
    return RunSpec.of_text(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
