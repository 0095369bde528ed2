"""A script with a session as a simulated job: a drawn model, trained, evaluated and saved."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecrm.base.allocate import CPU
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.engine.engine import Engine
from ecrm.engine.events import Checkpoint, Event
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted
from ecrm.engine.rollback import Durable
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import bytes_of
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.view import View
from ecrm.protection.base import Protection
from ecrm.run.sealed import meet
from ecrm.run.slot_faults import ON_ALL, Place
from ecrm.run.started import Start, Started, Wanted, too_late
from ecrm.run.user_code import PlaceOfDead, UserCode
from ecrm.session.data import Indexed
from ecrm.session.session import Session
from ecrm.session.streams import Streams
from ecrm.testing.faults.without_undo import leave_updates_in_place
from ecrm.testing.simulate.hidden_state import hide
from ecrm.testing.simulate.seen import Seen
from ecrm.testing.simulate.session_model import SessionModel
from ecrm.testing.simulate.session_parts import (
    Average,
    Batch,
    Stream,
    batch_of,
    build,
    dense_optimizer,
    left_out,
    row_scheduler,
    scheduler,
    trained_before,
)
from ecrm.testing.simulate.workload import Outcome, Workload, falling, finish, outcome
from ecrm.transport.base import Transport

EVALUATED = 5
"""Number of batches in an evaluation."""
LONGEST_STREAM = 14
"""Most batches of a stream. Some streams end before the last step."""
SAMPLES = 23
"""Fewest samples of the dataset for `ecrm.Indexed`."""


def samples_of(model: SessionModel) -> int:
    """The number of samples of the dataset; BatchNorm refuses a last batch of a single sample."""
    ends = model.epochs or model.batch
    return next(count for count in itertools.count(SAMPLES) if count * ends % model.batch != 1)


class SimulatedRun:
    """A session's run on one simulated rank, without requests to stop.

    After a recovery all ranks meet in a `share` before the next step. With `checkpoints`, the
    checkpoints' messages take the place of the `share`.
    """

    def __init__(
        self,
        engine: Engine,
        after_step: Callable[[Engine], None] = lambda engine: None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.engine, self._after_step, self._checkpoints = engine, after_step, checkpoints
        self._settled = not engine.state.transport.joined

    def between_steps(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.between_steps()
        elif not self._settled:
            with self.engine.recovery.recovering():
                self.engine.state.transport.share([])
            self._settled = True

    def troubles_to_report(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        return troubles

    def restart_clock(self) -> None: ...

    def step_finished(self) -> None:
        self._after_step(self.engine)

    def keep_best(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.keep_best()

    def keep(self) -> None:
        self.engine.commit()
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def on_recovery(self) -> None:
        self._settled = False
        if self._checkpoints is not None:
            self._checkpoints.on_recovery()

    def stop(self) -> None:
        raise AssertionError("nobody asks to stop")


def session_engine(
    transport: Transport,
    hooks: Hooks,
    wanted: Wanted,
    view: View,
    protection: Protection,
    policy: EnginePolicy,
    device: torch.device = CPU,
    durable: Durable | None = None,
    place_of_dead: PlaceOfDead = lambda rank: (),
    whole_tables: bool = False,
) -> Engine:
    """The engine of a session on one simulated rank, with rows on `device`."""
    hooks.inquest = UserCode(place_of_dead)
    return Engine(
        transport,
        wanted.tables,
        view,
        protection,
        SparseOptimizer("sgd", 1.0),  # tables have optimizers of their own
        wanted.make_dense,
        wanted.seed,
        policy,
        hooks,
        clock=lambda: 0.0,
        sparse_rate=wanted.sparse_rate,
        wire_dtype=wanted.wire_dtype,
        device=device,
        slots_on=wanted.device,
        durable=durable,
        whole_tables=whole_tables,
    )


def _finite(engine: Engine) -> bool:
    """Whether no row and no part of the dense replica on this rank has a nonfinite number."""
    replica = engine.state.dense
    assert isinstance(replica, ModuleReplica)
    rows = (
        hosted.store.read(torch.arange(engine.state.spaces[space].rows)).view(torch.float32)
        for (_, space), hosted in engine.state.hosted.items()
    )
    dense = (value for _, value in replica.whole_state if isinstance(value, Tensor))
    return all(bool(each.isfinite().all()) for each in itertools.chain(rows, dense))


class SessionJob:
    """The script of a drawn model as a `Job`; the script saves the model into `folder`.

    The workload gives cluster, protection, steps, slots and seed. `seen` maps ranks to the
    observations of their scripts. Checkpoints go into a folder; `None` writes no
    checkpoints. With `resumes` the run resumes from the checkpoints, and `began` gets the steps of
    the resumed ranks. `kept` and `refused` are the steps of finished checkpoints and of checkpoints
    refused as nonfinite. Without checkpoints, `nonfinite` gets the steps that left a nonfinite
    number. The script `hides` state of a kind of HIDDEN; "" hides nothing.
    """

    remembered = 0
    """Steps with remembered notes: none, as a session forgets logs after their delivery."""

    def __init__(
        self,
        model: SessionModel,
        folder: Path,
        checkpoints: Path | None = None,
        resumes: bool = False,
        hides: str = "",
    ) -> None:
        self._model, self.folder, self._resumes = model, folder, resumes
        self.hides = hides
        self._kept = None if checkpoints is None else CheckpointFolder(checkpoints)
        self.seen: dict[int, Seen] = {}
        self.began: set[int] = set()
        self.kept: set[int] = set()
        self.refused: set[int] = set()
        self.nonfinite: set[int] = set()
        self._places: dict[int, Place] = {}  # of user code by rank; a dead rank's place stays

    def _durable(self, workload: Workload) -> Durable | None:
        """Files or checkpoints that outlive the ranks of a run; `None` without them."""
        if workload.kind.rows_in_files:
            return Reopened()
        if self._kept is None:
            return None
        return Restorer(self._kept, find(self._kept.path)[0] if self._resumes else ())

    def dense_value(self, engine: Engine) -> Tensor:
        """Names and bits of a rank's whole replica, uint8 [N]."""
        replica = engine.state.dense
        assert isinstance(replica, ModuleReplica)
        parts = []
        for name, value in sorted(replica.whole_state, key=lambda pair: pair[0]):
            words = f"{name} {list(value.shape) if isinstance(value, Tensor) else value!r} "
            parts.append(torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8))
            if isinstance(value, Tensor):
                parts.append(bytes_of(value))
        return torch.cat(parts)

    def run(
        self,
        workload: Workload,
        transport: Transport,
        hooks: Hooks,
        after_start: Callable[[Engine], None],
        after_step: Callable[[Engine], None],
        report: Callable[[dict[str, str]], None],
    ) -> Outcome:
        """See `Job`."""
        seen = self.seen[transport.rank] = Seen(joined=transport.joined)
        checkpoints: list[Checkpoints] = []
        engines: list[Engine] = []

        def doing(place: Place | str) -> None:
            self._places.pop(transport.rank, None)
            if isinstance(place, Place):
                self._places[transport.rank] = place
                if place.part in ON_ALL:
                    hooks.phase(place.step, place.part)

        def whereabouts(rank: int) -> tuple[Place, ...]:
            return (self._places[rank],) if rank in self._places else ()

        def told(event: Event) -> None:
            if isinstance(event, Checkpoint):
                self.kept.add(event.step)
            hooks.event(event)

        def stepped(engine: Engine) -> None:
            if self._kept is None and self._model.stops and not _finite(engine):
                self.nonfinite.add(engine.step)
            after_step(engine)

        def start(wanted: Wanted) -> Started:
            protection = workload.make_protection()
            engine = session_engine(
                transport,
                hooks,
                wanted,
                workload.initial_view(),
                protection,
                workload.policy(protection),
                durable=self._durable(workload),
                place_of_dead=whereabouts,
                whole_tables=workload.whole_tables,
            )
            engines.append(engine)
            if workload.skip_undo:
                leave_updates_in_place(engine)
            began = None
            if transport.joined:
                engine.recovery.join()
                began = min(self.began, default=0)
            after_start(engine)
            if self._resumes and not transport.joined:
                engine.recovery.resume()
                self.began.add(engine.step)
            if self._kept is not None:
                policy = CheckpointPolicy(
                    workload.steps,
                    every_steps=self._model.checkpoints,
                    mode="async" if self._model.copies else "sync",
                    kind="incremental" if self._model.incremental else "full",
                    full_every=3,
                )
                checkpoints.append(
                    Checkpoints(
                        engine,
                        self._kept,
                        {},
                        policy,
                        told,
                        lambda: 0.0,
                        lambda work: work(),
                        first=began,
                        not_finite=lambda step, why: self.refused.add(step),
                    )
                )
            run = SimulatedRun(engine, stepped, *checkpoints)
            checks = 0 if transport.joined else wanted.check_steps
            return Started(run, doing, check_steps=checks)

        self._script(workload, start, seen)
        (engine,) = engines
        furthest = engine.step
        while True:
            try:
                meet(engine, "the end of the script")
                tables, verified = finish(engine, report, *checkpoints)
                break
            except StepAborted:
                for each in checkpoints:
                    each.on_recovery()
                if engine.step < furthest:
                    raise too_late(engine, furthest) from None
        seen.holds, seen.finished = engine.state.dense is not None, True
        return outcome(engine, tables, verified, self.dense_value)

    def _script(self, workload: Workload, start: Start, seen: Seen) -> Session:
        """Train, evaluate and save the model, as a user's script would."""
        model, seed = self._model, workload.seed
        torch.manual_seed(seed)
        averages: list[Average] = []
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            if model.scales
            else None
        )

        def before_step(parameters: Any) -> None:
            if model.clips:
                nn.utils.clip_grad_norm_(parameters, 0.5)
            for average in averages:
                average.update(parameters)

        module = build(model)
        if self.hides:
            hide(module, self.hides)
        loaded = trained_before(module, seed) if model.loads else {}
        session = Session(
            module,
            slots=workload.slots,
            seed=seed,
            dense_optimizer=dense_optimizer(model),
            scheduler=scheduler(model),
            before_step=before_step,
            sparse_rate=falling if workload.falls and not model.schedules_rows else None,
            sparse_scheduler=row_scheduler if model.schedules_rows else None,
            grad_scaler=scaler,
            check_determinism=model.checks,
            wire_dtype=torch.bfloat16 if workload.rounds else torch.float32,
            start=start,
        )
        if model.loads == "a state_dict":
            session.load_state_dict(loaded)
        elif model.loads:
            path = self.folder.parent / "trained_before.pt"
            if not path.exists():
                torch.save(loaded, path)
            session.load(path)
        if model.average:
            trained = [p for p in session.model.parameters() if p.requires_grad and not p.is_meta]
            averages.append(Average(trained))
            session.register("average", averages[0])
        session.on_commit(lambda finished, logged: seen.tell(finished - 1, logged))
        if model.evaluates:

            @session.every(model.evaluates)
            def evaluate() -> None:
                seen.evaluate(session.step, self._evaluation(session, seed))

        for batch in session.steps(self._batches(workload), workload.steps):
            if model.skips and left_out(batch):
                session.skip()
                session.log(left_out=1)
                continue
            scores = session.model(batch.dense, batch.kjt).squeeze(1)
            loss = F.mse_loss(scores, batch.label) * batch.factor
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                session.log(scale=scaler.get_scale())
            noise = random.random() + float(torch.rand(())) + float(np.random.rand())
            session.log(loss=loss, noise=noise)
        if model.evaluates:
            seen.evaluate(-1, self._evaluation(session, seed))
        if model.saves:
            path = self.folder / "model.safetensors"
            session.save(path)
            seen.saved = hashlib.sha256(path.read_bytes()).hexdigest()
        return session

    def _batches(self, workload: Workload) -> Any:
        model, seed = self._model, workload.seed
        if model.data == "Indexed":
            return Indexed(
                range(samples_of(model)),
                batch_size=model.batch,
                collate=lambda samples: batch_of(model, seed, *samples, size=len(samples)),
                seed=seed,
                epochs=model.epochs,
            )
        if model.data == "Streams":
            if model.epochs is None:
                return Streams(lambda slot: Stream(model, seed, slot, LONGEST_STREAM))
            most = LONGEST_STREAM // model.epochs
            return Streams(
                lambda slot, epoch: Stream(model, seed + 1000 * (epoch + 1), slot, most),
                epochs=model.epochs,
            )
        return lambda step, slot: batch_of(model, seed, step, slot)

    def _evaluation(self, session: Session, seed: int) -> str:
        """The bits of scores of some batches, in hex; the module stays in evaluation mode."""
        model = self._model
        batches: Indexed | list[Batch] = [
            batch_of(model, seed, -1, number) for number in range(EVALUATED)
        ]
        if model.evaluates_indexed:
            batches = Indexed(
                range(EVALUATED * model.batch - 1),  # the last batch is smaller
                batch_size=model.batch,
                collate=lambda samples: batch_of(model, seed, *samples, size=len(samples)),
            )
        session.model.eval()
        for batch in session.eval_batches(batches):
            session.gather(scores=session.model(batch.dense, batch.kjt).squeeze(1))
        found = session.gathered["scores"].numpy().tobytes().hex()
        if model.reads:
            state = sorted(session.state_dict().items())
            found += hashlib.sha256(
                b"".join(bytes_of(t).numpy().tobytes() for _, t in state)
            ).hexdigest()
        return found
