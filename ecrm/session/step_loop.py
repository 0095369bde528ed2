"""The loop of a session: the run's steps, the user's functions between steps, and logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from ecrm.base.console import say
from ecrm.base.errors import UsageError
from ecrm.engine import events
from ecrm.engine.dense import spread_dense
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopRequested
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.unseen_state import Seen, first_change, of_module, of_objects, state_of
from ecrm.run.log_delivery import LogDelivery, Logged
from ecrm.run.reported import Findings, Goal, Reported, ended_early
from ecrm.run.sealed import meet, sealed
from ecrm.run.slot_faults import AFTER, EVERY, ON_COMMIT, Place
from ecrm.run.started import Started, too_late
from ecrm.run.step_loop import StepLoop
from ecrm.run.user_code import user_code_of
from ecrm.session.determinism_check import kept
from ecrm.session.rehearsal import SlotsElsewhere
from ecrm.session.slot_work import SessionBatches, SlotWork

Result = TypeVar("Result")


@dataclass(frozen=True)
class Every:
    """A function called on all ranks after every `steps` steps, such as an evaluation.

    With `steps` 0 only the end counts. `at_end`: whether the function is called after the last
    step, too. `goal`: the comparison of the reported values; `None` without comparison.
    `function`: the script's own part of `work`.
    """

    steps: int
    work: Callable[[], object]
    goal: Goal | None = None
    function: Callable[[], object] | None = None
    at_end: bool = False

    def after(self, step: int, last: bool) -> bool:
        """Whether the function is due once `step` steps are done; `last`: training is over."""
        return step > 0 and (self.on_schedule(step) or (last and self.at_end))

    def on_schedule(self, step: int) -> bool:
        """Whether a run of any length calls the function after `step` steps."""
        return self.steps > 0 and step % self.steps == 0


class WorkBetweenSteps:
    """The user's functions between steps, each called once a step on all ranks.

    All ranks call a function, then agree on the end of the function: a seal. After a failure all
    ranks give the function up, with StepAborted, and begin with the due functions, as after a
    failure in a step. All ranks then call the function again from its start, unless a survivor
    knows of the seal. So the next main rank does the work lost with the main rank. After a call the
    model is back in its earlier modes.

    `allowed`: whether a function is running, and ranks may work together meanwhile. `seed(number)`
    seeds random numbers for a call of a function. `steps`: the number of steps of the run.
    """

    def __init__(
        self,
        started: Started,
        module: nn.Module,
        every: Sequence[Every],
        seed: Callable[[int], None],
        steps: int,
    ) -> None:
        self._run, self._engine = started.run, started.run.engine
        self._steps, self._data_began = steps, started.data_began
        self._module, self._every, self._seed = module, every, seed
        self._told_again = self._told_buffer = False
        self._doing: Callable[[Place | str], None] = started.doing
        self._done_at = [-1] * len(every)
        self.allowed, self._recoveries = False, 0
        self._stops, self._reported, self._comparing = False, math.nan, False
        self._named: Mapping[str, float | None] = {}
        self.reports = 0

    @property
    def compares(self) -> bool:
        """Whether reported values of a function are compared."""
        return any(every.goal is not None for every in self._every)

    def stop(self) -> None:
        """Have training end after the running function."""
        self._stops = True

    def report(self, value: float, named: Mapping[str, float | None]) -> None:
        """Note the values found by the running function; NaN stands for no value to compare.

        Raises UsageError if a comparison waits for the value, and all named values are defined: the
        function forgot the value.
        """
        if math.isnan(value) and self._comparing and None not in named.values():
            first = next(iter(named))
            raise UsageError(
                "session.every(mode=...) compares the first value of session.report, and a named "
                f"value does not count: type session.report({first}, {first}={first})"
            )
        self._reported, self._named = value, named

    def is_due(self, step: int) -> bool:
        """Whether a function is still to be called after `step` steps."""
        return bool(self._due(step))

    def _due(self, step: int) -> list[int]:
        engine = self._engine
        last = step == self._steps or (step == engine.step and engine.over)
        return [
            number
            for number, every in enumerate(self._every)
            if every.after(step, last) and self._done_at[number] != step
        ]

    def do(self) -> bool:
        """Collective: call the due functions. Returns whether training ends.

        Raises StepAborted after a failure.
        """
        dense = self._engine.state.dense
        self._engine.commit()  # reports of a function become part of the committed state
        if isinstance(dense, ModuleReplica):
            dense.note()
        while due := self._due(self._engine.step):  # a function may end training
            number = due[0]
            modes = [(part, part.training) for part in self._module.modules()]
            try:
                self._seed(number)
                self._call(self._every[number])
                self._seal(number)
            finally:
                for part, training in modes:
                    part.training = training
            self._run.restart_clock()
        return self._engine.over

    def _call(self, every: Every) -> None:
        """Call a function; raises StepAborted after a failure, even if user code catches errors."""
        before = self._kept_by(every)
        self.allowed, self._recoveries = True, self._engine.recovery.completed
        self._comparing = every.goal is not None
        self._stops, self._reported, self._named = False, math.nan, {}
        self.goes_on()
        try:
            every.work()
            if self.given_up:
                raise StepAborted
            check_unchanged(self._engine, "a function for session.every")
            self._tell_of_buffers()
        except Exception:
            if self.given_up:
                self._tell_of_counts(before, self._kept_by(every))
                raise StepAborted from None
            raise
        finally:
            self.allowed = False
        self._doing("")

    def _kept_by(self, every: Every) -> Seen:
        """The state possibly changed by a function: objects used, and attributes of the model."""
        of_function = of_objects({"": every.function}, state_of(self._module))
        return {
            **of_function,
            **{f"the model's {n}": v for n, v in of_module(self._module).items()},
        }

    def _tell_of_counts(self, before: Seen, after: Seen) -> None:
        """Warn once of state changed by a function before its repeated call."""
        changed = first_change(before, after)
        if changed and not self._told_again:
            self._told_again = True
            say(
                f"! a function for session.every is called again after a failure, and has changed "
                f"{changed.strip()}: where a result depends on it, report a value, or register an "
                "object with state_dict and load_state_dict"
            )

    def _tell_of_buffers(self) -> None:
        """Warn once of a buffer changed by a function; the buffer is put back."""
        dense = self._engine.state.dense
        name = dense.changed_buffer if isinstance(dense, ModuleReplica) else ""
        if name and not self._told_buffer and self._engine.rank == self._engine.view.reporter:
            self._told_buffer = True
            say(
                f"! a function for session.every has changed buffer {name}, which is put back: "
                "buffers change in the loop's body and in before_step"
            )

    def _seal(self, number: int) -> None:
        """Collective: agree on the end of a function. Raises StepAborted after a failure."""
        engine, step = self._engine, self._engine.step
        user_code = user_code_of(engine)
        seals = user_code.seals
        before = after = Reported()
        try:
            meet(engine, "the end of a function for session.every")
            every, before = self._every[number], self._share()
            goal, on_schedule = every.goal, every.on_schedule(step)
            after = before.after(
                self._reported,
                step,
                number,
                goal,
                self._data_began,
                on_schedule=on_schedule,
            )
            if self._named:
                after = replace(after, named={**after.named, **self._named})
            self._follow(after, goal)
            self._tell_of_values()
            user_code.seal(engine)
        finally:
            if user_code.seals > seals and engine.step == step:
                self._done_at[number] = step
                dense = engine.state.dense
                if isinstance(dense, ModuleReplica):
                    if after is not before:
                        # an undisturbed run of more steps has no such value for its scheduler
                        value = self._reported if on_schedule else math.nan
                        dense.report(value, after.state())
                        self.reports += not math.isnan(self._reported)
                    dense.commit()  # of reports, and of the function's changes to the optimizer
                if self._stops:
                    engine.end_here()

    def _share(self) -> Reported:
        """Collective: share the wish to end training, and the values of the lowest reporting rank.

        Returns the values reported before, known to dense holders.
        """
        dense = self._engine.state.dense
        reports = dense.reports if isinstance(dense, ModuleReplica) else None
        mine = Findings(self._stops, self._reported, self._named, reports)
        with self._engine.recovery.recovering():
            said = self._engine.state.transport.gather(vars(mine))
        found = [Findings(**each) for each in said.values()]
        self._stops = any(each.stops for each in found)
        values = [each.value for each in found if not math.isnan(each.value)]
        self._reported = values[0] if values else math.nan
        self._named = next((each.named for each in found if each.named), {})
        return Reported.from_state(next((each.reports for each in found if each.reports), {}))

    def _tell_of_values(self) -> None:
        """Tell the event of an evaluation with the named values, if any."""
        if self._named:
            stand_in = self._engine.state.protection.stand_in
            away = [] if stand_in is None else sorted(stand_in.away)
            said = events.Evaluation(
                step=self._engine.step, values=dict(self._named), shards_away=away
            )
            self._engine.state.hooks.event(said)

    def _follow(self, reported: Reported, goal: Goal | None) -> None:
        """Collective: keep the model of a best value, and end training without gain."""
        if goal is None:
            return
        if goal.keep_best and reported.step == self._engine.step:
            self._run.keep_best()
        self._stops = self._stops or reported.out_of_patience

    @property
    def given_up(self) -> bool:
        """Whether a failure has come into the running function."""
        return self.allowed and self._engine.recovery.completed > self._recoveries

    def goes_on(self) -> None:
        """After joint work of the ranks: a running function of the user goes on."""
        engine = self._engine
        place = Place(engine.step, engine.view.epoch, EVERY)
        self._doing(place if self.allowed else "")

    def on_recovery(self) -> None:
        """After a recovery: forget the calls of functions in undone steps."""
        self._done_at = [min(done, self._engine.step) for done in self._done_at]


def check_unchanged(engine: Engine, where: str) -> None:
    """Raise UsageError for parameters changed since the last step."""
    dense = engine.state.dense
    if not isinstance(dense, ModuleReplica):
        return
    dense.check_parameters()
    if dense.changed:
        raise UsageError(
            f"{where}: the model's parameters were changed since the last step",
            otherwise="leave them as they are; for other weights, such as an average, "
            "call copy.deepcopy(session.model) and change the copy",
        )


class SessionLoop:
    """The loop of a rank over the steps of a session.

    `tell(step, logged)` gets the values logged by slots, once for every committed step, on every
    dense holder. Functions in `every` are called on every rank. `replica` has the dense part of the
    model, also on ranks that hold no dense part in the run.
    """

    def __init__(
        self,
        started: Started,
        batches: SessionBatches,
        work: SlotWork,
        steps: int,
        replica: ModuleReplica,
        tell: Callable[[int, Logged], None],
        every: Sequence[Every] = (),
    ) -> None:
        self._replica = replica
        self._run, self._engine = started.run, started.run.engine
        self._work, self._steps, self._doing = work, steps, started.doing
        self._between = WorkBetweenSteps(started, replica.module, every, work.seed_between, steps)
        self._check_from = self._engine.step
        self._check_until = self._check_from + started.check_steps
        # a rank that joins has no part in these checks, and knows nothing of sessions before
        later = started.number > 1
        self._engine.state.admits_from = math.inf if later else self._check_until
        self._elsewhere = SlotsElsewhere(self._engine, batches, work, self._check_until)
        self._delivery = LogDelivery(self._engine, self._told(tell), started.mark)
        self._loop = StepLoop(
            started.run,
            batches,
            steps,
            self._between,
            self._keep,
            self._delivery.deliver,
            skips=work.skips,
            rehearsal=self._elsewhere,
            ends_at=lambda: self._delivery.ends_at,
        )
        self._over, self._batches = False, batches

    @property
    def between_steps(self) -> bool:
        """Whether ranks may work together now: after the last step, or in a due function."""
        return self._over or self._between.allowed

    @property
    def tells_as_main(self) -> bool | None:
        """Whether the present step is told as the main rank; `None` outside a listener."""
        return self._delivery.as_main

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Note values of the running slot; a repeated name replaces the earlier value."""
        self._work.log(values)

    def skip(self) -> None:
        """Have the running slot sit the step out."""
        self._work.skip()

    def report(self, value: float, named: Mapping[str, float | None]) -> None:
        """Note the values found by a function for `every`. Raises UsageError elsewhere."""
        if not self._between.allowed:
            raise UsageError("session.report belongs into a function for session.every")
        self._between.report(value, named)

    def stop(self) -> None:
        """Have training end. Raises UsageError outside the loop's body, functions and listeners."""
        if self._work.running:
            self._work.stop()
        elif self._between.allowed:
            self._between.stop()
        elif self._delivery.under_way:
            self._delivery.stop()
        else:
            raise UsageError(
                "session.stop belongs into the body of the loop over session.steps, into a "
                "function for session.every, or into one for session.on_commit"
            )

    def __iter__(self) -> Iterator[Any]:
        """The batch of every (step, slot) run by the rank; batches of redone steps come again."""
        self._doing("")  # from now on also a rank without slots counts as stuck without calls
        checking = min(self._check_until, self._steps) > self._engine.step
        if checking and self._is_reporter:
            count = min(self._check_until, self._steps) - self._check_from
            which = f"{count} steps" if count > 1 else "step"
            say(
                f"each slot of the first {which} is computed twice and compared; "
                "Session(check_determinism=0) leaves that out"
            )
        for parts in self._loop:
            if checking and self._engine.step >= self._check_until:
                checking = self._tell_checked()
            for part in parts:
                if part.batch.over:
                    part.result = self._work.absent(part)
                    continue
                if part.slot not in self._engine.slots:  # a slot of another rank, for comparison
                    yield self._work.begin(part)
                    part.result = self._work.finish(part, goes_on=False)
                    continue
                first = None
                if part.step < self._check_until:
                    if part.step + 1 < self._steps and not self._between.is_due(part.step + 1):
                        self._batches.draw_ahead(part.step + 1, part.slot)
                    yield self._work.begin(part)
                    first = kept(self._work.finish(part))
                    self._work.again(part, self._batches.once_more(part.step, part.slot))
                yield self._work.begin(part)
                part.result = self._work.finish(part)
                if first is not None:
                    self._work.check_same(part, first, part.result)
                self._elsewhere.check(part, part.result)
        if checking:
            self._tell_checked()
        self._delivery.deliver(all_of_it=True)
        self._tell_reports()
        if ended := ended_early(self._engine, self._steps):
            self._engine.state.hooks.event(ended)
        self._over = True
        self._doing(Place(self._engine.step, 0, AFTER))

    def _told(self, tell: Callable[[int, Logged], None]) -> Callable[[int, Logged], None]:
        """Wrap `tell`, marking the script's code as at work during a call.

        Scripts get the number of finished steps, like all that a run prints or keeps.
        """

        def told(step: int, logged: Logged) -> None:
            self._doing(Place(step + 1, 0, ON_COMMIT))
            tell(step + 1, logged)
            self._doing("")

        return told

    def _tell_reports(self) -> None:
        """Warn if a scheduler or a comparison waited for reports in vain."""
        dense = self._engine.state.dense
        if not self._is_reporter or self._between.reports:
            return
        never = "no function called session.report(value)"
        if isinstance(dense, ModuleReplica) and dense.steps_by_reports:
            say(f"! the scheduler was never stepped: {never}")
        elif self._between.compares:
            say(f"! no evaluation was compared with another: {never}")

    @property
    def _is_reporter(self) -> bool:
        return self._engine.rank == self._engine.view.reporter

    def _tell_checked(self) -> bool:
        """Report the checks as passed; returns False: no more checks."""
        dense = self._engine.state.dense
        grown = dense.trial.grown if isinstance(dense, ModuleReplica) else ""
        if self._is_reporter and grown:
            say(
                f"! a step makes {grown} longer, and a failure does not make it shorter: where a "
                "result depends on it, call session.register(name, owner) before session.steps"
            )
        first, last = self._check_from, min(self._check_until, self._engine.step) - 1
        if self._is_reporter and first <= last and self._check_until - first > 1:
            say(f"each slot of steps {first} to {last} was computed twice, to the same bits")
        return False

    def on_recovery(self) -> None:
        """After every recovery unseen by the loop, for example in an evaluation.

        Raises StepAborted in a due function: the loop then begins with the function.
        """
        if self._between.allowed:
            raise StepAborted
        self._loop.on_recovery()

    def _keep(self) -> None:
        def keep() -> Generator[Any, None, None]:
            self._run.keep()
            self._share_model()
            yield from ()

        for _ in sealed(self._engine, "the end of training", keep, self.on_recovery):
            pass

    def _share_model(self) -> None:
        """Collective: give every rank the trained dense part, which later code of a script may use.

        Raises StepAborted after a failure.
        """
        state = self._engine.state
        with self._engine.recovery.recovering():
            trained = spread_dense(
                state.transport, state.view.live, state.view.dense, self._replica.export
            )
        if trained is not None:
            self._replica.load(trained)

    def stoppable(
        self, work: Callable[[], Generator[Any, None, Result]]
    ) -> Generator[Any, None, Result]:
        """Collective: do `work` and return the result; stop if a rank asks to stop.

        If only the asking rank dies meanwhile, `work` is done again. Raises Unrecoverable if a
        failure has undone steps of a finished loop, and StepAborted after any failure in a due
        function.
        """
        step = self._engine.step
        self._doing("")
        while True:
            try:
                if self._between.given_up or self._engine.step != step:
                    raise StepAborted
                done = yield from work()
                self._between.goes_on()
                if self._over:
                    self._doing(Place(step, 0, AFTER))
                return done
            except StopRequested:
                self._stop()
            except StepAborted:
                if self._over:
                    raise too_late(self._engine, self._steps) from None
                raise

    def _stop(self) -> None:
        """Stop the run. Returns after a failure: all ranks then ask again whether to stop."""
        try:
            self._run.stop()
        except StepAborted:
            self.on_recovery()
