"""The tables of a model in a session, and models of TorchRec and of users in one."""

import copy
import functools
import random

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

import ecrm.tables.first_values as first_values_module
from ecrm.base.errors import UsageError
from ecrm.placement.initial_values import InitFunction, Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import row_spaces
from ecrm.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from ecrm.tables.first_values import initial_of
from ecrm.tables.swap import large_embeddings, swap
from support.fetching import a_batch, check_gradients, fetched_rows

META = torch.device("meta")


def bags(*names, device=META, **more):
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=10, embedding_dim=4, feature_names=[f"f_{name}"], **more
        )
        for name in names
    ]
    return torchrec.EmbeddingBagCollection(tables, device=device)


def rows_of(*names):
    tables = [EmbeddingConfig(name=name, num_embeddings=10, embedding_dim=4) for name in names]
    return torchrec.EmbeddingCollection(tables, device=META)


def optimized(module, kind=torch.optim.SGD, **numbers):
    """The module, all parameters of which have an optimizer in backward."""
    apply_optimizer_in_backward(kind, module.parameters(), numbers or {"lr": 0.1})
    return module


class Tower(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.collection, self.hidden = collection, [collection]


def test_lookups_are_those_of_the_bags_of_all_features():
    two = bags("two")
    two.embedding_bag_configs()[0].feature_names.append("again")
    module = nn.ModuleDict({"x": bags("a", "b"), "y": two})
    tables = swap(optimized(module))
    of = {"b": 20, "two": 1.5}
    assert [table.lookups for table in tables.with_lookups(tables.tables, {})] == [1, 1, 2]
    assert [table.lookups for table in tables.with_lookups(tables.tables, of)] == [1, 20, 3]
    with pytest.raises(UsageError, match="has c, and the tables are a, b, two: type the name of"):
        tables.with_lookups(tables.tables, {"c": 2})
    # the sum of the largest or of the least numbers of float64 is infinite or 0 for a shard
    for wrong in (0, -1.0, float("nan"), float("inf"), "3", None, 5e-324, 1e308, 10**400):
        with pytest.raises(UsageError, match="for a: give the mean number of ids in a bag"):
            tables.with_lookups(tables.tables, {"a": wrong})
    for wrong in (None, [20]):
        with pytest.raises(UsageError, match=r"pooling_factors=.*\): give a dict, such as"):
            tables.with_lookups(tables.tables, wrong)


def test_collections_are_found_wherever_they_are():
    shared, held = bags("shared"), bags("held")
    module = nn.Sequential(
        nn.ModuleList([bags("a", "b"), rows_of("c")]),
        nn.ModuleDict({"x": Tower(shared), "y": shared, "z": Tower(held)}),
        nn.Linear(2, 2),
    )
    names, kinds = list(module.state_dict()), [type(part) for part in module.modules()]
    tables = swap(optimized(module))
    assert [table.name for table in tables.tables] == [
        "0.0.embedding_bags.a",
        "0.0.embedding_bags.b",
        "0.1.embeddings.c",
        "1.x.collection.embedding_bags.shared",
        "1.z.collection.embedding_bags.held",
    ]
    assert tables.aliases == {"1.y.embedding_bags.shared": "1.x.collection.embedding_bags.shared"}
    assert list(module.state_dict()) == names
    assert {f"{table.name}.weight" for table in tables.tables} < set(names)
    assert [
        collection is part
        for collection, part in zip(
            tables.collections, [module[0][0], module[0][1], shared, held], strict=True
        )
    ] == [True] * 4
    ours = {
        torchrec.EmbeddingBagCollection: EmbeddingBagCollection,
        torchrec.EmbeddingCollection: EmbeddingCollection,
    }
    assert [type(part) for part in module.modules()] == [ours.get(k, k) for k in kinds]
    assert module[1]["z"].hidden[0] is held and type(held) is EmbeddingBagCollection


@pytest.mark.parametrize("kind", [bags, rows_of])
def test_a_model_that_is_a_collection_itself(kind):
    tables = swap(optimized(kind("a")))
    (table,) = tables.tables
    assert table.name in ("embedding_bags.a", "embeddings.a")
    assert (table.rows, table.dim) == (10, 4)


def test_weights_that_two_collections_share_are_one_table():
    module = nn.ModuleList([bags("a"), bags("b")])
    module[1].embedding_bags["b"].weight = module[0].embedding_bags["a"].weight
    tables = swap(optimized(module))
    assert [table.name for table in tables.tables] == ["0.embedding_bags.a"]
    assert tables.aliases == {"1.embedding_bags.b": "0.embedding_bags.a"}
    assert module[1].embedding_bags["b"].weight is module[0].embedding_bags["a"].weight
    tables.lay_out(row_spaces(tables.tables))
    entries = [collection.layout.groups[0].entries[0] for collection in tables.collections]
    assert [(entry.table, entry.first) for entry in entries] == [("a", 0), ("b", 0)]


def test_dense_parameters_are_told_from_tables_as_before():
    module = nn.ModuleDict({"ebc": bags("a", device=None), "linear": nn.Linear(2, 2)})
    optimized(module["ebc"], torch.optim.Adagrad)
    swap(module)
    dense = [n for n, _ in in_backward_optimizer_filter(module.named_parameters())]
    assert dense == ["linear.weight", "linear.bias"]
    tables = dict(in_backward_optimizer_filter(module.named_parameters(), include=True))
    (weight,) = tables.values()
    assert weight.is_meta and weight.shape == (10, 4)
    assert weight._optimizer_classes == [torch.optim.Adagrad]
    assert weight._in_backward_optimizers == []  # they would keep the memory


OPTIMIZERS = [
    (torch.optim.SGD, {}, SparseOptimizer("sgd", 1e-3)),
    (torch.optim.SGD, {"weight_decay": 0.1}, SparseOptimizer("sgd", 1e-3, weight_decay=0.1)),
    (torch.optim.SGD, {"lr": torch.tensor(0.5), "momentum": 0.0}, SparseOptimizer("sgd", 0.5)),
    (torch.optim.Adagrad, {}, SparseOptimizer("adagrad", 0.01, 1e-10)),
    (torch.optim.Adagrad, {"eps": 1e-4, "foreach": True}, SparseOptimizer("adagrad", 0.01, 1e-4)),
    (torch.optim.Adam, {}, SparseOptimizer("adam", 1e-3, 1e-8, (0.9, 0.999))),
    (
        torch.optim.Adam,
        {"betas": (0.5, 0.75), "weight_decay": 0.1, "decoupled_weight_decay": True},
        SparseOptimizer("adam", 1e-3, 1e-8, (0.5, 0.75), 0.1, True),
    ),
    (torch.optim.Adam, {"weight_decay": 0.1}, SparseOptimizer("adam", 1e-3, weight_decay=0.1)),
    (torch.optim.AdamW, {}, SparseOptimizer("adam", 1e-3, 1e-8, (0.9, 0.999), 0.01, True)),
    (torchrec.optim.RowWiseAdagrad, {"lr": 0.02}, SparseOptimizer("rowwise_adagrad", 0.02, 1e-10)),
    (torchrec.optim.SGD, {"lr": 0.02}, SparseOptimizer("sgd", 0.02)),
    (torchrec.optim.Adagrad, {}, SparseOptimizer("adagrad", 0.01, 1e-8)),
    (torchrec.optim.Adam, {"lr": 0.02}, SparseOptimizer("adam", 0.02, 1e-8)),
]  # fmt: skip


@pytest.mark.parametrize("kind, numbers, expected", OPTIMIZERS)
def test_an_optimizer_and_what_torch_takes_for_the_numbers_that_are_not_given(
    kind, numbers, expected
):
    module = bags("a")
    apply_optimizer_in_backward(kind, module.parameters(), numbers)
    (table,) = swap(module).tables
    assert table.optimizer == expected


def test_the_deprecated_call_of_torchrec_is_read_too():
    module = bags("a")
    with pytest.warns(DeprecationWarning):
        torchrec.optim.apply_optimizer_in_backward(
            torchrec.optim.RowWiseAdagrad, module.parameters(), {"lr": 0.02}
        )
    assert swap(module).tables[0].optimizer.name == "rowwise_adagrad"


def test_every_table_has_its_own_optimizer_and_a_frozen_one_stays_as_it_is():
    module = bags("a", "b", "c")
    weights = {name: bag.weight for name, bag in module.embedding_bags.items()}
    apply_optimizer_in_backward(torch.optim.SGD, [weights["a"]], {"lr": 0.5})
    apply_optimizer_in_backward(torch.optim.Adagrad, [weights["b"]], {"lr": 0.5})
    weights["c"].requires_grad_(False)
    tables = swap(module)
    assert [table.optimizer for table in tables.tables] == [
        SparseOptimizer("sgd", 0.5),
        SparseOptimizer("adagrad", 0.5, 1e-10),
        SparseOptimizer("sgd", 0.0),
    ]
    assert [p.requires_grad for p in module.parameters()] == [True, True, False]


REFUSED = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD has momentum=0.9"),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "SGD has maximize=True"),
    (torch.optim.Adam, {"amsgrad": True}, "Adam has amsgrad=True"),
    (torch.optim.Adagrad, {"lr_decay": 0.1}, "Adagrad has lr_decay=0.1"),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "Adagrad has initial_"),
    (torchrec.optim.RowWiseAdagrad, {"learning_rate": 0.1}, "RowWiseAdagrad has learning_rate=0.1"),
    (torchrec.optim.SGD, {"momentum": 0.0}, "SGD has momentum=0.0"),
]  # fmt: skip


@pytest.mark.parametrize("kind, numbers, told", REFUSED)
def test_a_number_that_rows_cannot_have(kind, numbers, told):
    module = bags("a")
    apply_optimizer_in_backward(kind, module.parameters(), numbers)
    with pytest.raises(UsageError, match=f"table embedding_bags.a: {told}"):
        swap(module)
    assert type(module) is torchrec.EmbeddingBagCollection  # nothing was changed


def test_what_is_told_of_such_a_number():
    module = optimized(bags("a"), torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(UsageError) as error:
        swap(module)
    assert str(error.value) == (
        "table embedding_bags.a: SGD has momentum=0.9, and rows cannot be updated that way: "
        "leave momentum out; SGD may have lr, weight_decay"
    )


@pytest.mark.parametrize("path", ["", "model.ebc"])
def test_a_table_without_an_optimizer(path):
    module = bags("a")
    for part in reversed(path.split(".") if path else []):
        module = nn.ModuleDict({part: module})
    name = f"{path}.embedding_bags.a" if path else "embedding_bags.a"
    parameters = f"model.{path}.parameters()" if path else "model.parameters()"
    with pytest.raises(UsageError) as error:
        swap(module).check_optimizers()
    assert str(error.value) == (
        f"table {name} has no optimizer: before the session is made, type "
        f'apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, {parameters}, {{"lr": 0.02}})'
    )


def of_another_kind():
    return FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=4, feature_names=["f"])],
        torch.optim.SGD,
        {"lr": 0.1},
        device=META,
    )


class Mine(torchrec.EmbeddingBagCollection):
    pass


def derived():
    return optimized(Mine(bags("a").embedding_bag_configs(), device=META))


def swapped_before():
    module = optimized(bags("a"))
    swap(module)
    return module


WRONG = {
    "no collection": (
        lambda: nn.Linear(2, 2),
        "the model has no EmbeddingBagCollection and no EmbeddingCollection: "
        "give the session a model whose tables are in torchrec's collections",
    ),
    "two optimizers": (
        lambda: optimized(optimized(bags("a")), torch.optim.Adagrad),
        "table embedding_bags.a has 2 optimizers (SGD, Adagrad): "
        "call apply_optimizer_in_backward once for each parameter",
    ),
    "an optimizer of another kind": (
        lambda: optimized(bags("a"), torch.optim.RMSprop),
        "table embedding_bags.a has the optimizer torch.optim.rmsprop.RMSprop: "
        "take torch.optim.SGD, Adagrad, Adam or AdamW, or torchrec.optim.RowWiseAdagrad",
    ),
    "decay of an unknown kind": (
        lambda: optimized(bags("a"), torchrec.optim.Adam, weight_decay=0.1),
        "table embedding_bags.a: torchrec.optim.Adam has weight_decay=0.1, and does not say which "
        "kind of decay: take torch.optim.Adam for L2 or torch.optim.AdamW for decoupled decay",
    ),
    "16 bits": (
        lambda: optimized(bags("a", data_type=DataType.FP16)),
        "table embedding_bags.a has rows of torch.float16: set its data_type to DataType.FP32",
    ),
    "a virtual table": (
        lambda: optimized(bags("a", use_virtual_table=True)),
        "table embedding_bags.a has use_virtual_table=True: leave use_virtual_table out",
    ),
    "a collection of another kind": (
        lambda: nn.ModuleDict({"x": of_another_kind()}),
        "x is a torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection: build it as "
        "a torchrec.EmbeddingBagCollection or EmbeddingCollection, or derive your class from "
        "ecrm.EmbeddingBagCollection or ecrm.EmbeddingCollection",
    ),
    "a derived collection": (
        derived,
        "the model is a test_session_swap.Mine: build it as a torchrec.EmbeddingBagCollection or "
        "EmbeddingCollection, or derive your class from ecrm.EmbeddingBagCollection or "
        "ecrm.EmbeddingCollection",
    ),
    "a model in two sessions": (
        swapped_before,
        "the model is in a session already: build the model anew for another session",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_models_that_a_session_cannot_keep(what):
    build, told = WRONG[what]
    module = build()
    with pytest.raises(UsageError) as error:
        swap(module)
    assert str(error.value).replace(f"{__name__}.", "test_session_swap.") == told


def test_a_class_derived_from_ours_stays_what_it_is():
    class OfOurs(EmbeddingBagCollection):
        pass

    module = OfOurs(bags("a").embedding_bag_configs(), device=META)
    tables = swap(optimized(module))
    assert type(module) is OfOurs and tables.collections == (module,)


def partial(function, **numbers):
    return functools.partial(function, **numbers)


BEGINNINGS = [
    ({}, None),
    ({"weight_init_min": -0.5, "weight_init_max": 0.125}, Uniform(-0.5, 0.125)),
    ({"init_fn": partial(nn.init.uniform_, a=-0.25, b=0.75)}, Uniform(-0.25, 0.75)),
    ({"init_fn": nn.init.uniform_}, Uniform(0.0, 1.0)),
    ({"init_fn": nn.init.zeros_}, Uniform(0.0, 0.0)),
    ({"init_fn": nn.init.ones_}, Uniform(1.0, 1.0)),
    ({"init_fn": partial(nn.init.constant_, val=3)}, Uniform(3.0, 3.0)),
]


@pytest.mark.parametrize("given, expected", BEGINNINGS)
def test_rows_begin_as_the_config_says(given, expected):
    tables = swap(optimized(bags("a", **given)))
    assert tables.tables[0].initial == expected and not tables.values


@pytest.mark.parametrize("fill", [nn.init.normal_, partial(nn.init.trunc_normal_, std=0.5)])
def test_a_function_that_fills_rows_alike_is_called_where_the_rows_are(fill):
    tables = swap(optimized(bags("a", init_fn=fill)))
    assert tables.tables[0].initial == InitFunction(fill) and not tables.values


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.xavier_uniform_,
        partial(nn.init.normal_, generator=torch.Generator()),
        functools.partial(nn.init.uniform_, None),
    ],
)
def test_functions_that_may_look_at_the_whole_table(fill):
    (config,) = bags("a", init_fn=fill).embedding_bag_configs()
    assert initial_of(config) is None


def test_an_init_fn_of_a_user_sees_the_whole_table():
    def fill(weight):
        nn.init.ones_(weight)
        weight[0] = 0  # padding

    tables = swap(optimized(bags("a", init_fn=fill)))
    values = tables.values["embedding_bags.a"]
    assert values.sum(1).tolist() == [0.0] + [4.0] * 9 and tables.tables[0].initial is None


def test_another_init_fn_is_called_the_same_way_on_every_rank():
    def own(weight):
        nn.init.normal_(weight, 3.0, 0.5)

    def model():
        return optimized(bags("a", "b", init_fn=own))

    before = torch.get_rng_state()
    tables = swap(model(), seed=7)
    assert torch.equal(before, torch.get_rng_state())
    a, b = tables.values["embedding_bags.a"], tables.values["embedding_bags.b"]
    assert a.shape == (10, 4) and 2 < float(a.mean()) < 4 and not a.requires_grad
    assert not torch.equal(a, b)
    torch.manual_seed(1)
    assert torch.equal(swap(model(), seed=7).values["embedding_bags.a"], a)
    assert not torch.equal(swap(model(), seed=8).values["embedding_bags.a"], a)


def test_values_of_tables_that_are_built_already_are_handed_over():
    module = nn.ModuleList([bags("a", device=None, init_fn=nn.init.xavier_uniform_), bags("b")])
    expected = module[0].embedding_bags["a"].weight.detach().clone()
    tables = swap(optimized(module))
    assert list(tables.values) == ["0.embedding_bags.a"]
    assert torch.equal(tables.values["0.embedding_bags.a"], expected)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert {part.device for part in module} == {torch.device("cpu")}  # where outputs are


def test_values_that_are_too_large(monkeypatch):
    monkeypatch.setattr(first_values_module, "LARGEST_VALUES", 1 << 20)
    config = EmbeddingBagConfig(
        name="a", num_embeddings=300_000, embedding_dim=1, feature_names=["f"]
    )
    with pytest.raises(UsageError) as error:
        swap(optimized(torchrec.EmbeddingBagCollection([config])))
    assert str(error.value) == (
        "tables of 1 MB, such as embedding_bags.a, are built in this process, "
        'and a session takes at most 1 MB of such: build them with device=torch.device("meta")'
    )
    config.init_fn = nn.init.xavier_uniform_
    with pytest.raises(UsageError) as error:
        swap(optimized(torchrec.EmbeddingBagCollection([config], device=META)))
    assert str(error.value) == (
        "tables of 1 MB, such as embedding_bags.a, are filled by an init_fn of their own, "
        "and a session takes at most 1 MB of such: take one of torch.nn.init that fills each row "
        "alike, such as uniform_ or normal_"
    )


SIZES = {"f1": 20, "f2": 30, "f3": 20}


def ebc():
    return torchrec.EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t1", num_embeddings=20, embedding_dim=8, feature_names=["f1", "f3"]
            ),
            EmbeddingBagConfig(
                name="t2", num_embeddings=30, embedding_dim=8, feature_names=["f2"],
                pooling=PoolingType.MEAN,
            ),
        ]
    )  # fmt: skip


class TwoTower(nn.Module):
    """Users by pooled rows, items by the row of one id."""

    def __init__(self):
        super().__init__()
        self.users, self.items = ebc(), rows_of_items()
        self.user_layer, self.item_layer = nn.Linear(24, 4), nn.Linear(8, 4)

    def forward(self, dense, kjt):
        user = self.user_layer(self.users(kjt).values())
        item = self.items(kjt)["f2"].to_padded_dense(1)[:, 0]
        return (user * self.item_layer(item)).sum(1) + dense.sum(1)


def rows_of_items():
    return torchrec.EmbeddingCollection(
        [EmbeddingConfig(name="item", num_embeddings=30, embedding_dim=8, feature_names=["f2"])]
    )


MODELS = {
    "DLRM": lambda: DLRM(ebc(), 10, [16, 8], [5, 1]),
    "DLRM_DCN": lambda: DLRM_DCN(ebc(), 10, [16, 8], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
    "DLRM_Projection": lambda: DLRM_Projection(ebc(), 10, [16, 8], [5, 1], [16, 16], [16, 16]),
    "SimpleDeepFMNN": lambda: SimpleDeepFMNN(10, ebc(), 16, 5),
    "TwoTower": TwoTower,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_torchrec_work_unmodified(name):
    torch.manual_seed(3)
    original = MODELS[name]()
    model = copy.deepcopy(original)
    for module in list(model.modules()):
        if isinstance(module, (torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection)):
            optimized(module, torchrec.optim.RowWiseAdagrad, lr=0.1)
    tables = swap(model)
    spaces = row_spaces(tables.tables)
    tables.lay_out(spaces)
    weights = {n.removesuffix(".weight"): p for n, p in original.named_parameters()}
    kjt, dense = a_batch(random.Random(name), SIZES, 6), torch.randn(6, 10)
    batch = tables.batch_rows([kjt], len(spaces))
    fetched = tables.source.current = fetched_rows(batch, spaces, weights)
    ours, theirs = model(dense, kjt), original(dense, kjt)
    assert torch.equal(ours, theirs)
    (ours.square().sum() + theirs.square().sum()).backward()
    assert any(leaf.grad.abs().sum() > 0 for leaf in fetched.leaves)
    check_gradients(fetched, spaces, weights)
    for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        if ours.is_meta:
            assert ours.grad is None and name.removesuffix(".weight") in tables.values
        else:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_large_embeddings_of_torchs_own_are_told():
    model = nn.ModuleDict(
        {
            "bags": bags("a"),
            "small": nn.Embedding(100, 8),
            "users": nn.Embedding(50_000, 8),
            "words": nn.EmbeddingBag(40_000, 8),
        }
    )
    first, second = large_embeddings(model)
    assert first.startswith("! users is a torch.nn.Embedding of 1.6 MB: it is replicated on each ")
    assert first.endswith("use a torchrec.EmbeddingCollection")
    assert second.startswith("! words is a torch.nn.EmbeddingBag of 1.3 MB")
    assert second.endswith("use a torchrec.EmbeddingBagCollection")
