"""Real training, with its reporter and its run folder, on a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.config import load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.device.imitated_gpu import imitated_gpu
from ecrm.engine.hooks import Hooks
from ecrm.protection.registry import make_protection
from ecrm.run.connect import start_view
from ecrm.run.ending import Record
from ecrm.run.events import check_event
from ecrm.run.reporter import Reporter
from ecrm.run.run_folder import RunFolder
from ecrm.run.traffic import Traffic
from ecrm.testing.simulated_transport import RankKilled, SimulatedCluster
from ecrm.train.build_engine import build_engine
from ecrm.train.trainer import Trainer
from ecrm.transport.base import Transport


@dataclass(frozen=True)
class Telling:
    """A rank that dies as it tells the progress of a step, before or once it `has_written` it."""

    rank: int
    step: int
    has_written: bool


class _MortalFolder(RunFolder):
    def __init__(self, path: Path, deaths: Sequence[Telling]) -> None:
        super().__init__(path)
        self._deaths = deaths

    def event(self, fields: dict[str, Any]) -> None:
        death = next(
            (
                death
                for death in self._deaths
                if fields["event"] == "progress" and fields["step"] == death.step
            ),
            None,
        )
        if death is None or death.has_written:
            super().event(fields)
        if death is not None:
            raise RankKilled


@dataclass
class Trained:
    """What a run left: its events, its summary, and who died."""

    events: list[dict[str, Any]]
    killed: list[int]
    summary: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def train(
    folder: Path,
    data: Path,
    *sets: str,
    faults=(),
    telling: Sequence[Telling] = (),
    resume: Path | None = None,
    seed: int = 0,
) -> Trained:
    """The tiny config with `sets`, to its end or to the death of its last rank."""
    config = load_config("tiny", [f"data.path={data}", *sets])
    dataset = CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table, config.data.eval_fraction
    )
    cluster = SimulatedCluster(config.world_size, seed, faults, most_calls=300_000)
    own = CheckpointFolder(folder / "checkpoints")
    resumed = [] if resume is None else find(resume / "checkpoints")[0]

    def program(transport: Transport) -> dict[str, Any] | None:
        rank = transport.rank
        run_folder = _MortalFolder(folder, [death for death in telling if death.rank == rank])
        protection = make_protection(
            config.protection,
            config.cluster.servers,
            folder / "mapped",
            CheckpointRows(own),
            durable=config.mapped.flush == "commit",
        )
        unknown = {rank: {"failure_domain": f"rank {rank}"} for rank in range(config.world_size)}
        reporter = Reporter(run_folder, {}, 1)
        hooks = Hooks(
            phase=lambda step, name: cluster.enter_phase(rank, step, name), event=reporter.event
        )
        durable: Any = None
        if config.protection.name == "mapped":
            durable = Reopened()
        elif config.checkpoints or resume is not None:
            durable = Restorer(own, resumed)
        engine = build_engine(
            config,
            transport,
            protection,
            start_view(config, protection, unknown),
            dataset,
            hooks,
            durable,
        )
        reporter.watch(engine)
        if resume is not None:
            engine.recovery.resume()
        checkpoints = None
        if config.checkpoints:
            policy = CheckpointPolicy(config.train.steps, **vars(config.checkpoint))
            checkpoints = Checkpoints(
                engine, own, {}, policy, reporter.event, background=lambda work: work()
            )
        return Trainer(
            engine,
            dataset,
            config,
            config.train.steps,
            Record(run_folder, {}, Traffic(transport)),
            tell=reporter.progress,
            checkpoints=checkpoints,
            event=reporter.event,
        ).run()

    if config.protection.name == "mapped":
        (folder / "mapped").mkdir(parents=True)

    def on_its_device(transport: Transport) -> dict[str, Any] | None:
        with imitated_gpu() if config.testing.imitated_gpu else nullcontext():
            return program(transport)

    outcome = cluster.run(on_its_device)
    events = RunFolder(folder).events()
    for event in events:
        check_event(event)
    summaries = [summary for summary in outcome.results.values() if summary is not None]
    return Trained(events, [kill.rank for kill in outcome.killed], *summaries)
