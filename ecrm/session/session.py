"""The session: a user's own model and loop, with embedding tables that survive killed ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm.base.console import say
from ecrm.base.opened_file import OpenedFile
from ecrm.base.paths import typed_path
from ecrm.checkpoint.checksums import check_share
from ecrm.checkpoint.saved_model import open_model
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted
from ecrm.engine.slot_faults import BEFORE_STEP, Place
from ecrm.errors import UsageError
from ecrm.model.determinism import seed_slot
from ecrm.model.loss_scaler import LossScaler
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.initial_values import FileValues
from ecrm.placement.tables import row_spaces
from ecrm.session.alone import run_alone
from ecrm.session.batch_rows import BatchRows, find_kjts
from ecrm.session.begun_file import BegunFile
from ecrm.session.build import start_run
from ecrm.session.data import Batches, feed_of, steps_of
from ecrm.session.determinism_check import undo_is_tried
from ecrm.session.device import move, session_device
from ecrm.session.evaluation import EvalBatches, Evaluation
from ecrm.session.first_values import LARGEST_VALUES
from ecrm.session.loading import load, new_here
from ecrm.session.log_delivery import Logged
from ecrm.session.rank import is_rank, this_rank
from ecrm.session.reported import goal_of
from ecrm.session.run import Start, Started, Wanted
from ecrm.session.save import format_of, save, state_dict, undisturbed
from ecrm.session.slot_work import SessionBatches, SlotWork
from ecrm.session.sparse_schedule import rates_of
from ecrm.session.step_loop import Every, SessionLoop, check_unchanged
from ecrm.session.swap import large_embeddings, swap
from ecrm.session.whole_number import whole
from ecrm.transport.gpu_copies import on_host

Result = TypeVar("Result")
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Session:
    """Trains a module whose embedding tables are sharded over ranks and protected.

    Every EmbeddingBagCollection and EmbeddingCollection of torchrec in `model`, wherever it sits,
    is replaced by one that looks its rows up on the ranks that hold them. The rest of the module is
    replicated, and trained as DistributedDataParallel would.

    - `model`: any module. Build its tables with device=torch.device("meta"), and give them an
      optimizer with `torchrec.optim.apply_optimizer_in_backward`.
    - `slots`: how many batches make up a step. The result depends on it, and not on the number of
      ranks. Losses should be means over a batch: gradients are divided by the number of slots
      that have a batch, which is `slots` until data ends.
    - `seed`: of initial rows, of dropout, and of everything random in the loop's body. Behind the
      loop random numbers are the same on all ranks.
    - `dense_optimizer(parameters)`: the optimizer of all parameters that are not tables. A session
      that only evaluates needs none, nor optimizers of tables.
    - `scheduler(optimizer)`: a schedule of its learning rate, stepped once a step. A
      `ReduceLROnPlateau` is stepped by `session.report` instead.
    - `before_step(parameters)`: called when their `grad` are those of the whole step, such as
      `lambda ps: clip_grad_norm_(ps, 1.0)`.
    - `sparse(batch)`: the KeyedJaggedTensors of a batch whose rows the model looks up; by default
      all that are found in it.
    - `sparse_scheduler(optimizer)`: a schedule of the learning rates of all rows, stepped once a
      step. Its optimizer has learning rate 1: what it makes of that is a factor on each table's.
    - `sparse_rate(step)`: the same factor as a function of the step; by default 1.
    - `grad_scaler`: scales the losses in the loop's body, `grad_scaler.scale(loss).backward()`. All
      else is done here: gradients are those of the loss itself, a step in which one is not finite
      changes no parameter and no row, and the scale follows. `before_step` is not called then.
    - `average_gradients`: False adds the gradients of slots up, for losses that are each a slot's
      part of the step's loss, such as `reduction="sum"` divided by all samples of the step.
    - `check_determinism`: in so many first steps each slot is computed twice, and the first step is
      undone and taken again. The run ends where a bit differs, and where something changes that no
      commit has. 0 leaves that out. The option of `ecrm launch` comes before this number.
    - `device`: where the module is trained in a process alone, such as "cuda"; by default the CPU.
      On ranks `train.device` says it. The module is moved there. Batches stay where they are: write
      `batch.dense.to(session.device)`. Ids may stay on the CPU.
    - `start`: what brings up this rank; by default, the one that `ecrm launch` has started. In a
      notebook, or under plain `python`, this process then trains alone, and nothing is protected.

    Raises UsageError where a table cannot be trained so, and says what to change.
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
        seed: int = 0,
        check_determinism: int = 1,
        device: torch.device | str | None = None,
        start: Start | None = None,
    ) -> None:
        slots = whole(slots, "Session(slots", 1)
        seed = whole(seed, "Session(seed", 0)
        if seed >= 2**64:
            raise UsageError(f"Session(seed={seed}): a seed is below 2**64")
        check_determinism = whole(check_determinism, "Session(check_determinism", 0)
        if sparse_scheduler is not None:
            if sparse_rate is not None:
                raise UsageError("Session has sparse_scheduler and sparse_rate: leave out one")
            sparse_rate = rates_of(sparse_scheduler)
        _check_function("dense_optimizer", dense_optimizer, "parameters")
        _check_function("scheduler", scheduler, "optimizer")
        self.model = model
        """The module, whose collections are the session's now: call it in the loop's body."""
        self.device = session_device(device)
        """Where the module is: move to it what the loop's body gives to the module."""
        self._tables = swap(model, seed)
        if dense_optimizer is not None:
            self._tables.check_optimizers()
        self._described = self._tables.with_values()
        self._slots, self._seed, self._check_steps = slots, seed, check_determinism
        self._sparse, self._sparse_rate = sparse, sparse_rate
        self._averages = average_gradients
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
        self._start = start or (start_run if is_rank() else run_alone)
        self._started: Started | None = None
        self._loop: SessionLoop | None = None
        self._listeners: list[Callable[[int, Logged], None]] = []
        self._every: list[Every] = []
        self._evaluates_alone = False
        self._opened: OpenedFile | None = None
        self._begun_with: BegunFile | None = None
        self._told_at_start: list[str] = []
        self._evaluation: Evaluation | None = None
        self.gathered: dict[str, Tensor] = {}
        """What the last loop over `eval_batches` has gathered, the same on every rank."""

    def _scaler(self, scaler: torch.amp.GradScaler | None) -> LossScaler | None:
        """What scales losses; None where nothing does, as without a GPU for a scaler of GPUs."""
        self._skips = scaler is not None and scaler.is_enabled()
        return LossScaler(scaler, self.device) if scaler is not None and self._skips else None

    def _before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Just before the dense part steps, alike on all ranks that hold it."""
        assert self._started is not None
        engine, doing = self.engine, self._started.doing
        seed_slot(self._seed, engine.step, self._slots)
        if self._user_before_step is not None:
            doing(Place(engine.step, engine.view.epoch, BEFORE_STEP))
            self._user_before_step(parameters)
            doing("")

    def _check_dense(self) -> None:
        """Raise UsageError where a parameter has no memory and is no table, and for extra state."""
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

        It is anything with `state_dict` and `load_state_dict`, such as
        `torch.optim.swa_utils.AveragedModel(session.model)`, that changes in `before_step` or in
        the scheduler, alike on all ranks. Tables have no part in such an average: it looks up the
        rows of the model. Call it before `steps`.
        """
        self._check_before("register")
        self._replica.register(name, thing)

    def on_commit(self, listener: Callable[[int, Logged], None]) -> None:
        """Have `listener(step, {slot: {name: value}})` called for each step that is committed.

        It gets what all slots have logged, also those of ranks that died since. It is called on
        each rank that holds the dense parameters, once a step, in order of steps. For each step
        `is_main` is true in one of these calls, whoever dies: a file that the main rank alone
        writes gets each step once. Where the main rank dies in the function itself, the next one
        calls it again. Call it before `steps`.
        """
        self._check_before("on_commit")
        self._listeners.append(listener)

    def steps(self, batches: Batches, steps: int | None = None) -> Iterator[Any]:
        """Train up to step `steps`: gives the batch of each (step, slot) that this rank runs.

        `batches` are those of `ecrm.Indexed`, of `ecrm.Streams`, or a function of (step, slot). It
        must give the same batch whenever it is asked, on whatever rank. Without `steps` training
        goes on to the end of the `epochs` of Indexed. It ends before `steps` where the data does.
        A slot whose data has ended before that of others contributes nothing, and the loop's body
        gets no batch of it. The loop's body calls the model and `backward`, and nothing that waits
        for other ranks. A step that a failure has undone is given again. Ranks without slots get no
        batch: their loop ends when training does.
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
        yield from self._steps(batches, steps)

    def _has_begun(self) -> UsageError:
        """Why a session cannot begin to train."""
        if self._evaluates_alone:
            return UsageError(
                "session.eval_batches came before session.steps: this session evaluates alone",
                otherwise="evaluate in a function for session.every, or after the loop over "
                "session.steps",
            )
        return UsageError(
            "session.steps was called before: one session trains once",
            otherwise="train the next model in a run of its own, by another ecrm launch",
        )

    def _steps(self, batches: Batches, steps: int) -> Iterator[Any]:
        feed = feed_of(batches, self._slots, steps, self._seed)
        self._replica.with_streams = feed.streams
        try:
            started = self._started = self._begin(steps, open_end=feed.streams)
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
                self.model,
                self._tell,
                self._every,
            )
            yield from self._loop
            # slots have drawn other numbers on each rank: a next model is drawn alike
            seed_slot(self._seed, engine.step, self._slots)
        except GeneratorExit:
            if not is_rank():  # a rank's end tells it
                print(
                    f"ecrm: warning: training was left in step {self.engine.step} of {steps}: to "
                    "end it early, call session.stop() in the loop's body",
                    file=sys.stderr,
                )
            raise
        finally:
            feed.close()

    def skip(self) -> None:
        """In the loop's body: leave the batch at hand out; its slot sits the step out.

        Whatever the body has computed of it counts for nothing: no row that it alone asks for
        changes, nor does it add to a gradient. Gradients are divided by the number of slots as
        before. Call `backward` or not. What was logged stays.
        """
        self._loop_of("skip").skip()

    def stop(self) -> None:
        """End training on all ranks after the step at hand, and keep the model.

        One call on one rank is enough. In the loop's body the step under way is the last one, in a
        function for `every` the step before it. In a function for `on_commit` training ends 64
        steps after the committed one, or after twice `cluster.commit_interval` if that is more:
        all ranks know of it then. The loop over `steps` then comes to its end. A run that has ended
        so is complete: `--resume` goes no further.
        """
        self._loop_of("stop").stop()

    def report(self, value: float) -> None:
        """In a function for `every`: report the value that an evaluation has come to.

        A scheduler steps by it that does not step with each step, `ReduceLROnPlateau`, and `every`
        compares it where it has a `mode`. Of several values the last one counts, and of several
        ranks' that of the lowest rank: so one rank may report alone. Raises UsageError for a value
        that is no number.
        """
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"session.report({value!r}): give one number") from None
        if math.isnan(value):
            raise UsageError("session.report(nan): there is nothing to go by")
        self._loop_of("report").report(value)

    def _loop_of(self, what: str) -> SessionLoop:
        if self._loop is None:
            raise UsageError(f"session.{what} belongs into the body of the loop over session.steps")
        return self._loop

    def every(
        self, steps: int, *, mode: str | None = None, keep_best: bool = False, patience: int = 0
    ) -> Callable[[Callable[[], object]], Callable[[], object]]:
        """Decorate a function that every rank is to call after each `steps` steps.

        It is for evaluation: `eval_batches` belongs into it. Where a rank dies before all are
        through with it, all call it again for the same step. So does a run that is resumed at a
        step at which it is due. So a counter of the script's own counts such a step twice.

        Changes of the optimizer, such as of a learning rate, last, and are to be the same on all
        ranks. Buffers are put back. Random numbers are the same on all ranks, and in each call.

        With a `mode` the values that the function gives to `report` are compared. The best is the
        highest for "max", the lowest for "min", and of equal values the first.

        - `keep_best`: the model of the best value is kept as a checkpoint, to which
          `checkpoints/best` in the run folder leads. `ecrm export` and `load` take that path.
        - `patience`: training ends after so many values in a row without a better one; 0 for never.

        Raises UsageError for a second function with a mode, and where no checkpoint can be kept.
        """
        self._check_before("every")
        steps = whole(steps, "session.every(steps", 1)
        goal = goal_of(mode, keep_best, whole(patience, "session.every(patience", 0))
        if goal is not None and any(every.goal is not None for every in self._every):
            raise UsageError("session.every has a mode twice: compare the values of one function")

        def add(work: Callable[[], object]) -> Callable[[], object]:
            def to_the_end() -> None:
                work()
                self._check_evaluated()

            self._every.append(Every(steps, to_the_end, goal, work))
            return work

        return add

    def _check_evaluated(self) -> None:
        """Raise UsageError where a loop over `eval_batches` was left before its end."""
        if self._evaluation is not None:
            raise UsageError(
                "a loop over session.eval_batches was left in a function for session.every",
                otherwise="let that loop run to its end",
            )

    def eval_batches(self, batches: EvalBatches) -> Iterator[Any]:
        """Evaluate: gives the batches that this rank evaluates, for `gather` in the loop's body.

        `batches` are an `ecrm.Indexed`, each sample of it once, or a list of batches. Every rank
        must loop over them: in a function for `every`, or after `steps`. Without a loop over
        `steps` the session evaluates the model as it is, such as one of `load`, and trains nothing:
        no optimizers are needed then. Gradients are off. Where a
        rank dies meanwhile, all begin again with the first batch, or with the function. After the
        loop `gathered` has the result.
        """
        if self._loop is None:
            self._evaluates_alone = True
            for _ in self._steps(_no_batch, 0):
                raise AssertionError("no step is trained")
        loop, started = self._running("eval_batches")
        check_unchanged(self.engine, "session.eval_batches")
        evaluation = Evaluation(
            started.run.engine,
            self._replica,
            self._seed,
            self._rows_of,
            self._tables.source,
            loop.went_back,
            started.doing,
        )
        self._evaluation = evaluation
        try:
            with torch.no_grad():
                self.gathered = yield from loop.stoppable(lambda: evaluation.run(batches))
        except StepAborted:  # the function for `every` that called it begins again
            self._evaluation = None
            raise
        self._evaluation = None

    def gather(self, **tensors: Tensor) -> None:
        """Keep tensors of the batch at hand, [B, ...], such as scores and labels.

        `gathered` has them after the loop over `eval_batches`, of all batches and in their order.
        """
        if self._evaluation is None:
            raise UsageError(
                "session.gather belongs into the body of the loop over session.eval_batches"
            )
        self._evaluation.gather(tensors)

    def save(self, path: str | Path) -> None:
        """Collective, after `steps` or in a function for `every`: write the model to one file.

        It holds the module's state_dict under TorchRec's names, tables and all: a `.pt` file for
        torch.load, or a `.safetensors` file. The file appears once it is complete. Tables are
        gathered in windows: no rank ever holds a whole one. Raises an EcrmError on every rank where
        it cannot be written, NotFinite where a row or a parameter is not finite, unless
        `train.on_nonfinite` is "warn". Buffers are not looked at.
        """
        (_, started), target = self._running("save"), typed_path(path)
        format_of(target)
        check_unchanged(self.engine, "session.save")
        engine, aliases = started.run.engine, self._tables.aliases
        finite = {name for name, _ in self.model.named_parameters()} if started.finite else None
        self._together(
            "save",
            lambda: save(engine, target, self._dense_state(), aliases, finite, self._before_saving),
        )

    def _before_saving(self, target: Path) -> None:
        """On the rank that is about to write a file."""
        if self._opened is not None and self._begun_with is not None:
            self._begun_with.keep(target, self._opened)

    def load(self, path: str | Path, strict: bool = True) -> None:
        """Before `steps`: begin with a model that was saved under TorchRec's names.

        The file is one of `session.save`, of torch.save of the model's state_dict, or safetensors.
        Every rank must see it, and it must stay as it is until the run is complete: a row is read
        from it when it is asked for and no step has updated it. So no rank ever holds a whole
        table. Optimizers and registered objects are as they are without it.

        Where that is not `strict`, tables may have more rows here than there, and tables and other
        tensors may be missing there: the new ones begin as without it. A line tells of them. What
        is there and not here is refused.

        Raises UsageError where there is no such file, or names, shapes or dtypes are not those of
        the model: it says which. Raises DataError where it is cut short. A file that has changed
        ends the run. Another file may take its name.
        """
        self._check_before("load")
        source = typed_path(path).absolute()
        if is_rank():
            job = this_rank().next_job
            assert job.run_dir is not None, "a script's run has a folder"
            self._begun_with = BegunFile.of(source, job.run_dir, job.resume)
            this_rank().begun.append(self._begun_with)
            source = self._begun_with.to_load()
        state, opened = open_model(source)
        self._opened = opened
        self._load(state, f"session.load: {path}", str(source), opened, strict)
        if not any(isinstance(table.initial, FileValues) for table in self._described):
            check_share(source, 0, 1)  # no table's rows are read, for which ranks share the file
        told = [] if strict else new_here(self.model, self._described, state)
        self._told_at_start = [f"session.load: {line}" for line in told]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Before `steps`: begin with a state_dict under TorchRec's names, the same on all ranks.

        Every rank keeps a copy of its tables, so there are at most 256 MB of them. Raises
        UsageError for more, and where names, shapes or dtypes are not those of the model.
        """
        self._check_before("load_state_dict")
        self._check_size("load_state_dict", "save it to a file, and call session.load(path)")
        self._load(state_dict, "session.load_state_dict: the state_dict")

    def state_dict(self) -> dict[str, Tensor]:
        """Collective, after `steps` or in a function for `every`: the whole model, on every rank.

        It is the module's state_dict under TorchRec's names, tables and all, a copy. What is no
        tensor is left out. Raises UsageError where the tables have more than 256 MB.
        """
        _, started = self._running("state_dict")
        check_unchanged(self.engine, "session.state_dict")
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
        """Raise UsageError where the tables are too large for every rank to hold them."""
        size = sum(4 * table.rows * table.dim for table in self._described)
        if size > LARGEST_VALUES:
            raise UsageError(
                f"session.{what}: the tables have {size >> 20:,} MB, and every rank would hold "
                f"them, at most {LARGEST_VALUES >> 20} MB",
                otherwise=otherwise,
            )

    def _together(self, what: str, work: Callable[[], Result]) -> Result:
        """Collective, between steps: what `work` gives, whoever dies meanwhile."""
        loop, started = self._running(what)
        engine, where = started.run.engine, f"session.{what}"
        going = loop.stoppable(lambda: undisturbed(engine, where, work, loop.went_back))
        while True:
            try:
                next(going)
            except StopIteration as end:
                done: Result = end.value
                return done

    def _dense_state(self) -> dict[str, Tensor]:
        """The module's tensors that are not tables, by the names of its state_dict."""
        self._replica.begin_slot(0)  # with the buffers of the step
        found = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if isinstance(tensor, Tensor) and not tensor.is_meta
        }
        return dict(zip(found, on_host(*found.values())))

    @property
    def engine(self) -> Engine:
        """This rank's engine, once `steps` has begun."""
        return self._begun("engine").run.engine

    @property
    def step(self) -> int:
        """The number of steps that are done: in the loop's body, the step of the batch at hand.

        A counter of the script's own, such as that of `enumerate`, counts batches of this rank, and
        those that a failure has given again.
        """
        return self._begun("step").run.engine.step

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that should print; after its death another one is.

        It is true on exactly one rank, once `steps` has begun.
        """
        engine = self._begun("is_main").run.engine
        as_main = None if self._loop is None else self._loop.tells_as_main
        return engine.rank == engine.view.reporter if as_main is None else as_main

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
        """Note numbers of the batch at hand, such as its loss, for `on_commit` and the progress.

        They count once for each step and slot, however often a failure has the step redone.
        """
        self._loop_of("log").log(values)

    def _begin(self, steps: int, open_end: bool) -> Started:
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
                open_end,
                self.device,
                any(every.goal is not None and every.goal.keep_best for every in self._every),
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
    """Raise UsageError where an optimizer or a schedule is given that is made already."""
    if thing is not None and not callable(thing):
        kind = f"{type(thing).__module__}.{type(thing).__name__}"
        raise UsageError(
            f"Session({name}=...) is a {kind}, and not a function that makes one",
            otherwise=f"type {name}=lambda {given}: {type(thing).__name__}({given}, ...)",
        )


def _no_batch(step: int, slot: int) -> None:
    """Batches of a session that trains nothing."""
