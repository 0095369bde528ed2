"""What a script may do with `session.model` itself, and what is refused with what to type."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.base.errors import UsageError
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
    with pytest.raises(UsageError, match=r"call session.save\(path\), or session.state_dict\(\)"):
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


IDS, X = torch.tensor([1, 2]), torch.ones(2, 4)
READS = {
    "matmul": lambda weight: X @ weight.t(),
    "T": lambda weight: X @ weight.T,
    "linear": lambda weight: nn.functional.linear(X, weight),
    "embedding": lambda weight: nn.functional.embedding(IDS, weight),
    "embedding_bag": lambda weight: nn.functional.embedding_bag(IDS.unsqueeze(0), weight),
    "index": lambda weight: weight[3],
    "index_select": lambda weight: weight.index_select(0, IDS),
    "of data": lambda weight: weight.data[IDS],
    "of detach": lambda weight: X @ weight.detach().transpose(0, 1),
    "of clone": lambda weight: weight.clone().sum(),
    "of arithmetic": lambda weight: (2 * weight).norm(),
    "sum": lambda weight: weight.sum(),
    "decay": lambda weight: weight.pow(2).mean(),
    "add": lambda weight: weight + torch.ones(9, 4),
    "float": lambda weight: float(weight.detach()),
    "item": lambda weight: weight.detach().item(),
    "list": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "array": lambda weight: np.asarray(weight.data),
    "equal": lambda weight: torch.equal(weight, torch.ones(9, 4)),
    "compare": lambda weight: weight == 0,
    "iterate": lambda weight: list(weight),
    "truth": lambda weight: bool(weight),
    "to": lambda weight: weight.data.to("cpu"),
    "half": lambda weight: weight.half(),
    "zeros": lambda weight: torch.zeros_like(weight, device="cpu"),
    "cat": lambda weight: torch.cat([weight, torch.ones(1, 4)]),
    "out": lambda weight: torch.mul(torch.ones(9, 4), 2.0, out=weight.data),
    "aten": lambda weight: torch.ops.aten.mm(X, weight.data.view(4, 9)),
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]),
    "hook": lambda weight: weight.register_hook(print),
    "backward": lambda weight: (2 * weight).backward(),
    "save": lambda weight: torch.save(weight, io.BytesIO()),
    "optimizer": lambda weight: apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0}),
}  # fmt: skip
CHANGES = {
    "mul_": lambda weight: weight.mul_(0.5),
    "*=": lambda weight: weight.__imul__(0.5),
    "clamp_": lambda weight: weight.clamp_(-1, 1),
    "renorm_": lambda weight: weight.renorm_(2, 0, 1.0),
    "copy_": lambda weight: weight.copy_(torch.ones(9, 4)),
    "fill_": lambda weight: weight.data.fill_(1.0),
    "zero_": lambda weight: weight.detach().zero_(),
    "data": lambda weight: setattr(weight, "data", torch.ones(9, 4)),
    "grad": lambda weight: setattr(weight, "grad", torch.ones(9, 4)),
    "setitem": lambda weight: weight.__setitem__(3, 1.0),
    "of data": lambda weight: weight.data.__setitem__(3, torch.ones(4)),
    "init": nn.init.normal_,
    "xavier": nn.init.xavier_uniform_,
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
}
KINDS = {
    "bags": lambda model: model.bags.embedding_bags["user"],
    "rows": lambda model: model.rows.embeddings["page"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", READS)
def test_numbers_of_a_table_are_not_made_up(model, kind, use):
    with pytest.raises(
        UsageError, match=r"^table (bags|rows)\.\w+\.\w+ is used as a tensor"
    ) as told:
        READS[use](KINDS[kind](model).weight)
    assert "\n" not in str(told.value) and "by ids in a KeyedJaggedTensor" in str(told.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", CHANGES)
def test_rows_are_not_changed_without_effect(model, kind, use):
    with torch.no_grad(), pytest.raises(UsageError, match=r"^table (bags|rows).* is changed by"):
        CHANGES[use](KINDS[kind](model).weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_that_was_taken_before_the_session_is_not_read_either(device):
    model = Model(device)
    for tables in model.bags, model.rows:
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    taken = model.bags.embedding_bags["user"].weight
    Session(model, slots=1, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    with pytest.raises(UsageError, match=r"^table bags.embedding_bags.user is used as a tensor"):
        X @ taken.t()
    with torch.no_grad(), pytest.raises(UsageError, match=r"user is changed by"):
        taken.mul_(2.0)


def test_a_layer_tied_to_a_table_is_refused_by_name():
    model = Model("meta")
    model.top.weight = model.bags.embedding_bags["user"].weight
    with pytest.raises(UsageError, match=r"parameter top.weight is the weight of table bags\."):
        Session(model, slots=1)


def test_a_weight_that_is_computed_is_refused_by_name():
    model = Model("meta")
    nn.utils.parametrizations.weight_norm(model.bags.embedding_bags["user"])
    with pytest.raises(UsageError, match=r"table bags.embedding_bags.user has a weight that is"):
        Session(model, slots=1)


def trainable() -> nn.Module:
    model = Model("meta")
    for tables in model.bags, model.rows:
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    return model


def test_what_needs_no_numbers_of_a_table_goes_on_working(model):
    weight = KINDS["bags"](model).weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.grad is None
    assert (weight.shape, len(weight), weight.numel()) == (torch.Size([9, 4]), 9, 36)
    assert weight.dtype == torch.float32 and weight.element_size() == 4 and weight.requires_grad
    assert (
        repr(weight)
        == f"{weight}"
        == ("table bags.embedding_bags.user, 9 x 4, whose rows a session keeps")
    )
    assert repr(weight) in f"{model.state_dict()}"
    parameters = list(model.parameters())
    assert sum(each.numel() for each in parameters) == 36 + 36 + 5
    for kind in torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad:
        optimizer = kind(parameters, lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    model.requires_grad_(True)
    model.load_state_dict(copy.deepcopy(model.state_dict()))


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"avg_fn": lambda average, now, count: 0.9 * average + 0.1 * now},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ],
)
def test_weights_are_averaged_as_torch_does(model, way):
    average = AveragedModel(model, **way)
    for value in 1.0, 3.0:
        with torch.no_grad():
            model.top.weight.fill_(value)
        average.update_parameters(model)
    assert bool((average.module.top.weight < 3).all())
    average.load_state_dict(average.state_dict())


def test_an_average_of_ones_own_has_no_part_of_tables_and_no_error(model):
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mine, now in zip(average.parameters(), model.parameters()):
            mine.mul_(0.9).add_(now, alpha=0.1)
            mine.copy_(0.9 * mine + (1 - 0.9) * now)
    shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        for name, each in model.named_parameters():
            shadow[name].sub_(0.1 * (shadow[name] - each))


def test_tables_that_a_session_cannot_keep_are_refused_by_name():
    def made(**given: Any) -> nn.Module:
        weighted = given.pop("is_weighted", False)
        config = {"name": "t", "num_embeddings": 5, "embedding_dim": 4, "feature_names": ["f"]}
        table = EmbeddingBagConfig(**{**config, **given})
        return nn.Sequential(
            EmbeddingBagCollection([table], is_weighted=weighted, device=torch.device("meta"))
        )

    for given, said in (
        ({"is_weighted": True, "pooling": PoolingType.MEAN}, "table t of 0 has weighted bags and"),
        (
            {"num_embeddings": 0, "weight_init_min": -1.0, "weight_init_max": 1.0},
            "has 0 rows of 4 floats: give it 1 row of 1 float at least",
        ),
        ({"embedding_dim": 0}, "has 5 rows of 0 floats"),
    ):
        model = made(**given)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(UsageError, match=said):
            Session(model, slots=1)


@pytest.mark.parametrize("number", [np.int64(5), np.int32(5), torch.tensor(5)])
def test_sizes_of_tables_may_come_from_numpy_and_torch(tmp_path, number):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=number, embedding_dim=np.int64(4), feature_names=["f"]
    )
    model = nn.Sequential(EmbeddingBagCollection([table], device=torch.device("meta")))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    session = Session(model, slots=1)
    ids = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    for batch in session.steps(lambda step, slot: ids, 2):
        session.model(batch).values().sum().backward()
    session.save(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["0.embedding_bags.t.weight"].shape == (5, 4)
