"""The plan of a run and its starting point, checked before any process starts.

Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecrm.base.errors import EcrmError, UsageError
from ecrm.base.requirements import require_torchrec
from ecrm.base.wording import counted
from ecrm.checkpoint import compatibility
from ecrm.checkpoint.compatibility import (
    KEPT,
    begun_as,
    check_steps,
    check_versions,
    plan_resume,
)
from ecrm.checkpoint.folder import Checkpoint, locate
from ecrm.checkpoint.manifest import as_a_run_writes
from ecrm.checkpoint.mapped_folder import files_at, folder_to_go_on, new_folder, read_about
from ecrm.checkpoint.trained import Trained
from ecrm.config import Config
from ecrm.config.faults import Kill, check_kills
from ecrm.data.described import describe
from ecrm.protection.kinds import WITH_PARITY
from ecrm.run.auto_resume import about
from ecrm.run.check_data import check_data

if TYPE_CHECKING:
    from ecrm.placement.stripes import StripeShape
    from ecrm.placement.view import View
    from ecrm.protection.base import Protection


def plan(config: Config, kills: Sequence[Kill] = (), data_began: int = 0) -> int:
    """Return the number of steps of a run.

    Reads the manifest and the sizes of the dataset's files, not the contents. Passes over the data
    count from the step `data_began` on, train.steps from the first step of the model.

    Raises UsageError for a missing dataset, a dataset too small or unfit for the config, a kill
    with a rank or step outside the run, or without TorchRec; DataError for a damaged dataset.
    """
    require_torchrec()
    data = describe(config.data.path, config.data.eval_fraction)
    check_data(config, data)
    steps = _steps(config, data.train_rows, data_began)
    check_kills(kills, config.world_size, steps)
    return steps


def _steps(config: Config, train_rows: int, data_began: int) -> int:
    train = config.train
    has = f"{config.data.path} has {train_rows} training rows"
    if train.global_batch > train_rows:
        below = train_rows // config.slots * config.slots
        ways_out = [{"train.global_batch": below}] if below else []
        raise UsageError(
            f"{has}, fewer than train.global_batch, {train.global_batch}",
            *ways_out,
            otherwise="prepare more data",
        )
    steps = train.steps or data_began + int(train.epochs * train_rows) // train.global_batch
    if steps <= (0 if train.steps else data_began):
        least = -(-train.global_batch * 1000 // train_rows)
        least += int(least / 1000 * train_rows) < train.global_batch  # floats round down
        raise UsageError(
            f"{has}: train.epochs={train.epochs} of them is less than one step of "
            f"train.global_batch={train.global_batch}",
            {"train.epochs": least / 1000},
            otherwise="more",
        )
    return steps


@dataclass(frozen=True)
class BuiltIn:
    """The model and the data of a `config`: a `Trained`.

    `on` is the GPU for training the dense part, in words; "" for the CPU.
    """

    config: Config
    on: str = ""

    def steps(self, data_began: int = 0) -> int:
        return plan(self.config, (), data_began)

    def identity(
        self, data_began: int = 0, began_as: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        said = compatibility.identity(self.config, data_began, began_as)
        return {**said, **compatibility.on_gpu(self.on)}

    def about(self) -> dict[str, Any]:
        return about(self.config)

    def check_identity(self, path: Path, said: dict[str, Any]) -> None:
        compatibility.check_identity(path, said, self.config)

    def check_data(self, path: Path, said: dict[str, Any]) -> None:
        compatibility.check_data(path, said, self.config)

    def check_init(self, path: Path, said: dict[str, Any]) -> None:
        compatibility.check_init(path, said, self.config)

    def began(self, checkpoint: Checkpoint) -> int:
        return compatibility.began(checkpoint, self.config)

    def changes(self, said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
        return compatibility.changes(said, mine)


@dataclass(frozen=True)
class Start:
    """The plan and the starting point of a run.

    - `steps`: the number of steps.
    - `identity`: the identity of the trained model.
    - `checkpoints`: checkpoints to go on from, newest first; `refused`: a line per unusable one.
    - `mapped`: the folder of mapped files, if any.
    - `changed`: a line per difference from the run to go on from.
    - `begins_with`: a foreign checkpoint with the weights of step 0.
    """

    steps: int
    identity: dict[str, Any]
    checkpoints: list[Checkpoint] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mapped: Path | None = None
    changed: list[str] = field(default_factory=list)
    begins_with: Checkpoint | None = None

    @property
    def data_began(self) -> int:
        """The step with the first row of the data at the begin of its batch."""
        began: int = self.identity["data_began"]
        return began


def find_starting_point(
    config: Config,
    run_dir: Path | None,
    resume: Path | None,
    kills: Sequence[Kill] = (),
    init_from: Path | None = None,
    trained: Trained | None = None,
) -> Start:
    """Plan a run of `config`; `trained` is by default the model of the config.

    The run goes on from `resume`, or else begins with the weights of `init_from`. Raises UsageError
    and DataError, with advice on options, if the config cannot run like this.
    """
    if trained is None:
        trained = BuiltIn(config)
    if init_from is not None and resume is None:
        return _begin(config, trained, kills, init_from)
    if config.kind.rows_in_files:
        mine, steps = trained.identity(), _steps_of(config, trained, kills)
        if resume is None:
            return Start(steps, mine, mapped=new_folder(config, run_dir))
        folder = folder_to_go_on(config, trained, steps, resume)
        said = read_about(folder)["identity"]
        check_versions(folder, said, mine, config.train.other_versions)
        changed = trained.changes(said, mine)
        return Start(steps, mine, mapped=folder, changed=changed)
    found, refused = plan_resume(resume, trained)
    if not found:
        return Start(_steps_of(config, trained, kills), trained.identity())
    said = found[0].manifest.identity
    mine = trained.identity(trained.began(found[0]), begun_as(said))
    check_versions(found[0].path, said, mine, config.train.other_versions)
    steps = _steps_of(config, trained, kills, mine["data_began"])
    check_steps(found[0].path, found[0].step, steps, of_script="data" not in said)
    return Start(steps, mine, found, refused, changed=trained.changes(said, mine))


def _steps_of(config: Config, trained: Trained, kills: Sequence[Kill], data_began: int = 0) -> int:
    """The number of steps. Raises UsageError for a kill with a rank or step outside the run."""
    steps = trained.steps(data_began)
    check_kills(kills, config.world_size, steps)
    return steps


def _begin(config: Config, trained: Trained, kills: Sequence[Kill], init_from: Path) -> Start:
    """Plan a run from step 0 with the weights of the newest checkpoint at `init_from`.

    Rows missing in the checkpoint get the first values of the checkpoint's run.
    """
    if config.kind.rows_in_files:
        raise UsageError(
            f"--init-from: with protection.name={config.protection.name} "
            "a run cannot begin with the weights of another",
            WITH_PARITY,
        )
    newest = locate(init_from)[0][0]
    with as_a_run_writes(newest.path):
        trained.check_init(newest.path, newest.manifest.identity)
        began_as = {**begun_as(newest.manifest.identity), "init_from": newest.manifest.checksum}
    steps = _steps_of(config, trained, kills)
    return Start(steps, trained.identity(0, began_as), begins_with=newest)


def kept_by(resume: Path | None) -> dict[str, Any]:
    """Config values fixed for a run going on from `resume`, for `load_config`.

    Empty without `resume`, and if `resume` has no usable run.
    """
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
        return {}  # find_starting_point says so
    return {key: said[key] for key in KEPT if key in said}


def view_over(config: Config, protection: Protection, names: Sequence[str]) -> View:
    """The first view, with roles spread over failure domains; `names` are the domains of ranks.

    Raises UsageError, with advice on options, for too few failure domains.
    """
    from ecrm.placement.assignment import CannotKeepApart, initial_view  # imports torch

    cluster = config.cluster
    domains = [names.index(name) for name in names]

    def of(shape: StripeShape) -> View:
        return initial_view(
            cluster.layout,
            shape,
            cluster.trainers,
            cluster.spares,
            config.slots,
            protection.dense_replicas,
            domains,
            protection.shape.shards // cluster.servers,
        )

    def is_kept_apart(k: int) -> bool:
        with contextlib.suppress(CannotKeepApart):
            return of(replace(protection.shape, k=k)) is not None
        return False

    try:
        return of(protection.shape)
    except CannotKeepApart as error:
        hosts = Counter(names)
        given = ", ".join(f"{name} with {counted(count, 'rank')}" for name, count in hosts.items())
        smaller = range(protection.shape.k - 1, 0, -1)
        fewer_units = [{"protection.k": k} for k in smaller if is_kept_apart(k)][:1]
        raise UsageError(
            f"cluster.failure_domain is host, but the hosts given ({given}) "
            f"cannot keep the units of a stripe apart: {error}",
            *fewer_units,
            {"cluster.failure_domain": "rank"},
            otherwise="start on more hosts",
        ) from None
