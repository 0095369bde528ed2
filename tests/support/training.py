"""A config's run, with its reporter and its run folder, on a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.config import Config, load_config
from ecrm.engine.events import Event, Progress, Terms, check_event
from ecrm.engine.hooks import Hooks
from ecrm.model.determinism import prepared_torch
from ecrm.process.device import device_of
from ecrm.protection.registry import make_protection
from ecrm.recipes.train import train as recipe
from ecrm.run.connect import start_view
from ecrm.run.ending import Ending, Record
from ecrm.run.finite import FiniteWatch
from ecrm.run.policy import policy_of
from ecrm.run.rank_run import RankRun
from ecrm.run.reporter import Reporter
from ecrm.run.run_folder import RunFolder
from ecrm.run.session_progress import SessionProgress
from ecrm.run.session_run import ScriptPart, SessionSummaryFields
from ecrm.run.started import Started, Wanted
from ecrm.run.traffic import Traffic
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.testing.simulate.session_job import session_engine
from ecrm.testing.simulated_transport import RankKilled, SimulatedCluster
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

    def event(self, told: Event) -> None:
        death = next(
            (
                death
                for death in self._deaths
                if isinstance(told, Progress) and told.step == death.step
            ),
            None,
        )
        if death is None or death.has_written:
            super().event(told)
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


def _begun(
    config: Config,
    wanted: Wanted,
    transport: Transport,
    cluster: SimulatedCluster,
    folder: Path,
    run_folder: RunFolder,
    resumed: list[Checkpoint],
    told: Callable[[dict[str, Any] | None], None],
) -> tuple[ScriptPart, Started]:
    """One rank's part in a config's run, as `ecrm.run.session_run` begins it, and its end."""
    rank, steps, own = transport.rank, config.train.steps, CheckpointFolder(folder / "checkpoints")
    protection = make_protection(
        config.protection,
        config.cluster.servers,
        folder / "mapped",
        CheckpointRows(own),
        durable=config.mapped.flush == "commit",
    )
    unknown = {rank: {"failure_domain": f"rank {rank}"} for rank in range(config.world_size)}
    view = start_view(config, protection, unknown)
    reporter = Reporter(run_folder, {}, Terms(protected=1))
    watch = FiniteWatch(config.train.on_nonfinite == "stop", 1, reporter.event)
    hooks = Hooks(
        phase=lambda step, name: cluster.enter_phase(rank, step, name),
        event=reporter.event,
        troubled=watch.losses,
    )
    durable: Any = None
    if config.kind.rows_in_files:
        durable = Reopened()
    elif config.checkpoints or resumed:
        durable = Restorer(own, resumed)
    storage_device = device_of(config, "storage.device")
    engine = session_engine(
        transport,
        hooks,
        wanted,
        view,
        protection,
        policy_of(config, protection),
        device=storage_device,
        durable=durable,
    )
    reporter.watch(engine)
    if resumed:
        engine.recovery.resume()
    checkpoints = None
    if config.checkpoints:
        policy = CheckpointPolicy(steps, **vars(config.checkpoint))
        checkpoints = Checkpoints(
            engine, own, {}, policy, reporter.event, background=lambda work: work()
        )
    progress = SessionProgress(
        steps, config.train.log_every_steps, reporter.progress, samples=wanted.samples
    )
    progress.begins_at(engine)
    record = Record(run_folder, {}, Traffic(transport))
    words = SessionSummaryFields(engine, steps, wanted.samples, flat=True)
    ending = Ending(engine, config, steps, record, checkpoints, progress, words)
    run = RankRun(
        engine,
        steps,
        record,
        ending,
        progress,
        checkpoints,
        watch,
        lambda: None,
        lambda summary, why_not_kept: told(summary),
    )
    part = ScriptPart(run, run_folder, None, lambda place: None, words)
    return part, Started(run)


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
    cluster = SimulatedCluster(config.world_size, seed, faults, most_calls=300_000)
    resumed = [] if resume is None else find(resume / "checkpoints")[0]

    def program(transport: Transport) -> dict[str, Any] | None:
        rank, found = transport.rank, []
        run_folder = _MortalFolder(folder, [death for death in telling if death.rank == rank])

        def start(wanted: Wanted) -> Started:
            part, started = _begun(
                config, wanted, transport, cluster, folder, run_folder, resumed, found.append
            )
            parts.append(part)
            return started

        parts: list[ScriptPart] = []
        recipe(config, start=start, device=device_of(config, "train.device"))
        parts[0].end(sessions=1)
        return found[0]

    if config.kind.rows_in_files:
        (folder / "mapped").mkdir(parents=True)

    def on_its_device(transport: Transport) -> dict[str, Any] | None:
        with imitated_gpu() if config.testing.imitated_gpu else nullcontext():
            return program(transport)

    with prepared_torch(threads=1):
        outcome = cluster.run(on_its_device)
    events = RunFolder(folder).events()
    for event in events:
        check_event(event)
    summaries = [summary for summary in outcome.results.values() if summary is not None]
    return Trained(events, [kill.rank for kill in outcome.killed], *summaries)
