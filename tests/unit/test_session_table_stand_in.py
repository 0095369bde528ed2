"""What a script may do with `session.model` itself, and what is refused with what to type."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.errors import UsageError
from ecrm.session.session import Session

TABLE = "bags.embedding_bags.user.weight"


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        bags = EmbeddingBagConfig(
            name="user", num_embeddings=9, embedding_dim=4, feature_names=["user"]
        )
        rows = EmbeddingConfig(name="page", num_embeddings=9, embedding_dim=4, feature_names=["p"])
        self.top = nn.Linear(4, 1)
        self.bags = EmbeddingBagCollection(tables=[bags], device=torch.device(device))
        self.rows = EmbeddingCollection(tables=[rows], device=torch.device(device))


@pytest.fixture
def model() -> nn.Module:
    """The model of a session."""
    model = Model("meta")
    for tables in model.bags, model.rows:
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    return Session(
        model, slots=1, dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    ).model


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.cpu(),
        lambda model: model.float(),
        lambda model: model.bags.to(torch.device("cpu"), torch.float32),
    ],
)
def test_a_model_may_be_moved_to_where_it_is(model, move):
    before = dict(model.named_parameters())
    move(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert after[TABLE].is_meta and after["top.weight"].device.type == "cpu"


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.bags.cuda(),
        lambda model: model.to("meta"),
        lambda model: model.half(),
        lambda model: model.rows.double(),
    ],
    ids=["cuda", "meta", "half", "double"],
)
def test_a_model_that_is_moved_elsewhere_is_refused_in_one_line(model, move):
    with pytest.raises(UsageError, match="a session's model stays on its device") as refused:
        move(model)
    assert "\n" not in str(refused.value)
    assert "leave out .to(...) and .cuda() of session.model" in str(refused.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda model: torch.save(model.state_dict(), io.BytesIO()),
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: pickle.dumps(model),
        lambda model: pickle.dumps(copy.deepcopy(model).state_dict()),
        lambda model: {name: value.cpu() for name, value in model.state_dict().items()},
    ],
    ids=["state", "model", "pickle", "copy", "cpu"],
)
def test_tables_are_not_written_without_their_rows(model, write: Callable[[nn.Module], Any]):
    with pytest.raises(UsageError, match=r"type session.save\(path\), or session.state_dict\(\)"):
        write(model)


def test_what_is_no_table_is_written():
    linear = nn.Linear(2, 2)
    torch.save(linear.state_dict(), io.BytesIO())


@pytest.mark.parametrize("part", ["bags", "rows", ""])
def test_rows_of_tables_are_not_loaded_into_the_module(model, part):
    state = Model("cpu").state_dict()
    if part:
        state = {name: value for name, value in state.items() if name.startswith(part)}
    with pytest.raises(UsageError, match=r"type session.load\(path\) or session.load_state_dict"):
        model.load_state_dict(state, strict=False)


def test_the_names_of_a_state_are_torchrecs_and_the_rest_of_it_is_loaded(model):
    state = model.state_dict()
    assert state.keys() == Model("cpu").state_dict().keys() and state[TABLE].shape == (9, 4)
    state["top.weight"] = torch.ones(1, 4)
    model.load_state_dict(state)
    assert bool((model.top.weight == 1).all())


def test_a_copy_of_the_model_has_weights_of_its_own_and_tables_of_the_session(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.top.weight.fill_(7.0)
    assert not bool((model.top.weight == 7).any())
    assert other.state_dict().keys() == model.state_dict().keys()
    assert other.bags._source is model.bags._source
    assert isinstance(other.bags.embedding_bags["user"].weight, nn.Parameter)
    with pytest.raises(UsageError, match="and no step fetched any"):
        other.bags(KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1])))
