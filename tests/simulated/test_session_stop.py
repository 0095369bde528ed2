"""A script ends training early, or leaves a batch out: the same model, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.protection.base import Protection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.run import log_delivery
from ecrm.run.started import Wanted
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, RankKilled
from support.sessions import ROWS, Layout, Left, Small, run

STEPS = 20


def erasure(servers: int) -> Protection:
    return ErasureProtection(servers, 2, 1)


def layout(interval: int = 1, protection: Callable[[int], Protection] = erasure) -> Layout:
    return Layout(servers=3, trainers=2, spares=2, commit_interval=interval, protection=protection)


def batch_of(step: int, slot: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(31 * step + slot)
    ids = torch.randint(0, ROWS, (5,), generator=random)
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(5, dtype=torch.int64))
    return {"ids": kjt, "label": torch.rand(5), "place": (step, slot)}


def trained(
    body: Callable[[Session, dict[str, Any]], object] = lambda session, batch: None,
    prepare: Callable[[Session], object] = lambda session: None,
    steps: int = STEPS,
    optimizer: type = torch.optim.Adam,
    scheduler: Any = None,
) -> Callable[[Callable[[Wanted], Any]], Session]:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = Small()
        apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model,
            slots=2,
            dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            scheduler=scheduler,
            start=start,
        )
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        prepare(session)
        for batch in session.steps(batch_of, steps):
            loss = F.mse_loss(session.model(batch["ids"]), batch["label"])
            loss.backward()
            session.log(loss=loss)
            body(session, batch)
        return session

    return train


def same(one: Left, other: Left) -> bool:
    return (one.tables, one.dense, one.logged) == (other.tables, other.dense, other.logged)


def stops_in_the_body(session: Session, batch: dict[str, Any]) -> None:
    if batch["place"] == (3, 1):
        session.stop()


def stops_on_the_main_rank(session: Session) -> None:
    @session.every(2)
    def look() -> None:
        if session.is_main and session.step == 4:
            session.stop()


def stops_at_a_commit(session: Session) -> None:
    def heard(step: int, logged: Any) -> None:
        if step == 3:
            session.stop()

    session.on_commit(heard)


LATE = "after it has asked at a commit"
WAYS = {
    "body": (lambda: trained(stops_in_the_body), 4),
    "every": (lambda: trained(prepare=stops_on_the_main_rank), 4),
    "commit": (lambda: trained(prepare=stops_at_a_commit), 9),
}
DEATHS = {
    "none": (),
    "trainer as it asks": (PhaseFault(3, 3, "forward"),),
    "trainer in the last commit": (PhaseFault(4, 3, "commit"),),
    "main in the last commit": (PhaseFault(3, 3, "commit"),),
    "server": (PhaseFault(0, 3, "update"),),
    "two in turn": (PhaseFault(3, 2, "parity"), PhaseFault(1, 3, "dense")),
    LATE: (PhaseFault(3, 5, "update"), PhaseFault(1, 8, "commit")),
}


@pytest.fixture(autouse=True, scope="module")
def soon():
    """Six steps after a commit instead of 64."""
    before, log_delivery.ENDS_LATER = log_delivery.ENDS_LATER, 6
    yield
    log_delivery.ENDS_LATER = before


@pytest.fixture(scope="module")
def ends(soon) -> dict[int, Left]:
    """Runs of so many steps, undisturbed."""
    return {steps: run(layout=layout(), train=trained(steps=steps)) for steps in (4, 9)}


@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("way", WAYS)
def test_training_ends_where_the_script_asks_whoever_dies(ends, way, deaths):
    train, steps = WAYS[way]
    for interval in (1, 3):
        found = run(DEATHS[deaths], layout(interval), train())
        assert same(found, ends[steps]), (interval, found)
        if interval == 1 and (way == "commit" or deaths != LATE):
            assert found.deaths == len(DEATHS[deaths])


def test_a_stop_where_nothing_is_under_way_is_refused():
    def after(start: Callable[[Wanted], Any]) -> Session:
        session = trained(steps=3)(start)
        with pytest.raises(Exception, match="session.stop belongs into the body"):
            session.stop()
        return session

    run(layout=layout(), train=after)


def skips(session: Session, batch: dict[str, Any]) -> None:
    step, slot = batch["place"]
    if (step + slot) % 3 == 1 or step == 5:  # of step 5 both
        session.skip()


def weighs_nothing(session: Session, batch: dict[str, Any]) -> None:
    """The same by a loss of 0, for an optimizer that leaves rows alone then."""
    step, slot = batch["place"]
    if (step + slot) % 3 == 1 or step == 5:
        for parameter in session.model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.zero_()


SKIPPED = (
    (),
    (PhaseFault(3, 2, "forward"),),
    (PhaseFault(0, 1, "update"), PhaseFault(4, 5, "commit")),
    (PhaseFault(2, 4, "parity"), PhaseFault(3, 5, "dense")),
)


@pytest.mark.parametrize("protection", [erasure, lambda servers: ReplicateProtection(servers, 3)])
def test_slots_that_sit_out_come_to_the_same_bits_whoever_dies(protection):
    calm = run(layout=layout(), train=trained(skips, steps=8))
    for faults in SKIPPED:
        for interval in (1, 3):
            found = run(faults, layout(interval, protection), trained(skips, steps=8))
            assert same(found, calm), (faults, interval)
            assert not found.mismatches


def test_rows_that_a_slot_asks_for_and_sits_out_stay_as_they_are():
    """Adam moves a row by its moments even where its gradient is 0."""

    def without(steps: int) -> Left:
        return run(layout=layout(), train=trained(steps=steps))

    def last_step_left_out(session: Session, batch: dict[str, Any]) -> None:
        if batch["place"][0] == 3:
            session.skip()

    left_out = run(layout=layout(), train=trained(last_step_left_out, steps=4))
    assert left_out.tables == without(3).tables != without(4).tables


def leaves_out(left_out: Callable[[int, int], bool], skips: bool, steps: int) -> Any:
    """A script whose body does nothing with the batches of some (step, slot)."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = Small()
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model, slots=2, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), start=start
        )
        session.delivered = []
        for batch in session.steps(batch_of, steps):
            if left_out(*batch["place"]):
                if skips:
                    session.skip()
                continue
            F.mse_loss(session.model(batch["ids"]), batch["label"]).backward()
        return session

    return train


def test_a_body_that_skips_needs_no_gradient():
    train = leaves_out(lambda step, slot: slot == 1, skips=True, steps=3)
    assert run(layout=layout(), train=train).mismatches == 0


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


def reports(by_main_alone: bool) -> Callable[[Session], None]:
    def prepare(session: Session) -> None:
        @session.every(2)
        def look() -> None:
            for batch in session.eval_batches([batch_of(90, n) for n in range(3)]):
                session.gather(score=session.model(batch["ids"]))
            if session.is_main or not by_main_alone:
                session.report(1.0 + len(session.gathered["score"]))  # no better each time

    return prepare


PLATEAU_DEATHS = (
    (),
    (PhaseFault(3, 4, "evaluate"),),
    (PhaseFault(0, 2, "evaluate"), PhaseFault(4, 4, "update")),
    (PhaseFault(3, 3, "commit"), PhaseFault(1, 6, "evaluate")),
)


@pytest.mark.parametrize("by_main_alone", [True, False])
def test_a_schedule_that_steps_by_what_evaluations_report(by_main_alone):
    def left(faults: Any = (), interval: int = 1, prepare: Any = None) -> Left:
        prepare = prepare or reports(by_main_alone)
        train = trained(prepare=prepare, steps=9, scheduler=plateau)
        return run(faults, layout(interval), train)

    calm = left()
    never = left(prepare=lambda session: session.every(2)(lambda: None))
    assert calm.dense != never.dense, "the rate never fell"
    for faults in PLATEAU_DEATHS:
        for interval in (1, 3):
            found = left(faults, interval)
            assert (found.tables, found.dense) == (calm.tables, calm.dense), (faults, interval)
            assert interval == 3 or found.deaths == len(faults)


class SharedMark:
    """A mark in memory that outlives ranks."""

    def __init__(self) -> None:
        self.told = 0, -1

    def begin(self, step: int) -> None:
        self.told = step, -1

    def read(self) -> tuple[int, int]:
        return self.told

    def write(self, step: int, ends_at: int) -> None:
        self.told = step, ends_at


TOLD_PHASES = ("input", "lookup", "forward", "update", "parity", "dense", "commit")


@pytest.mark.parametrize("interval", [1, 3])
def test_the_main_rank_is_told_of_each_commit_once_whoever_dies(interval):
    for phase in TOLD_PHASES:
        for faults in (
            [PhaseFault(3, 5, phase)],
            [PhaseFault(3, 2, phase), PhaseFault(4, 7, phase)],
        ):
            told: list[int] = []
            mark = SharedMark()

            def listens(session: Session, told: list[int] = told) -> None:
                session.on_commit(lambda step, logged: session.is_main and told.append(step))

            def train(start: Callable[[Wanted], Any], mark: SharedMark = mark) -> Session:
                begin = trained(prepare=listens, steps=9)
                return begin(lambda wanted: replace(start(wanted), mark=mark))

            run(faults, layout(interval), train)
            assert told == list(range(1, 10)), (phase, faults)


@pytest.mark.parametrize("phase", ["input", "forward", "commit"])
def test_a_stop_at_a_commit_outlives_the_main_rank_that_has_asked(phase):
    """The next main rank is not told of that step any more."""

    def left(faults: Any) -> Left:
        mark = SharedMark()

        def listens(session: Session) -> None:
            @session.on_commit
            def heard(step: int, logged: Any) -> None:
                if session.is_main and step == 3:
                    session.stop()

        def train(start: Callable[[Wanted], Any]) -> Session:
            begin = trained(prepare=listens)
            return begin(lambda wanted: replace(start(wanted), mark=mark))

        return run(faults, layout(), train)

    calm, killed = left(()), left([PhaseFault(3, 3, phase)])
    assert len(calm.logged) == 9
    assert killed.deaths == 1 and same(killed, calm)


def test_a_batch_left_out_by_continue_is_left_out_on_another_rank_too():
    """Which has computed none before: it sits out there, as it does on the first one."""

    train = leaves_out(lambda step, slot: step in (3, 4), skips=False, steps=6)
    calm, killed = (run(faults, layout(), train) for faults in ((), [PhaseFault(4, 3, "forward")]))
    assert killed.deaths == 1 and same(killed, calm)


def test_a_main_rank_that_dies_before_it_is_told_leaves_that_to_the_next():
    """It dies after the commit, between two calls of the script."""
    told: list[tuple[int, int]] = []
    mark = SharedMark()

    def listens(session: Session) -> None:
        def heard(step: int, logged: Any) -> None:
            if session.is_main:
                if step == 5 and session.rank == 3:
                    raise RankKilled
                told.append((step, session.rank))

        session.on_commit(heard)

    def train(start: Callable[[Wanted], Any]) -> Session:
        begin = trained(prepare=listens, steps=9)
        return begin(lambda wanted: replace(start(wanted), mark=mark))

    assert run((), layout(), train).deaths == 1
    assert [step for step, _ in told] == list(range(1, 10))
    assert [rank for _, rank in told] == [3] * 4 + [4] * 5
