"""User code that raises in a slot, or kills its rank: tried once elsewhere, then the run ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ecrm.base.errors import DataError, EcrmError, ScriptFailed, Unrecoverable
from ecrm.engine.engine import Engine
from ecrm.engine.events import Event, SlotFailed
from ecrm.engine.inquest import Leaving
from ecrm.engine.ledger import Ledger
from ecrm.engine.recovery import Recovery
from ecrm.placement.view import View
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.none import NoProtection
from ecrm.run.slot_faults import Place
from ecrm.run.started import Started, Wanted
from ecrm.run.user_code import UserCode, user_code_of
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed, RankKilled
from ecrm.transport.base import PeerFailure
from support.sessions import Layout, Left, batch_of, run, train_two_tower

STEPS = 5
SMALL = Layout(
    servers=3, trainers=2, spares=2, protection=lambda servers: ErasureProtection(servers, 2, 1)
)
BODY, BATCH = Place(2, 1), Place(3, 0, "batch")

Fault = Callable[[int, Place], bool]
"""(rank, place) -> whether it happens in user code there."""


def at(where: Place) -> Fault:
    return lambda rank, place: place == where


class Once:
    """At one place, on the first rank that comes there."""

    def __init__(self, where: Place) -> None:
        self._where, self.rank = where, -1

    def __call__(self, rank: int, place: Place) -> bool:
        first = self.rank < 0 and place == self._where
        if first:
            self.rank = rank
        return first


class Script:
    """The usual script, whose own code raises or dies in slots.

    As a rank of a real run, one on which it raises leaves or ends the run. `known` is whether
    survivors know what a dead rank was at work on. `evaluates`: it evaluates its model after the
    loop. `hooks`: what runs on all ranks may fail, too, also after every `every` steps; `done` are
    the steps at which the main rank came to the end of that, and which one it was. `events` are
    those of slots, `told` what was agreed on last of how ranks have ended, by rank.
    """

    def __init__(
        self,
        raises: Fault = lambda rank, place: False,
        dies: Fault = lambda rank, place: False,
        known: bool = True,
        evaluates: bool = False,
        hooks: bool = False,
        every: int = 3,
        of_data: bool = False,
    ) -> None:
        self.of_data = of_data
        self._raises, self._dies, self._known = raises, dies, known
        self._evaluates, self._hooks, self._every = evaluates, hooks, every
        self.done: list[tuple[int, int]] = []
        self.told: dict[int, Any] = {}
        self._places: dict[int, Place] = {}
        self.events: dict[int, dict[str, Any]] = {}

    def __call__(self, start: Callable[[Wanted], Started]) -> Session:
        engines: list[Engine] = []

        def begin(wanted: Wanted) -> Started:
            started = start(wanted)
            engine = started.run.engine

            def doing(place: Place | str) -> None:
                self._places.pop(engine.rank, None)
                if isinstance(place, Place):
                    self._places[engine.rank] = place
                    if place.part == "batch":
                        self._at_work(engine.rank)

            user_code_of(engine).place_of_dead = self._whereabouts
            engine.state.hooks.event = self._event
            judge = engine.recovery._judge

            def hear(agreed: Ledger) -> Leaving | None:
                self.told[engine.rank] = agreed.findings
                return judge(agreed)

            engine.recovery._judge = hear
            engines.append(engine)
            return replace(started, doing=doing)

        def prepare(session: Session) -> None:
            session.model.register_forward_pre_hook(lambda *_: self._at_work(engines[0].rank))
            if self._hooks:
                usual = session._user_before_step

                def before_step(parameters: Any) -> None:
                    self._at_work(engines[0].rank)
                    usual(parameters)

                session._user_before_step = before_step

                @session.every(self._every)
                def evaluate() -> None:
                    if self._evaluates:
                        evaluation(session)
                    self._at_work(engines[0].rank)
                    if session.is_main:
                        self.done.append((session.step, engines[0].rank))

        try:
            session = train_two_tower(begin, STEPS, prepare)
            if self._evaluates:
                session.evaluated = {"end": evaluation(session)}
            return session
        except OSError as error:
            (engine,) = engines
            if self._hooks:
                engine.recovery.refuse(f"{error} in {self._places[engine.rank]}", ScriptFailed)
            try:
                place = self._places[engine.rank]
                user_code_of(engine).leave(engine, place, str(error), self.of_data)
            except (ScriptFailed, DataError) as failed:
                if failed.speaker is not None:
                    raise
                raise RankKilled from None

    def _at_work(self, rank: int) -> None:
        if self._dies(rank, self._places[rank]):
            raise RankKilled
        if self._raises(rank, self._places[rank]):
            raise OSError(f"no sample on rank {rank}")

    def _whereabouts(self, rank: int) -> tuple[Place, ...] | None:
        if not self._known:
            return None
        return (self._places[rank],) if rank in self._places else ()

    def _event(self, told: Event) -> None:
        if isinstance(told, SlotFailed):
            self.events[told.rank] = told.to_dict()


def evaluation(session: Session) -> tuple[float, ...]:
    """The scores of six batches."""
    for batch in session.eval_batches([batch_of(100 + number, 0, 2) for number in range(6)]):
        session.gather(scores=session.model(batch.dense, batch.kjt))
    return tuple(session.gathered["scores"].tolist())


@functools.cache
def calm(evaluates: bool = False) -> Left:
    return run(layout=SMALL, train=Script(evaluates=evaluates))


def ended(script: Script, layout: Layout = SMALL) -> tuple[set[int], EcrmError]:
    """The ranks that a run has lost before it has ended, and the error that it has ended with.

    All that have heard the same of how ranks have ended say the same. One that the others leave
    before it has heard that may come to a conclusion of its own.
    """
    with pytest.raises(ProgramFailed) as failed:
        run(layout=layout, train=script)
    errors, outcome = failed.value.errors, failed.value.outcome
    lost = {kill.rank for kill in outcome.killed}
    assert set(errors) | lost == set(range(layout.world)) and not outcome.results
    first = next(iter(errors.values()))
    kind = DataError if script.of_data else ScriptFailed
    assert isinstance(first, kind) and first.speaker in errors
    heard = {rank for rank in errors if script.told.get(rank) == script.told[first.speaker]}
    assert len(heard) > 1
    for rank, error in errors.items():
        same = isinstance(error, kind) and str(error) == str(first)
        alone = rank not in heard and isinstance(error, (ScriptFailed, Unrecoverable))
        assert same or alone, (rank, error)
    return lost, first


@pytest.mark.parametrize("where", [BODY, BATCH], ids=str)
@pytest.mark.parametrize("interval", [1, 3])
def test_what_raises_on_one_rank_alone_is_done_by_another(where, interval):
    once = Once(where)
    script = Script(once)
    left = run(layout=replace(SMALL, commit_interval=interval), train=script)
    assert left.deaths == 1 and list(script.events) == [once.rank]
    told = script.events[once.rank]
    assert (told["step"], told["slot"]) == where[:2]
    assert told["part"] == where.part
    assert told["error"] == f"no sample on rank {once.rank}"
    assert (left.tables, left.dense) == (calm().tables, calm().dense)


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("where", [BODY, BATCH], ids=str)
def test_what_raises_on_two_ranks_ends_the_run_after_the_second(where, of_data):
    lost, error = ended(Script(at(where), of_data=of_data))
    assert len(lost) == 1 and error.exit_code == (4 if of_data else 8)
    (first,) = lost
    assert str(error) == f"no sample on rank {error.speaker} (as on rank {first} before)"


def test_what_raises_in_every_slot_ends_the_run_with_one_rank_lost_at_most():
    lost, error = ended(Script(lambda rank, place: place.part == "body"))
    assert len(lost) <= 1
    assert "no sample on rank" in str(error)


def test_data_bad_on_one_rank_cost_that_rank_also_where_all_others_have_rows():
    once, layout = Once(BATCH), replace(SMALL, trainers=1, spares=0)
    left = run(layout=layout, train=Script(once, of_data=True))
    assert left.deaths == 1 and (left.tables, left.dense) == (calm().tables, calm().dense)


@pytest.mark.parametrize(
    "layout, reason",
    [
        (replace(SMALL, trainers=1, spares=0), "no other trainer or spare is left to try it"),
        (
            replace(SMALL, protection=lambda servers: NoProtection(servers)),
            "protection none cannot do without the rank",
        ),
    ],
)
def test_where_no_other_rank_can_try_the_run_ends_at_once(layout, reason):
    lost, error = ended(Script(Once(BODY)), layout)
    assert not lost
    assert str(error) == f"no sample on rank {error.speaker} ({reason})"


@pytest.mark.parametrize("where", [BODY, BATCH], ids=str)
def test_code_that_kills_its_rank_ends_the_run_at_the_second_death(where):
    lost, error = ended(Script(dies=at(where)))
    assert len(lost) == 2
    first, second = sorted(lost)
    assert str(error).startswith(f"ranks {first}, {second} died in {where}, one after the other: ")


def test_where_nobody_knows_what_ranks_did_the_third_death_ends_the_run():
    lost, error = ended(Script(dies=at(BODY), known=False))
    assert len(lost) == 3
    assert "died in step 2, each running slot 1, one after the other" in str(error)


@pytest.mark.parametrize("known", [True, False])
def test_ranks_killed_in_one_step_but_not_in_the_same_code_are_survived(known):
    first, second = Once(BODY), Once(Place(3, 1, "batch"))
    script = Script(dies=lambda rank, place: first(rank, place) or second(rank, place), known=known)
    left = run(layout=SMALL, train=script)
    assert left.deaths == 2 and first.rank != second.rank >= 0
    assert set(script.events) == ({first.rank, second.rank} if known else set())
    assert (left.tables, left.dense) == (calm().tables, calm().dense)


def scored(number: int) -> Place:
    return Place(STEPS, number, "evaluation")


@pytest.mark.parametrize("known", [True, False])
def test_three_deaths_in_one_evaluation_but_not_in_one_batch_are_survived(known):
    deaths = [Once(scored(number)) for number in (1, 3, 5)]
    script = Script(
        dies=lambda rank, place: any(death(rank, place) for death in deaths),
        known=known,
        evaluates=True,
    )
    left = run(layout=SMALL, train=script)
    lost = {death.rank for death in deaths}
    assert left.deaths == len(lost) == 3 and -1 not in lost
    assert set(script.events) == (lost if known else set())
    assert all(told["part"] == "evaluation" for told in script.events.values())
    assert (left.tables, left.evaluated) == (calm(True).tables, calm(True).evaluated)


def test_a_batch_of_an_evaluation_that_kills_its_rank_ends_the_run_at_the_second_death():
    lost, error = ended(Script(dies=at(scored(3)), evaluates=True))
    assert len(lost) == 2
    first, second = sorted(lost)
    assert str(error).startswith(f"ranks {first}, {second} died in {scored(3)}, one after the")


HOOKS = {"before_step": (2, "before_step of step 2"), "every": (3, "session.every at step 3")}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("part", HOOKS)
def test_a_death_in_what_all_ranks_run_is_survived_once(part, evaluates):
    step, where = HOOKS[part]
    once = Once(Place(step, 0, part))
    script = Script(dies=once, evaluates=evaluates, hooks=True)
    left = run(layout=SMALL, train=script)
    assert left.deaths == 1 and list(script.events) == [once.rank]
    assert where in str(Place(step, 0, script.events[once.rank]["part"]))
    assert left == replace(calm(evaluates), deaths=1, logged=left.logged)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("step, seed", [(3, 1), (STEPS, 0)])
def test_what_the_main_rank_died_in_is_done_by_the_next(step, seed, evaluates):
    """With these seeds some ranks hear late that the step was committed."""
    where = Place(step, 0, "every")
    script = Script(
        dies=lambda rank, place: rank == 3 and place == where,
        evaluates=evaluates,
        hooks=True,
        every=step,
    )
    left = run(layout=SMALL, train=script, seed=seed)
    assert left.deaths == 1 and script.done == [(step, 4)]
    assert left == replace(calm(evaluates), deaths=1, logged=left.logged)


@pytest.mark.parametrize("step", [3, STEPS])
def test_what_one_rank_knows_to_be_done_on_all_is_done_on_none_again(step, monkeypatch):
    """The main rank dies after the agreement on that, which some ranks then fail in."""
    seal = UserCode.seal
    knows: dict[int, bool] = {}

    def seal_and_die(user_code: UserCode, engine: Engine) -> None:
        first = engine.rank not in knows
        knows.setdefault(engine.rank, False)
        seal(user_code, engine)
        if first:
            knows[engine.rank] = True
        if first and engine.rank == 3:
            raise RankKilled

    monkeypatch.setattr(UserCode, "seal", seal_and_die)
    script = Script(hooks=True, every=step)
    left = run(layout=SMALL, train=script, seed=7)
    assert left.deaths == 1 and script.done == [(step, 3)]
    assert set(knows.values()) == {False, True}
    assert left == replace(calm(), deaths=1, logged=left.logged)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("part", HOOKS)
def test_two_deaths_in_what_all_ranks_run_end_the_run(part, evaluates):
    step, where = HOOKS[part]
    times = {epoch: Once(Place(step, epoch, part)) for epoch in (0, 1)}
    script = Script(
        dies=lambda rank, place: any(once(rank, place) for once in times.values()),
        evaluates=evaluates,
        hooks=True,
    )
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script, seed=3)  # neither of them has rows to be rebuilt
    lost = {kill.rank for kill in failed.value.outcome.killed}
    assert lost == {once.rank for once in times.values()} and len(lost) == 2
    assert not failed.value.outcome.results
    first, second = sorted(lost)
    error = next(iter(failed.value.errors.values()))
    assert isinstance(error, ScriptFailed)
    assert str(error).startswith(f"ranks {first}, {second} died in ")
    assert f"{where}, one after the other: that code kills the rank that runs it, " in str(error)
    assert "or they were killed by something else while all ran it" in str(error)


def test_dense_replicas_that_die_in_one_hook_together_are_told_as_that():
    script = Script(dies=lambda rank, place: place.part == "before_step", hooks=True)
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script)
    first = next(iter(failed.value.errors.values()))
    assert len(failed.value.outcome.killed) == 2 and isinstance(first, Unrecoverable)
    assert "(ranks 3, 4 died in before_step of step 0, the script's own code)" in str(first)


@pytest.mark.parametrize("part", HOOKS)
def test_an_error_in_what_all_ranks_run_ends_the_run_at_once(part):
    step, where = HOOKS[part]
    lost, error = ended(Script(at(Place(step, 0, part)), evaluates=True, hooks=True))
    assert not lost
    assert str(error).startswith("no sample on rank ") and str(error).endswith(where)


def test_an_error_and_a_death_in_one_slot_end_the_run_with_the_error():
    once = Once(BODY)
    lost, error = ended(Script(once, lambda rank, place: place == BODY and rank != once.rank >= 0))
    assert len(lost) == 2
    (other,) = lost - {once.rank}
    assert str(error).startswith(f"no sample on rank {once.rank}; rank {other} died in {BODY}: ")


def test_slots_are_those_that_ranks_ran_when_a_recovery_began(monkeypatch):
    """A rank learns of a reshape in a recovery, and another death has it begin again."""
    seen: dict[int, list[View]] = {}

    def look(self: Recovery, held: View) -> dict[int, tuple[int, ...]]:
        views = seen.setdefault(self._state.rank, [])
        views.append(held)
        if len(views) == 2:
            raise Unrecoverable("seen twice")
        return {}

    def learn_of_reshape(self: Recovery, agreed: Ledger) -> None:
        view = self._state.view
        self._state.view = replace(view, shards=view.shards[:-1], slots=(3, 3))

    def die(self: Recovery) -> None:
        raise PeerFailure("another death")

    monkeypatch.setattr(Recovery, "_dead_since", look)
    monkeypatch.setattr(Recovery, "_return_to_commit", learn_of_reshape)
    monkeypatch.setattr(Recovery, "_take_over", die)
    with pytest.raises(ProgramFailed, match="seen twice"):
        run([PhaseFault(4, 2, "update")], SMALL)
    assert len(seen) == SMALL.world - 1
    for views in seen.values():
        assert [view.slots for view in views] == [(3, 4), (3, 4)]
