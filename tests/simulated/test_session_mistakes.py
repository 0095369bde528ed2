"""What a script can get wrong in a session is told in one line; what it may do leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.base.errors import ScriptFailed, StrayId, UsageError
from ecrm.protection.erasure import ErasureProtection
from ecrm.run.started import Wanted
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import ROWS, Layout, Left, Small, Train, run, train_two_tower

SMALL = Layout(
    servers=3, trainers=2, spares=2, protection=lambda servers: ErasureProtection(servers, 2, 1)
)
STEPS = 6


def batch_of(step: int, slot: int, rows: int = ROWS) -> dict[str, Any]:
    """A batch with noise that nobody has seeded: the session has."""
    random = torch.Generator().manual_seed(31 * step + slot)
    ids = torch.randint(0, rows, (5,), generator=random)
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(5, dtype=torch.int64))
    return {"ids": kjt, "label": torch.rand(5), "weight": torch.ones(5)}


def usual(session: Session, batch: dict[str, Any]) -> None:
    loss = F.mse_loss(session.model(batch["ids"]), batch["label"])
    loss.backward()


def script(
    body: Callable[[Session, dict[str, Any]], object] = usual,
    prepare: Callable[[Session], object] = lambda session: None,
    batches: Any = batch_of,
    after: Callable[[Session], object] = lambda session: None,
    before_step: Any = None,
) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = Small()
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model,
            slots=2,
            dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            before_step=before_step,
            start=start,
        )
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        prepare(session)
        for batch in session.steps(batches, STEPS):
            body(session, batch)
        after(session)
        return session

    return train


def forward_only(session: Session, batch: dict[str, Any]) -> None:
    session.model(batch["ids"])


def steps_itself(session: Session, batch: dict[str, Any]) -> None:
    usual(session, batch)
    with torch.no_grad():
        next(session.model.layers[2].parameters()).add_(1.0)


def logs_a_vector(session: Session, batch: dict[str, Any]) -> None:
    usual(session, batch)
    session.log(scores=torch.ones(3))


def saves(session: Session, batch: dict[str, Any]) -> None:
    session.save("model.pt")


def asks_in_the_body(session: Session, batch: dict[str, Any]) -> None:
    session.every(2)(lambda: None)


def listens_in_the_body(session: Session, batch: dict[str, Any]) -> None:
    session.on_commit(lambda step, logged: None)


def freezes_rows(session: Session, batch: dict[str, Any]) -> None:
    session.model.bags.requires_grad_(False)
    usual(session, batch)


def freezes_a_layer(session: Session, batch: dict[str, Any]) -> None:
    session.model.layers[2].requires_grad_(False)
    usual(session, batch)


BODIES = {
    "t.weight was frozen after the session was made": freezes_rows,
    "layers.2.weight was frozen after the session was made": freezes_a_layer,
    "nothing has a gradient: call session.model": forward_only,
    "parameters were changed in the body": steps_itself,
    r"session.log\(scores=...\) got 3 values": logs_a_vector,
    "session.save is called while step 0 is under way": saves,
    "session.every belongs before the loop": asks_in_the_body,
    "session.on_commit belongs before the loop": listens_in_the_body,
}


@pytest.mark.parametrize("told", BODIES)
def test_a_mistake_in_the_body_is_told(told):
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script(BODIES[told]))
    first = next(iter(failed.value.errors.values()))
    assert isinstance(first, UsageError)
    with pytest.raises(UsageError, match=told):
        raise first


def reversed_by_numpy(session: Session, batch: dict[str, Any]) -> None:
    ids = batch["ids"].values().numpy()
    ids[:] = ids[::-1].copy()
    usual(session, batch)


def lengths_by_numpy(session: Session, batch: dict[str, Any]) -> None:
    lengths = batch["ids"].lengths().numpy()
    lengths[:2] = 0, 2
    usual(session, batch)


def reversed_batch(step: int, slot: int) -> dict[str, Any]:
    batch = batch_of(step, slot)
    reversed_ids = batch["ids"].values().flip(0)
    return {**batch, "ids": KeyedJaggedTensor(["f"], reversed_ids, lengths=batch["ids"].lengths())}


def batch_of_lengths(step: int, slot: int) -> dict[str, Any]:
    batch = batch_of(step, slot)
    lengths = torch.tensor([0, 2, 1, 1, 1])
    return {**batch, "ids": KeyedJaggedTensor(["f"], batch["ids"].values(), lengths=lengths)}


@pytest.mark.parametrize(
    ("body", "batches"),
    [(reversed_by_numpy, reversed_batch), (lengths_by_numpy, batch_of_lengths)],
)
def test_ids_that_numpy_changes_in_the_body_are_those_that_are_trained(body, batches):
    changed = run(layout=SMALL, train=script(body))
    given = run(layout=SMALL, train=script(batches=batches))
    assert (changed.tables, changed.dense) == (given.tables, given.dense)


def replaces_a_layer(session: Session) -> None:
    session.model.layers[2] = nn.Linear(4, 1)


@pytest.mark.parametrize("when", [{"prepare": replaces_a_layer}, {"after": replaces_a_layer}])
def test_a_layer_that_is_replaced_would_not_be_trained_and_is_refused(when):
    def train(start: Callable[[Wanted], Any]) -> Session:
        session = script(**when)(start)
        session.save("model.pt")
        return session

    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=train)
    first = next(iter(failed.value.errors.values()))
    assert isinstance(first, UsageError)
    assert "layers.2." in str(first) and "after the session was made" in str(first)


def evaluates(batches: Callable[[Session], Any], body: Callable[[Session, Any], object]):
    def after(session: Session) -> None:
        for batch in session.eval_batches(batches(session)):
            body(session, batch)

    return after


def swaps_weights(session: Session) -> list[Any]:
    with torch.no_grad():
        next(session.model.layers[2].parameters()).mul_(0.5)
    return [batch_of(50, 0)]


AFTER = {
    "parameters were changed since the last step": (swaps_weights, forward_only),
    r"has 1 batches on rank 0 and 2 on rank 1": (
        lambda session: [batch_of(50, 0)] * (1 + session.rank % 2),
        forward_only,
    ),
    "called in the body of a loop over session.eval_batches": (
        lambda session: [batch_of(50, 0)] * 2,
        lambda session, batch: session.save("model.pt"),
    ),
    r"eval_batches\(int\)": (lambda session: 3, forward_only),
}


@pytest.mark.parametrize("told", AFTER)
def test_a_mistake_in_an_evaluation_is_told(told):
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script(after=evaluates(*AFTER[told])))
    first = next(iter(failed.value.errors.values()))
    with pytest.raises(UsageError, match=told):
        raise first


def swapped_for_an_evaluation(session: Session) -> None:
    @session.every(2)
    def evaluate() -> None:
        for batch in session.eval_batches(swaps_weights(session)):
            session.model(batch["ids"])


def left_swapped(session: Session) -> None:
    session.every(2)(lambda: swaps_weights(session))


def swapped_and_put_back(session: Session) -> None:
    @session.every(2)
    def evaluate() -> None:
        weight = next(session.model.layers[2].parameters())
        before = weight.detach().clone()
        swaps_weights(session)
        weight.data.copy_(before)
        for batch in session.eval_batches([batch_of(50, 0)]):
            session.model(batch["ids"])


@pytest.mark.parametrize("interval", [1, 4])
def test_weights_changed_between_steps_are_told_also_between_commits(interval):
    layout = Layout(3, 2, 2, 2, interval, SMALL.protection)
    for prepare, where in (
        (swapped_for_an_evaluation, "session.eval_batches"),
        (left_swapped, "a function for session.every"),
    ):
        with pytest.raises(ProgramFailed) as failed:
            run(layout=layout, train=script(prepare=prepare))
        first = next(iter(failed.value.errors.values()))
        with pytest.raises(UsageError, match=f"^{where}: the model's parameters were changed"):
            raise first
    put_back = run(layout=layout, train=script(prepare=swapped_and_put_back))
    plain = run(layout=layout, train=script())
    assert (put_back.tables, put_back.dense) == (plain.tables, plain.dense)


def leaves_an_evaluation(session: Session) -> None:
    @session.every(2)
    def evaluate() -> None:
        for batch in session.eval_batches([batch_of(50, n) for n in range(6)]):
            session.model(batch["ids"])
            if session.is_main:
                break


def test_an_evaluation_that_one_rank_leaves_is_told():
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script(prepare=leaves_an_evaluation))
    for error in failed.value.errors.values():  # the main rank's, and the next main rank's
        assert "a loop over session.eval_batches was left in a function" in str(error)


def saves_alone_in_every(session: Session) -> None:
    @session.every(2)
    def save() -> None:
        if session.is_main:
            session.save("model.pt")


def saves_alone(session: Session) -> None:
    if session.is_main:
        session.save("model.pt")
    else:
        list(session.eval_batches([batch_of(50, 0)]))


ALONE = {
    "rank 3 at session.save; ranks 0, 1, 2, 4, 5, 6 at the end of a function for session.every": {
        "prepare": saves_alone_in_every
    },
    "rank 3 at session.save; ranks 0, 1, 2, 4, 5, 6 at session.eval_batches": {
        "after": saves_alone
    },
}


@pytest.mark.parametrize("told", ALONE, ids=["every", "after"])
def test_what_one_rank_alone_calls_is_told_and_no_rank_waits(told):
    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script(**ALONE[told]))
    first = next(iter(failed.value.errors.values()))
    assert isinstance(first, ScriptFailed) and told in str(first)


def test_an_id_that_its_table_does_not_have_is_told_with_feature_sample_and_table():
    def batches(step: int, slot: int) -> dict[str, Any]:
        return batch_of(step, slot, ROWS if step < 2 else 10 * ROWS)

    with pytest.raises(ProgramFailed) as failed:
        run(layout=SMALL, train=script(batches=batches))
    first = next(iter(failed.value.errors.values()))
    with pytest.raises(StrayId, match='feature "f" of sample .: id .* is not in table t, whose id'):
        raise first


def changes_its_batch(session: Session, batch: dict[str, Any]) -> None:
    batch["weight"].mul_(3.0)
    loss = (batch["weight"] * (session.model(batch["ids"]) - batch["label"]) ** 2).mean()
    loss.backward()


def adds_noise(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad += 0.01 * torch.randn(parameter.shape)


def toggles_modes(session: Session) -> None:
    @session.every(2)
    def evaluate() -> None:
        session.model.eval()
        for batch in session.eval_batches([batch_of(60 + n, 0) for n in range(3)]):
            session.gather(score=session.model(batch["ids"]))
        session.model.train()


def averaging(interval: int, faults: list[PhaseFault]) -> Left:
    """Trained with torch's own average of the weights, which is evaluated after every 2 steps."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        held: list[Any] = []

        def prepare(session: Session) -> None:
            average = AveragedModel(session.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            held.extend([session, average])
            session.register("average", average)
            session.evaluated = {}

            @session.every(2)
            def evaluate() -> None:
                average.eval()
                for batch in session.eval_batches([batch_of(60 + n, 0) for n in range(3)]):
                    session.gather(score=average(batch["ids"]))
                session.evaluated[session.step] = tuple(session.gathered["score"].tolist())

        def update(parameters: Any) -> None:
            session, average = held
            average.update_parameters(session.model)

        return script(prepare=prepare, before_step=update)(start)

    return run(faults, Layout(3, 2, 2, 2, interval, SMALL.protection), train)


def test_an_averaged_model_of_torch_is_registered_and_survives_kills():
    calm = averaging(1, [])
    assert [step for step, _ in calm.evaluated] == [2, 4, 6]
    for faults in KILLS:
        left = averaging(4, faults)
        assert left.deaths == len(faults) and left.evaluated == calm.evaluated
        assert (left.tables, left.dense) == (calm.tables, calm.dense)
    plain = run(layout=SMALL, train=script())
    assert plain.tables == calm.tables and plain.dense != calm.dense


def leaves_it_in_evaluation(session: Session) -> None:
    @session.every(2)
    def evaluate() -> None:
        session.model.eval()


def test_the_model_trains_on_in_the_mode_that_it_had():
    plain = run(train=lambda start: train_two_tower(start, 5))
    left = run(train=lambda start: train_two_tower(start, 5, leaves_it_in_evaluation))
    assert (left.tables, left.dense) == (plain.tables, plain.dense)


KILLS = [
    [PhaseFault(3, 2, "update")],
    [PhaseFault(4, 3, "update"), PhaseFault(0, 4, "dense")],
    [PhaseFault(3, 4, "evaluate")],
]


def everything(interval: int, faults: list[PhaseFault]) -> Left:
    layout = Layout(3, 2, 2, 2, interval, SMALL.protection)
    return run(faults, layout, script(changes_its_batch, toggles_modes, before_step=adds_noise))


@pytest.mark.parametrize("interval", [1, 4])
def test_noise_changed_batches_and_modes_survive_kills(interval):
    calm = everything(1, [])
    for faults in KILLS:
        left = everything(interval, faults)
        assert left.deaths == len(faults)
        assert (left.tables, left.dense) == (calm.tables, calm.dense)
