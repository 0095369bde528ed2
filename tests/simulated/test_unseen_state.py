"""State that no commit has is refused at the first step, by its path; what is kept is exact."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.base.errors import UsageError
from ecrm.model.determinism import prepared_torch
from ecrm.model.nested_state import placed
from ecrm.run.lone_run import run_alone
from ecrm.session.session import Session
from ecrm.transport.digests import entry_digests

STEPS = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.linear(self.bags(ids).values())


def ids(step: int, slot: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([step % 9, slot]), lengths=torch.tensor([1, 1]))


def usual(session: Session, batch: KeyedJaggedTensor) -> None:
    F.softplus(session.model(batch)).mean().backward()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with prepared_torch(threads=1):
        yield


def train(
    model: nn.Module | None = None,
    body: Callable[[Session, Any], object] = usual,
    prepare: Callable[[Session], object] = lambda session: None,
    **given: Any,
) -> Session:
    torch.manual_seed(0)
    model = Model() if model is None else model
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    given = {"dense_optimizer": sgd, "slots": 2, **given}
    session = Session(model, start=run_alone, **given)
    prepare(session)
    for batch in session.steps(ids, STEPS):
        body(session, batch)
    return session


class Counting(Model):
    """A counter that a forward changes: how often a rank calls it depends on its slots."""

    def __init__(self, keep: Callable[[Counting], object]) -> None:
        super().__init__()
        self.keep = [keep]
        self.calls, self.seen, self.queue = 0, {"last": 0.0}, deque([0], maxlen=2)
        self.noise, self.own = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.dice, self.average = random.Random(3), torch.zeros(())
        self.rows = np.zeros(2)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.keep[0](self)
        return super().forward(ids)


def counts(model: Counting) -> None:
    model.calls += 1


KEPT_BY_A_FORWARD: dict[str, tuple[Callable[[Counting], object], str]] = {
    "a number": (counts, "calls, 1 before and 2 now"),
    "a dict": (lambda model: model.seen.update(last=model.seen["last"] + 1), r"seen\['last'\]"),
    "a queue": (lambda model: model.queue.append(model.queue[-1] + 1), r"queue\[0\], 0 before"),
    "a tensor": (lambda model: model.average.add_(1), "average"),
    "an array": (lambda model: model.rows.__iadd__(1), "rows"),
    "a generator": (lambda model: torch.rand(1, generator=model.noise), "noise"),
    "numpy's generator": (lambda model: model.own.random(), "own"),
    "Python's generator": (lambda model: model.dice.random(), "dice"),
}


@pytest.mark.parametrize("name", KEPT_BY_A_FORWARD)
def test_what_a_forward_keeps_on_the_module_is_refused_by_name(name):
    keep, said = KEPT_BY_A_FORWARD[name]
    with pytest.raises(UsageError, match=f"no commit has: {said}.*register_buffer"):
        train(Counting(keep))
    train(Counting(keep), check_determinism=0)  # the canary: nothing else finds it


def test_attributes_that_a_batch_decides_are_no_state():
    def keep(model: Counting) -> None:
        model.calls, model.average = 7, torch.ones(3)
        model.history = [*getattr(model, "history", []), 1]

    train(Counting(keep))


def test_a_counter_in_a_buffer_is_the_way_out():
    model = Model()
    model.register_buffer("calls", torch.zeros(()))

    def count(module: nn.Module, *_: object) -> None:
        module.calls += 1

    model.register_forward_hook(count)
    assert float(train(model).model.calls) == STEPS


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a counter that are in no `state`, as in several packages."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2) -> None:
        self.inner, self.k, self.count = inner, k, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        fast = [p for group in self.param_groups for p in group["params"]]
        if self.count % self.k == 0:
            for slow, weight in zip(self.slow, fast, strict=True):
                slow.lerp_(weight, 0.5)
                weight.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "slow": list(self.slow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)


class TwoInOne(torch.optim.Optimizer):
    """Two optimizers behind one, whose states it does not show."""

    def __init__(self, parameters: Any) -> None:
        first, *others = list(parameters)
        self.parts = [torch.optim.Adam([first]), torch.optim.SGD(others, lr=0.1, momentum=0.9)]
        super().__init__([first, *others], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Wrapped:
    """No Optimizer at all, but what one needs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self) -> None:
        self.calls += 1
        self.inner.param_groups[0]["lr"] = 0.1 / self.calls
        self.inner.step()


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Lookahead": (lambda ps: Lookahead(sgd(ps)), r"optimizer\.count, 1 before and 2 now"),
    "two in one": (TwoInOne, r"optimizer\.parts\[0\]\.state\[Parameter 0\]\['step'\]"),
    "a wrapper": (lambda ps: Wrapped(sgd(ps)), r"optimizer\.calls, 1 before"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_state_elsewhere_is_refused_by_name(name):
    make, said = OPTIMIZERS[name]
    with pytest.raises(UsageError, match=f"does not bring back: {said}.*session.register"):
        train(dense_optimizer=make)


def test_a_registered_lookahead_is_the_way_out():
    made: list[Lookahead] = []

    def make(parameters: Any) -> Lookahead:
        made.append(Lookahead(sgd(parameters)))
        return made[-1]

    train(dense_optimizer=make, prepare=lambda session: session.register("lookahead", made[-1]))
    assert made[-1].count == STEPS


def test_what_before_step_and_a_schedule_keep_is_refused_by_name():
    count = itertools.count()
    called = [0]

    def counted(parameters: Any) -> None:
        called[0] += 1

    with pytest.raises(UsageError, match=r"before_step called\[0\], 1 before and 2 now"):
        train(before_step=counted)
    with pytest.raises(UsageError, match="lr .*came out otherwise|before and"):
        train(
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                o, lambda e: 1 / (1 + next(count))
            )
        )
    noise = torch.Generator().manual_seed(3)

    def noisy(parameters: Any) -> None:
        for parameter in parameters:
            parameter.grad += torch.rand(1, generator=noise)

    with pytest.raises(UsageError, match="before_step noise"):
        train(before_step=noisy)


def test_a_log_and_seeded_noise_in_before_step_are_no_state():
    norms: list[float] = []

    def before_step(parameters: Any) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        for parameter in parameters:
            parameter.grad += 0.01 * torch.randn(parameter.shape)

    train(before_step=before_step)
    assert len(norms) == STEPS + 3  # steps 0, 1 and 2 are taken twice


CHANGED_IN_THE_BODY: dict[str, tuple[Callable[[Session], object], str]] = {
    "a learning rate": (
        lambda session: session._replica.optimizer.param_groups[0].update(lr=0.01),
        r"changed optimizer group 0\.lr from 0\.1 to 0\.01: give the Session a scheduler=",
    ),
    "weights by .data": (
        lambda session: session.model.linear.weight.data.mul_(0.5),
        r"parameter linear\.weight was changed in the body of the loop",
    ),
    "weights by numpy": (
        lambda session: session.model.linear.bias.detach().numpy().fill(1.0),
        r"parameter linear\.bias was changed",
    ),
    "optimizer state": (
        lambda session: [
            s["momentum_buffer"].data.zero_() for s in session._replica.optimizer.state.values()
        ],
        r"optimizer state linear\.(weight|bias)\.momentum_buffer was changed",
    ),
}


@pytest.mark.parametrize("name", CHANGED_IN_THE_BODY)
def test_what_the_body_changes_is_refused_by_name(name):
    change, said = CHANGED_IN_THE_BODY[name]

    def body(session: Session, batch: Any) -> None:
        usual(session, batch)
        change(session)

    with pytest.raises(UsageError, match=rf"step \d, slot 0: .*{said}"):
        train(body=body)


def test_what_the_body_changes_late_is_found_too():
    def body(session: Session, batch: Any) -> None:
        usual(session, batch)
        if session.step == STEPS - 1:
            session.model.linear.weight.data.clamp_(-0.1, 0.1)

    with pytest.raises(UsageError, match=f"step {STEPS - 1}, slot 0: parameter linear.weight was"):
        train(body=body, check_determinism=0)


class Anchored(torch.optim.SGD):
    """Keeps a parameter's own memory as its state."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["anchor"] = parameter.data


def test_memory_that_state_and_a_parameter_share_is_refused():
    with pytest.raises(
        UsageError, match="state 0.linear.weight.anchor and parameter linear.weight"
    ):
        train(dense_optimizer=lambda ps: Anchored(ps, lr=0.1))


def test_memory_that_a_buffer_and_a_parameter_share_is_refused():
    model = Model()
    model.register_buffer("weight", model.linear.weight.data)
    with pytest.raises(UsageError, match="buffer weight and parameter linear.weight have the same"):
        train(model)


class Adding(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, self.get(key, 0) + value)


def test_a_dict_whose_items_add_up_is_copied_as_it_is():
    source = Adding()
    source["x"] = 1
    assert placed(source) == {"x": 1}
    assert placed(source, Adding(source)) == {"x": 1}


def test_arrays_and_sets_in_registered_state_are_compared():
    for one, other in ((np.zeros(3), np.ones(3)), (np.zeros(3), np.zeros((3, 1))), ({1}, {2})):
        assert entry_digests([("x", one)]) != entry_digests([("x", other)])
    assert entry_digests([("x", {"a", "b"})]) == entry_digests([("x", {"b", "a"})])


def test_a_counter_of_the_loop_is_told(capsys):
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    session = Session(model, slots=2, dense_optimizer=sgd, start=run_alone)
    for number, batch in enumerate(session.steps(ids, STEPS)):
        assert session.step <= number
        usual(session, batch)
    assert "! number went from 0 to 1 as the slot was computed twice" in capsys.readouterr().out


def test_the_modes_with_which_the_loop_begins_stay():
    model = Model()
    model.drop = nn.Dropout()

    def body(session: Session, batch: Any) -> None:
        usual(session, batch)
        if session.step == 2:
            model.drop.eval()

    with pytest.raises(UsageError, match="step 2, slot 0: drop is in evaluation mode now, and was"):
        train(model, body=body)


def test_a_number_on_a_module_that_changes_later_is_told(capsys):
    model = Model()
    model.drop = nn.Dropout(0.2)

    def body(session: Session, batch: Any) -> None:
        if session.step == 2:
            model.drop.p = 0.5
        usual(session, batch)

    train(model, body=body)
    assert "! drop.p of the model has changed from 0.2 to 0.5" in capsys.readouterr().out


def test_numbers_that_before_step_keeps_on_the_model_are_refused():
    model = Model()
    model.tau = 1.0

    def before_step(parameters: Any) -> None:
        model.tau *= 0.9

    with pytest.raises(UsageError, match="the model's tau, 0.9 before and 0.81"):
        train(model, before_step=before_step)


def test_a_teacher_that_follows_the_model_is_refused_though_it_begins_as_the_model():
    """In the first step it changes nothing."""
    model = Model()
    teacher = copy.deepcopy(model.linear)

    @torch.no_grad()
    def before_step(parameters: Any) -> None:
        for old, new in zip(teacher.parameters(), model.linear.parameters(), strict=True):
            old.lerp_(new, 0.1)

    with pytest.raises(UsageError, match="does not bring back: before_step teacher.weight"):
        train(model, before_step=before_step)


class Slow(torch.optim.SGD):
    """Keeps what no state has under names with an underscore."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self._calls += 1


def test_numbers_that_an_optimizer_or_its_hook_keeps_are_refused():
    with pytest.raises(UsageError, match="optimizer._calls, 1 before and 2 now"):
        train(dense_optimizer=Slow)

    def with_a_hook(parameters: Any) -> torch.optim.Optimizer:
        made, calls = sgd(parameters), [0]

        def count(*_: object) -> None:
            calls[0] += 1

        made.register_step_post_hook(count)
        return made

    with pytest.raises(UsageError, match=r"optimizer hook calls\[0\], 1 before and 2 now"):
        train(dense_optimizer=with_a_hook)


def test_numbers_behind_a_partial_function_are_refused():
    def count(calls: list[int], parameters: Any) -> None:
        calls[0] += 1

    with pytest.raises(UsageError, match=r"before_step argument\[0\]\[0\], 1 before and 2 now"):
        train(before_step=functools.partial(count, [0]))


CALLS = [0]


class UsesAGlobal(Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(ids)


class Shared(Model):
    calls = 0

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        type(self).calls += 1
        return super().forward(ids)


def test_what_a_forward_keeps_elsewhere_is_refused_on_its_class_and_told_elsewhere(capsys):
    with pytest.raises(UsageError, match="no commit has: calls, 1 before and 2 now"):
        train(Shared())
    train(UsesAGlobal())
    said = "! each time that a slot is computed the model changes forward CALLS[0], "
    assert said in capsys.readouterr().out


def test_a_log_on_a_module_or_in_before_step_is_told(capsys):
    model = Model()
    model.losses, norms = [], []
    model.register_forward_hook(lambda module, given, out: module.losses.append(1))

    def before_step(parameters: Any) -> None:
        norms.append(1.0)

    train(model, before_step=before_step)
    said = capsys.readouterr().out
    assert "each time that a slot is computed the model changes losses:" in said
    assert "! a step makes before_step norms longer" in said


def test_a_long_vocabulary_hides_no_counter():
    model = Counting(counts)
    model.words = {f"word {number}": number for number in range(25_000)}
    with pytest.raises(UsageError, match="no commit has: calls, 1 before and 2 now"):
        train(model)


def test_a_model_of_too_many_values_is_told(capsys):
    model = Model()
    model.pairs = [[number] for number in range(25_000)]
    train(model)
    assert "! not all attributes of the model are compared" in capsys.readouterr().out


def test_a_table_that_is_frozen_within_the_body_is_refused():
    def body(session: Session, batch: Any) -> None:
        weight = next(session.model.bags.parameters())
        weight.requires_grad_(False)
        try:
            usual(session, batch)
        finally:
            weight.requires_grad_(True)

    with pytest.raises(UsageError, match="embedding_bags.t.weight was frozen after"):
        train(body=body)


def test_a_batch_in_memory_that_the_next_one_takes_is_refused():
    memory = torch.zeros(2, dtype=torch.int64).numpy()  # aligned: it is not copied

    def reused(step: int, slot: int) -> KeyedJaggedTensor:
        memory[:] = step % 9, slot
        return KeyedJaggedTensor(["f"], torch.from_numpy(memory), lengths=torch.tensor([1, 1]))

    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    session = Session(model, slots=1, dense_optimizer=sgd, start=run_alone)
    with pytest.raises(UsageError, match="step 0, slot 0: the batch has changed since it was made"):
        for batch in session.steps(reused, STEPS):
            usual(session, batch)
