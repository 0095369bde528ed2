"""A session: a user's own model and loop, with embedding tables protected against killed ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm.base.console import say
from ecrm.base.errors import UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.base.paths import typed_path
from ecrm.checkpoint.checksums import check_share
from ecrm.checkpoint.saved_model import open_model
from ecrm.device.copies import on_host
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted
from ecrm.model.determinism import seed_slot
from ecrm.model.loss_scaler import LossScaler
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.initial_values import FileValues
from ecrm.placement.tables import row_spaces
from ecrm.protection.wire_dtype import WIRE_DTYPES
from ecrm.run.begun_file import BegunFile
from ecrm.run.log_delivery import Logged
from ecrm.run.lone_run import run_alone
from ecrm.run.reported import goal_of
from ecrm.run.session_run import start_run
from ecrm.run.slot_faults import BEFORE_STEP, Place
from ecrm.run.started import Start, Started, Wanted
from ecrm.run.surveyed import alone_or_surveyed
from ecrm.run.this_rank import is_rank, this_rank
from ecrm.session.data import Batches, Indexed, feed_of, steps_of
from ecrm.session.determinism_check import undo_is_tried
from ecrm.session.device import move, session_device
from ecrm.session.evaluation import EvalBatches, Evaluation
from ecrm.session.feed import Feed
from ecrm.session.loading import load, new_here
from ecrm.session.save import format_of, save, state_dict, undisturbed
from ecrm.session.slot_work import SessionBatches, SlotWork, first_rows
from ecrm.session.step_loop import Every, SessionLoop, check_unchanged
from ecrm.session.whole_number import whole
from ecrm.tables.batch_rows import BatchRows, find_kjts
from ecrm.tables.first_values import LARGEST_VALUES
from ecrm.tables.sparse_schedule import rates_of
from ecrm.tables.swap import large_embeddings, swap

Result = TypeVar("Result")
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Session:
    """Trains a module with embedding tables sharded over ranks and protected.

    Every EmbeddingBagCollection and EmbeddingCollection of torchrec in `model`, at any depth,
    becomes a collection of ECRM: lookups fetch rows from the ranks with the shards. The rest of the
    module is replicated, and trained as by DistributedDataParallel.

    - `model`: any module. Build its tables with device=torch.device("meta"), and give the tables an
      optimizer with `torchrec.optim.apply_optimizer_in_backward`.
    - `slots`: the number of batches in a step. The result depends on `slots`, not on the number of
      ranks. Make the loss a mean over a batch: gradients are divided by the number of slots with a
      batch, equal to `slots` until data ends.
    - `seed`: the seed of initial rows, of dropout, and of all random numbers in the loop's body.
      After the loop random numbers are the same on all ranks.
    - `dense_optimizer(parameters)`: returns the optimizer of all parameters except tables. A
      session only for evaluation needs no dense optimizer and no optimizers of tables.
    - `scheduler(optimizer)`: returns a schedule of the dense learning rate, stepped once a step. A
      `ReduceLROnPlateau` is stepped by `session.report` instead.
    - `before_step(parameters)`: called once `grad` holds the gradients of the whole step, for
      example `lambda ps: clip_grad_norm_(ps, 1.0)`.
    - `sparse(batch)`: returns the KeyedJaggedTensors with the rows to look up for a batch; by
      default all KeyedJaggedTensors found in the batch.
    - `sparse_scheduler(optimizer)`: returns a schedule of the learning rates of all rows, stepped
      once a step. The given optimizer has learning rate 1; the scheduled rate is a factor on the
      rates of all tables.
    - `sparse_rate(step)`: the same factor as a function of the step; 1 by default.
    - `grad_scaler`: scales losses in the loop's body, by `grad_scaler.scale(loss).backward()`. The
      session does the rest: gradients are unscaled, a step with a nonfinite gradient changes no
      parameter and no row, and the scale is updated. `before_step` is not called in a skipped step.
    - `average_gradients`: False adds the gradients of slots up. Use False if the loss of a slot is
      a part of the step's loss, for example `reduction="sum"` divided by all samples of the step.
    - `wire_dtype`: the dtype of rows and their gradients between hosts. With torch.bfloat16 they
      take two bytes instead of four, and the model computes with the rounded values on any number
      of ranks. Rows in shards, optimizer state, parity and saved models stay float32.
    - `pooling_factors`: the mean number of ids in a bag, by the name of the table in TorchRec's
      config, as of TorchRec's planner; 1 by default. With cluster.placement of tables, servers get
      even numbers of lookups. The result does not depend on the factors.
    - `check_determinism`: the number of first steps with every slot computed twice. The first step,
      and some later steps after commits, are undone and taken again. The run ends if a bit differs,
      or if state outside the commits changes. 0 turns the checks off. The option of `ecrm launch`
      takes precedence.
    - `device`: the device for training in a process without ranks, such as "cuda"; the CPU by
      default. On ranks `train.device` decides. The module is moved to the device. Batches are not
      moved: write `batch.dense.to(session.device)`. Ids may stay on the CPU.
    - `start`: brings up the rank; by default, the rank started by `ecrm launch`. In a notebook, or
      under plain `python`, the process trains alone, without protection.

    Raises UsageError for a table unfit for training in a session, and says how to change the table.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        dense_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        before_step: Callable[[Sequence[nn.Parameter]], Any] | None = None,
        sparse: Callable[[Any], Any] = find_kjts,
        sparse_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        sparse_rate: Callable[[int], float] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        average_gradients: bool = True,
        wire_dtype: torch.dtype = torch.float32,
        pooling_factors: Mapping[str, float] = MappingProxyType({}),
        seed: int = 0,
        check_determinism: int = 1,
        device: torch.device | str | None = None,
        start: Start | None = None,
    ) -> None:
        slots = whole(slots, "Session(slots", 1)
        seed = whole(seed, "Session(seed", 0)
        if seed >= 2**64:
            raise UsageError(f"Session(seed={seed}): a seed is below 2**64")
        if wire_dtype not in WIRE_DTYPES:
            raise UsageError(
                f"Session(wire_dtype={wire_dtype}): rows travel as torch.float32 or torch.bfloat16"
            )
        check_determinism = whole(check_determinism, "Session(check_determinism", 0)
        if sparse_scheduler is not None:
            if sparse_rate is not None:
                raise UsageError("Session has sparse_scheduler and sparse_rate: leave out one")
            sparse_rate = rates_of(sparse_scheduler)
        _check_function("dense_optimizer", dense_optimizer, "parameters")
        _check_function("scheduler", scheduler, "optimizer")
        self.model = model
        """The module; its collections belong to the session now. Call it in the loop's body."""
        self.device = session_device(device)
        """The device of the module: move inputs of the module to this device in the loop's body."""
        self._tables = swap(model, seed)
        if dense_optimizer is not None:
            self._tables.check_optimizers()
        self._described = self._tables.with_lookups(self._tables.with_values(), pooling_factors)
        self._slots, self._seed, self._check_steps = slots, seed, check_determinism
        self._sparse, self._sparse_rate = sparse, sparse_rate
        self._averages, self._wire_dtype = average_gradients, wire_dtype
        spaces = row_spaces(self._described)
        self._tables.lay_out(spaces)
        self._spaces = len(spaces)
        self._user_before_step = before_step
        self._check_dense()
        move(model, self.device, self._tables.collections)
        self._replica = ModuleReplica(
            self.model,
            dense_optimizer,
            scheduler,
            self._before_step,
            scaler=self._scaler(grad_scaler),
            device=self.device,
        )
        self._start = start or (start_run if is_rank() else alone_or_surveyed(run_alone))
        self._started: Started | None = None
        self._loop: SessionLoop | None = None
        self._listeners: list[Callable[[int, Logged], None]] = []
        self._every: list[Every] = []
        self._evaluates_alone = False
        self._told_at_start: list[str] = []
        self._evaluation: Evaluation | None = None
        self.gathered: dict[str, Tensor] = {}
        """The tensors gathered by the last loop over `eval_batches`, equal on every rank."""

    def _scaler(self, scaler: torch.amp.GradScaler | None) -> LossScaler | None:
        """The scaler of losses; `None` if absent or disabled, as a GPU scaler without a GPU."""
        self._skips = scaler is not None and scaler.is_enabled()
        return LossScaler(scaler, self.device) if scaler is not None and self._skips else None

    def _before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Call the user's `before_step` just before the dense step, alike on all dense holders."""
        assert self._started is not None
        engine, doing = self._engine, self._started.doing
        seed_slot(self._seed, engine.step, self._slots)
        if self._user_before_step is not None:
            doing(Place(engine.step, engine.view.epoch, BEFORE_STEP))
            self._user_before_step(parameters)
            doing("")

    def _check_dense(self) -> None:
        """Raise UsageError for a meta parameter other than a table, and for extra state."""
        for path, part in self.model.named_modules():
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                raise UsageError(
                    f"{path or 'the model'} is a {type(part).__name__} with get_extra_state, and "
                    "what that gives would be lost with a rank",
                    otherwise="keep that state in buffers, by register_buffer",
                )
        tables = [*self._tables.values, *self._tables.aliases]
        tables += [table.name for table in self._tables.tables]
        weights = {f"{table}.weight" for table in tables}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter.is_meta and name not in weights:
                raise UsageError(
                    f"parameter {name} is on the meta device and is no table's",
                    otherwise="build all but the tables on the CPU",
                )

    def register(self, name: str, thing: Any) -> None:
        """Have a failure, a commit and a resume treat `thing` as part of the model.

        `thing` has `state_dict` and `load_state_dict`, such as
        `torch.optim.swa_utils.AveragedModel(session.model)`. `thing` must change only in
        `before_step` or in the scheduler, alike on all ranks. Tables have no part in an average: an
        averaged model looks up the rows of the model. Call `register` before `steps`.
        """
        self._check_before("register")
        self._replica.register(name, thing)

    def on_commit(self, listener: Callable[[int, Logged], None]) -> None:
        """Have `listener(finished, {slot: {name: value}})` called for every committed step.

        `finished` is the number of finished steps: 1 for the first step, as in progress lines,
        TensorBoard, functions for `every`, and names of checkpoints. In the loop's body
        `session.step` is one less, for the step of the batch is not finished.

        The listener gets the values logged by all slots, including slots of ranks dead since. Every
        dense holder calls the listener once a step, in order of steps. For every step `is_main` is
        true in exactly one call, even after deaths: a file written only by the main rank gets every
        step once. If the main rank dies inside the listener, the next main rank repeats the call. A
        spare that takes a slot over gets no earlier steps: a list kept by the listener begins late.
        Call `on_commit` before `steps`.
        """
        self._check_before("on_commit")
        self._listeners.append(listener)

    def steps(
        self, batches: Batches, steps: int | None = None, samples: int | None = None
    ) -> Iterator[Any]:
        """Train up to step `steps`: yield the batch of every (step, slot) run by the rank.

        `batches` is an `ecrm.Indexed`, an `ecrm.Streams`, or a function of (step, slot). The batch
        of a step and slot must be the same on every request and on every rank. Without `steps`,
        training goes on to the end of the `epochs` of Indexed. Training ends before `steps` if the
        data ends earlier. A slot with ended data contributes nothing while other slots go on, and
        the loop's body gets no batch of the slot. The loop's body calls the model and `backward`,
        and must not wait for other ranks. A step undone by a failure is yielded again. Ranks
        without slots get no batch: the loop ends with the training. Then every rank has the trained
        dense part.

        `samples` is the number of samples in a step: progress and summary then count samples, too.
        Indexed knows the number.
        """
        if self._loop is not None:
            raise self._has_begun()
        self._tables.check_optimizers()
        self._replica.check_optimizer()
        if self._replica.steps_by_reports and not self._every:
            raise UsageError(
                "the scheduler steps by a value, and nothing reports any",
                otherwise="call session.report(value) in a function for session.every",
            )
        steps = steps_of(batches, self._slots, steps)
        if steps < 1:
            raise UsageError(
                f"session.steps(batches, {steps}): at least 1 is needed",
                otherwise="to evaluate a model alone, loop over session.eval_batches",
            )
        if samples is None:
            samples = batches.batch_size * self._slots if isinstance(batches, Indexed) else 0
        yield from self._steps(batches, steps, whole(samples, "session.steps(samples", 0))

    def _has_begun(self) -> UsageError:
        """The error for a session already trained, or used for evaluation alone."""
        if self._evaluates_alone:
            return UsageError(
                "session.eval_batches came before session.steps: this session evaluates alone",
                otherwise="evaluate in a function for session.every, or after the loop over "
                "session.steps",
            )
        return UsageError(
            "session.steps was called before: one session trains once",
            otherwise="make another Session for the next model",
        )

    def _steps(self, batches: Batches, steps: int, samples: int = 0) -> Iterator[Any]:
        feed = feed_of(batches, self._slots, steps, self._seed)
        self._replica.with_streams = feed.streams
        try:
            started = self._started = self._begin(steps, feed, samples)
            steps = steps if started.steps is None else started.steps
            doing, engine = started.doing, started.run.engine
            self._replica.tries_undo = partial(undo_is_tried, engine, started.check_steps)
            self._replica.used_by_steps = {"before_step": self._user_before_step}
            if engine.rank == engine.view.reporter:
                for line in (*self._told_at_start, *large_embeddings(self.model)):
                    say(line)
            slots = SessionBatches(feed, self._rows_of, engine, self._seed, doing)
            self._loop = SessionLoop(
                started,
                slots,
                SlotWork(
                    engine,
                    slots,
                    self._seed,
                    self._tables.source,
                    doing,
                    self.model,
                    self._skips,
                    self._averages,
                ),
                steps,
                self._replica,
                self._tell,
                self._every,
            )
            yield from self._loop
            # slots have drawn other numbers on each rank: a next model is drawn alike
            seed_slot(self._seed, engine.step, self._after_loop)
        except GeneratorExit:
            if not is_rank():  # on a rank, the end of the script reports the break
                say(
                    f"ecrm: warning: training was left in step {self._engine.step} of {steps}: to "
                    "end it early, call session.stop() in the loop's body",
                    on_stderr=True,
                )
            raise
        finally:
            feed.close()

    @property
    def _after_loop(self) -> int:
        """The number, for `seed_slot`, of the work after the loop: another one for each session.

        Else the models of all later sessions would begin with the same weights.
        """
        assert self._started is not None
        return self._slots + (self._started.number - 1 << 32)

    def skip(self) -> None:
        """In the loop's body: leave out the present batch; its slot sits the step out.

        All results of the body for the batch are dropped: no row asked for only by the batch
        changes, and the batch adds to no gradient. The divisor of gradients stays the same. Calling
        `backward` is optional. Logged values stay.
        """
        self._loop_of("skip").skip()

    def stop(self) -> None:
        """End training on all ranks after the present step, and keep the model.

        A call on a single rank is enough. In the loop's body the present step is the last; in a
        function for `every` the step before is the last. In a function for `on_commit` training
        ends 64 steps after the committed step, or twice `protection.commit_interval` if longer: by
        then all ranks know of the call. The loop over `steps` then ends. A run ended by `stop` is
        complete: `--resume` trains no further.
        """
        self._loop_of("stop").stop()

    def report(self, value: float | None = None, /, **values: float | None) -> None:
        """In a function for `every`: report the values found by an evaluation.

        The first `value` steps a `ReduceLROnPlateau`, a scheduler not stepped with every step.
        `every` with a `mode` compares the first value. Named `values` go into an event of the run,
        to TensorBoard, and, from the last report, into summary.json as `eval_NAME`. A value of
        `None` is undefined. Of several reports on a rank the last counts; of several ranks, the
        lowest rank counts, and a single rank may report alone. Raises UsageError for NaN, for a
        value other than a number, and for named values alone in a function with a `mode`.
        """
        found = math.nan
        if value is not None or not values:
            found = _number("session.report", value)
        named = {
            name: None if each is None else _number(f"session.report({name}", each, "=")
            for name, each in values.items()
        }
        self._loop_of("report").report(found, named)

    def _loop_of(self, what: str) -> SessionLoop:
        if self._loop is None:
            raise UsageError(f"session.{what} belongs into the body of the loop over session.steps")
        return self._loop

    def every(
        self,
        steps: int,
        *,
        mode: str | None = None,
        keep_best: bool = False,
        patience: int = 0,
        at_end: bool = False,
    ) -> Callable[[Callable[[], object]], Callable[[], object]]:
        """Decorate a function to be called on every rank after every `steps` steps.

        The function is for evaluation, with a loop over `eval_batches`. If a rank dies before all
        ranks are through with the function, all ranks call the function again for the same step. A
        run resumed at a due step calls the function again, too. A counter kept by the script counts
        the step twice.

        Changes to the optimizer last, such as a new learning rate, and must be equal on all ranks.
        Buffers are put back. Random numbers are equal on all ranks, and in every call for the same
        step.

        With a `mode`, the values given to `report` by the function are compared. The best value is
        the highest for "max" and the lowest for "min"; among equal values the first is the best.

        - `keep_best`: the model of the best value is kept as a checkpoint. `checkpoints/best` in
          the run folder leads to the checkpoint; `ecrm export` and `load` take the path.
        - `patience`: training ends after `patience` values in a row without a better value; 0 for
          never.

        With `at_end` the function is called after the last step, too; with `steps` 0 only then. If
        the last step is off the schedule, its value may be the best. The value does not count for
        `patience`, and steps no `ReduceLROnPlateau`: a resumed run has no such value.

        Raises UsageError for a `patience` with `steps` 0, and for a second function with a mode. A
        run on ranks without checkpoints refuses `keep_best` at its start; a process without ranks
        only warns.
        """
        self._check_before("every")
        steps = whole(steps, "session.every(steps", 0 if at_end else 1)
        goal = goal_of(mode, keep_best, whole(patience, "session.every(patience", 0))
        if goal is not None and goal.patience and not steps:
            raise UsageError(
                "session.every(0, patience=...) compares a single value, and so never ends "
                "training: give the steps between evaluations"
            )
        if goal is not None and any(every.goal is not None for every in self._every):
            raise UsageError("session.every has a mode twice: compare the values of one function")

        def add(work: Callable[[], object]) -> Callable[[], object]:
            def to_the_end() -> None:
                work()
                self._check_evaluated()

            self._every.append(Every(steps, to_the_end, goal, work, at_end))
            return work

        return add

    def _check_evaluated(self) -> None:
        """Raise UsageError for a loop over `eval_batches` left before its end."""
        if self._evaluation is not None:
            raise UsageError(
                "a loop over session.eval_batches was left in a function for session.every",
                otherwise="let that loop run to its end",
            )

    def eval_batches(self, batches: EvalBatches) -> Iterator[Any]:
        """Evaluate: yield the batches evaluated by the rank, for `gather` in the loop's body.

        `batches` is an `ecrm.Indexed`, with every sample used once, or a list of batches. Every
        rank must loop over the batches: in a function for `every`, or after `steps`. Without a loop
        over `steps` the session evaluates the present model, such as a model from `load`, and
        trains nothing: no optimizers are needed. Gradients are off. If a rank dies during the loop,
        all ranks begin again with the first batch, or with the function. After the loop `gathered`
        has the result.
        """
        if self._loop is None:
            self._evaluates_alone = True
            for _ in self._steps(_no_batch, 0):
                raise AssertionError("no step is trained")
        loop, started = self._running("eval_batches")
        check_unchanged(self._engine, "session.eval_batches")
        evaluation = Evaluation(
            started.run.engine,
            self._replica,
            self._seed,
            self._rows_of,
            self._tables.source,
            loop.on_recovery,
            started.doing,
            started.number,
        )
        self._evaluation = evaluation
        try:
            with torch.no_grad():
                self.gathered = yield from loop.stoppable(lambda: evaluation.run(batches))
        except StepAborted:  # the calling function for `every` begins again
            self._evaluation = None
            raise
        self._evaluation = None

    def gather(self, **tensors: Tensor) -> None:
        """Keep tensors of the present batch, [B, ...], such as scores and labels.

        After the loop over `eval_batches`, `gathered` has the tensors of all batches, in batch
        order.
        """
        if self._evaluation is None:
            raise UsageError(
                "session.gather belongs into the body of the loop over session.eval_batches"
            )
        self._evaluation.gather(tensors)

    def save(self, path: str | Path) -> None:
        """Collective, after `steps` or in a function for `every`: write the model to a file.

        The file holds the module's state_dict under TorchRec's names, tables included: a `.pt` file
        for torch.load, or a `.safetensors` file. The file appears once complete. Tables are
        gathered in windows: no rank ever holds a whole table. Raises an EcrmError on every rank if
        the file cannot be written, and NotFinite for a nonfinite row or parameter, unless
        `train.on_nonfinite` is "warn". Buffers are not checked.
        """
        (_, started), target = self._running("save"), typed_path(path)
        format_of(target)
        check_unchanged(self._engine, "session.save")
        engine, aliases = started.run.engine, self._tables.aliases
        finite = {name for name, _ in self.model.named_parameters()} if started.finite else None
        self._together(
            "save",
            lambda: save(engine, target, self._dense_state(), aliases, finite, self._before_saving),
        )

    def _before_saving(self, target: Path) -> None:
        """On the rank about to write: keep a loaded file, if `target` is about to replace it.

        A file loaded by an earlier session of the script counts, too: a resume loads it again.
        """
        for loaded in this_rank().begun if is_rank() else ():
            loaded.keep(target)

    def load(self, path: str | Path, strict: bool = True) -> None:
        """Before `steps`: begin with a model saved under TorchRec's names.

        The file is from `session.save`, from torch.save of the model's state_dict, or safetensors.
        Every rank must see the file, and the file must stay unchanged until the run is complete: a
        row never updated by a step is read from the file on demand. No rank ever holds a whole
        table. Optimizers and registered objects begin as without the file.

        With `strict=False` tables may have more rows in the model than in the file, and the file
        may lack tables and other tensors. New rows and tensors begin as without the file; a printed
        line lists the new parts. Tensors found only in the file are refused.

        Raises UsageError for a missing file, and for names, shapes or dtypes different from the
        model's, with the differences. Raises DataError for a file cut short. A changed file ends
        the run. Another file may take its name.
        """
        self._check_before("load")
        source = typed_path(path).absolute()
        if is_rank():
            spec = this_rank().next_spec
            assert spec.run_dir is not None, "a script's run has a folder"
            begun = BegunFile.of(source, spec.run_dir, spec.resume)
            source = begun.to_load()
        state, opened = open_model(source)
        if is_rank():
            this_rank().begun.append(replace(begun, opened=opened))
        self._load(state, f"session.load: {path}", str(source), opened, strict)
        if not any(isinstance(table.initial, FileValues) for table in self._described):
            check_share(source, 0, 1)  # without rows to read, ranks do not check the file in shares
        told = [] if strict else new_here(self.model, self._described, state)
        self._told_at_start = [f"session.load: {line}" for line in told]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Before `steps`: begin with a state_dict under TorchRec's names, equal on all ranks.

        Every rank keeps a copy of the tables, of at most 256 MB. Raises UsageError for larger
        tables, and for names, shapes or dtypes different from the model's.
        """
        self._check_before("load_state_dict")
        self._check_size("load_state_dict", "save it to a file, and call session.load(path)")
        self._load(state_dict, "session.load_state_dict: the state_dict")

    def state_dict(self) -> dict[str, Tensor]:
        """Collective, after `steps` or in a function for `every`: the whole model, on every rank.

        The result is a copy of the module's state_dict under TorchRec's names, tables included,
        without entries other than tensors. Raises UsageError for tables of more than 256 MB.
        """
        _, started = self._running("state_dict")
        check_unchanged(self._engine, "session.state_dict")
        self._check_size(
            "state_dict", "call session.save(path), and torch.load(path, mmap=True) where needed"
        )
        engine, aliases = started.run.engine, self._tables.aliases
        return self._together(
            "state_dict", lambda: state_dict(engine, self._dense_state(), aliases)
        )

    def _load(
        self,
        state: Mapping[str, Any],
        where: str,
        source: str = "",
        opened: OpenedFile | None = None,
        strict: bool = True,
    ) -> None:
        tables, aliases = self._described, self._tables.aliases
        self._described = load(self.model, tables, aliases, state, where, source, opened, strict)

    def _check_size(self, what: str, otherwise: str) -> None:
        """Raise UsageError for tables too large for a copy on every rank."""
        size = sum(4 * table.rows * table.dim for table in self._described)
        if size > LARGEST_VALUES:
            raise UsageError(
                f"session.{what}: the tables have {size >> 20:,} MB, and every rank would hold "
                f"them, at most {LARGEST_VALUES >> 20} MB",
                otherwise=otherwise,
            )

    def _together(self, what: str, work: Callable[[], Result]) -> Result:
        """Collective, between steps: the result of `work`, even if ranks die meanwhile."""
        loop, started = self._running(what)
        engine, where = started.run.engine, f"session.{what}"
        going = loop.stoppable(lambda: undisturbed(engine, where, work, loop.on_recovery))
        while True:
            try:
                next(going)
            except StopIteration as end:
                done: Result = end.value
                return done

    def _dense_state(self) -> dict[str, Tensor]:
        """The module's tensors except tables, on the CPU, by the names of its state_dict."""
        self._replica.begin_slot(0)  # with the buffers of the step
        found = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if isinstance(tensor, Tensor) and not tensor.is_meta
        }
        return dict(zip(found, on_host(*found.values())))

    @property
    def rank(self) -> int:
        """The number of the process among all processes of the run, once `steps` has begun."""
        return self._begun("rank").run.engine.rank

    @property
    def step(self) -> int:
        """The number of finished steps: 0 in the loop's body for the first step, 1 for the second.

        A counter kept by the script, such as `enumerate`, counts the batches of the rank, and
        batches given again after a failure.
        """
        return self._begun("step").run.engine.step

    @property
    def data_began(self) -> int:
        """The step with the first batch of the data: not 0 in a config's run on new data."""
        return self._begun("data_began").data_began

    @property
    def is_main(self) -> bool:
        """Whether the rank should print; after the death of the main rank a survivor takes over.

        True on exactly one rank, once `steps` has begun.
        """
        engine = self._begun("is_main").run.engine
        as_main = None if self._loop is None else self._loop.tells_as_main
        return engine.rank == engine.view.reporter if as_main is None else as_main

    @property
    def _engine(self) -> Engine:
        return self._begun("step").run.engine

    def _begun(self, what: str) -> Started:
        if self._started is None:
            raise UsageError(
                f"session.{what} is there once the loop over session.steps has begun",
                otherwise="use it in the loop's body, in a function for session.every, or after "
                "the loop",
            )
        if is_rank():
            self._check_current(what, self._started)
        return self._started

    def _check_current(self, what: str, started: Started) -> None:
        """Raise UsageError where another session of the script has begun since."""
        part = this_rank().part
        if part is not None and part.engine is not started.run.engine:
            raise UsageError(
                f"session.{what}: another session has begun since, which ended this one",
                otherwise="call it before the next session's loop",
            )

    def _check_before(self, what: str) -> None:
        if self._loop is not None:
            raise UsageError(f"session.{what} belongs before the loop over session.steps")

    def _running(self, what: str) -> tuple[SessionLoop, Started]:
        if self._started is None or self._loop is None:
            raise UsageError(f"session.{what} belongs after the first step of session.steps")
        self._begun(what)
        if not self._loop.between_steps:
            raise UsageError(
                f"session.{what} is called while step {self.step} is under way",
                otherwise="call it after the loop over session.steps has come to its end, or in a "
                "function for session.every; to end that loop early, call session.stop() in its "
                "body in the place of break",
            )
        if self._evaluation is not None:
            raise UsageError(
                f"session.{what} is called in the body of a loop over session.eval_batches, or "
                "after one that was left",
                otherwise="let that loop run to its end before",
            )
        if torch.is_inference_mode_enabled():
            raise UsageError(
                f"session.{what} is called under torch.inference_mode()",
                otherwise="leave that out: gradients are off in the loop already",
            )
        return self._loop, self._started

    def log(self, **values: float | Tensor) -> None:
        """Note numbers of the present batch, such as its loss, for `on_commit` and the progress.

        The numbers count once for every step and slot, however often a failure has the step redone.
        """
        self._loop_of("log").log(values)

    def _begin(self, steps: int, feed: Feed, samples: int) -> Started:
        self._replica.check_parameters()
        self._replica.check_frozen("session.steps")
        self._replica.start_here()
        return self._start(
            Wanted(
                self._described,
                self._replica.reset,
                self._slots,
                self._seed,
                steps,
                self._sparse_rate,
                self._check_steps,
                feed.streams,
                self.device,
                any(every.goal is not None and every.goal.keep_best for every in self._every),
                samples,
                self._wire_dtype,
                partial(first_rows, feed, self._rows_of, self._spaces),
            )
        )

    def _rows_of(self, batch: Any) -> BatchRows:
        found = self._sparse(batch)
        one = isinstance(found, (KeyedJaggedTensor, TensorDict))
        return self._tables.batch_rows([found] if one else found, self._spaces)

    def _tell(self, step: int, logged: Logged) -> None:
        for listener in self._listeners:
            listener(step, logged)


def _check_function(name: str, thing: Any, given: str) -> None:
    """Raise UsageError for a ready-made optimizer or schedule in place of a function."""
    if thing is not None and not callable(thing):
        kind = f"{type(thing).__module__}.{type(thing).__name__}"
        raise UsageError(
            f"Session({name}=...) is a {kind}, and not a function that makes one",
            otherwise=f"type {name}=lambda {given}: {type(thing).__name__}({given}, ...)",
        )


def _number(where: str, value: object, sign: str = "(") -> float:
    """A value given to `report`: an int stays an int. Raises UsageError for NaN and non-numbers."""
    try:
        number = value if type(value) is int else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{where}{sign}{value!r}): give one number") from None
    if math.isnan(number):
        raise UsageError(f"{where}{sign}nan): there is nothing to go by")
    return number


def _no_batch(step: int, slot: int) -> None:
    """The batches of a session without training."""
