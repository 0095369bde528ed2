"""The collections of a session against TorchRec's, with plain parameters, bit for bit."""

import copy
import dataclasses
import random
from collections import namedtuple

import pytest
import torch
import torchrec
from tensordict import TensorDict
from torch import nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)

from ecrm.base.errors import DataError, StrayId, UsageError
from ecrm.kernels.pieces import Piece
from ecrm.kernels.unit_order import unique_with_uses
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.protection.routing import FoundRows
from ecrm.tables.batch_rows import BatchRows, find_kjts
from ecrm.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from ecrm.tables.pooling import pool, reads_in_place
from ecrm.tables.row_source import RowSource
from support.fetching import a_batch, check_gradients, fetched_rows


class InSession:
    """Collections that look up rows of the weights of TorchRec's collections.

    They have `optimizers` in turn, and each of these its own row spaces.
    """

    def __init__(self, *originals, optimizers=1):
        self.source, self.originals = RowSource(), originals
        self.collections = [of_ours(original) for original in originals]
        self.weights = {
            f"{number}.{config.name}": weight_of(original, config.name)
            for number, original in enumerate(originals)
            for config in configs_of(original)
        }
        self.spaces = row_spaces(
            [
                Table(name, *weight.shape, SparseOptimizer("sgd", place % optimizers))
                for place, (name, weight) in enumerate(self.weights.items())
            ]
        )
        self.layouts = []
        for number, collection in enumerate(self.collections):
            names = [f"{number}.{config.name}" for config in collection.configs()]
            collection.take_rows_from(self.source, names)
            self.layouts.append(collection.lay_out(number, self.spaces))

    def fetch(self, *kjts, training=True):
        batch = BatchRows.of(kjts, self.layouts, len(self.spaces))
        for rows in batch.rows:
            assert rows.dtype == torch.int64 and torch.equal(rows, rows.unique())
        self.source.current = fetched_rows(batch, self.spaces, self.weights, training)
        return self.source.current

    def check_gradients(self):
        check_gradients(self.source.current, self.spaces, self.weights)


def configs_of(collection):
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    return collection.embedding_bag_configs() if bags else collection.embedding_configs()


def weight_of(collection, name):
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    return (collection.embedding_bags if bags else collection.embeddings)[name].weight


def of_ours(original):
    meta = torch.device("meta")
    if isinstance(original, torchrec.EmbeddingBagCollection):
        return EmbeddingBagCollection(configs_of(original), original.is_weighted(), device=meta)
    return EmbeddingCollection(configs_of(original), meta, original.need_indices())


def random_tables(draw, config_type, dims, **extra):
    """Tables over features a to f, some of which several tables share, and the features' sizes."""
    tables = []
    for name in "stuvw"[: draw.randrange(1, 6)]:
        features = draw.sample("abcdef", draw.randrange(1, 4))
        pooling = {} if not extra else {"pooling": draw.choice(extra["poolings"])}
        tables.append(
            config_type(
                name=name,
                num_embeddings=draw.randrange(1, 30),
                embedding_dim=draw.choice(dims),
                feature_names=features,
                **pooling,
            )
        )
    sizes = {}
    for table in tables:
        for feature in table.feature_names:
            sizes[feature] = min(sizes.get(feature, 99), table.num_embeddings)
    for unused in draw.sample("xyz", draw.randrange(3)):
        sizes[unused] = 1000
    features = list(sizes.items())
    draw.shuffle(features)
    return tables, dict(features)


@pytest.mark.parametrize("seed", range(40))
def test_bags_are_those_of_torchrec(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weighted = draw.random() < 0.4
    poolings = [PoolingType.SUM] if weighted else [PoolingType.SUM, PoolingType.MEAN]
    tables, sizes = random_tables(draw, EmbeddingBagConfig, [1, 4, 8], poolings=poolings)
    original = torchrec.EmbeddingBagCollection(tables, is_weighted=weighted)
    session = InSession(original, optimizers=draw.randrange(1, 4))
    samples = draw.randrange(1, 6)
    assert session.collections[0].state_dict().keys() == original.state_dict().keys()
    id_type = draw.choice([torch.int64, torch.int32])
    empty = draw.sample(list(sizes), draw.randrange(len(sizes) + 1)) if seed % 3 == 0 else ()
    kjt = a_batch(draw, sizes, samples, weighted or seed % 5 == 0, id_type, empty)
    session.fetch(kjt)
    ours, theirs = session.collections[0](kjt), original(kjt)
    assert (ours.keys(), ours.length_per_key()) == (theirs.keys(), theirs.length_per_key())
    assert ours.values().dtype == torch.float32
    assert torch.equal(ours.values(), theirs.values())
    slope = torch.randn_like(theirs.values())
    (ours.values() * slope).sum().backward()
    (theirs.values() * slope).sum().backward()
    session.check_gradients()


@pytest.mark.parametrize("seed", range(25))
def test_rows_are_those_of_torchrec(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tables, sizes = random_tables(draw, EmbeddingConfig, [draw.choice([1, 4, 8])])
    original = torchrec.EmbeddingCollection(tables, need_indices=seed % 2 == 0)
    session = InSession(original, optimizers=draw.randrange(1, 4))
    kjt = a_batch(draw, sizes, draw.randrange(1, 6), seed % 5 == 0)
    session.fetch(kjt)
    ours, theirs = session.collections[0](kjt), original(kjt)
    assert list(ours) == list(theirs)
    total = torch.zeros(())
    for name, expected in theirs.items():
        found = ours[name]
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.lengths(), expected.lengths())
        assert (found.weights_or_none() is None) == (expected.weights_or_none() is None)
        if seed % 2 == 0:
            assert torch.equal(found.weights(), expected.weights())
        slope = torch.randn_like(expected.values())
        total = total + (found.values() * slope).sum() + (expected.values() * slope).sum()
    total.backward()
    session.check_gradients()


def test_outputs_of_an_embedding_collection_may_be_changed_in_place():
    session = InSession(torchrec.EmbeddingCollection([item_table(EmbeddingConfig)]))
    session.fetch(kjt := clicks([3, 3]))
    values = session.collections[0](kjt)["clicked"].values()
    values.mul_(2)
    values.sum().backward()
    assert session.source.current.leaves[0].grad.tolist() == [[4.0] * 4]


def item_table(config_type=EmbeddingBagConfig, **more):
    return config_type(
        name="item", num_embeddings=90, embedding_dim=4, feature_names=["clicked"], **more
    )


def clicks(ids, lengths=None, feature="clicked", id_type=torch.int64):
    lengths = torch.tensor([1] * len(ids) if lengths is None else lengths)
    return KeyedJaggedTensor([feature], torch.tensor(ids, dtype=id_type), lengths=lengths)


def test_one_operation_per_row_space_and_pooling(monkeypatch):
    import ecrm.tables.collections as collections_module

    calls, real = [], collections_module.pool
    monkeypatch.setattr(
        collections_module, "pool", lambda *given: calls.append(given[3:6]) or real(*given)
    )
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=9,
            embedding_dim=4 if i % 2 else 8,
            feature_names=[f"f{i}"],
            pooling=PoolingType.MEAN if i in (1, 3) else PoolingType.SUM,
        )
        for i in range(8)
    ]
    session = InSession(torchrec.EmbeddingBagCollection(tables))
    kjt = a_batch(random.Random(0), {f"f{i}": 9 for i in range(8)}, 3)
    session.fetch(kjt)
    session.collections[0](kjt)
    assert sorted(calls) == [("mean", None, 1), ("sum", None, 1), ("sum", None, 1)]
    alike = InSession(torchrec.EmbeddingBagCollection(tables[::4]))
    alike.fetch(kjt)
    calls.clear()
    alike.collections[0](kjt)
    assert calls == [("sum", None, 2)], "bags of one kind come out side by side"


def test_inverse_indices_and_a_batch_size_per_feature():
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="u", num_embeddings=9, embedding_dim=8, feature_names=["a"]),
    ]
    original = torchrec.EmbeddingBagCollection(tables)
    session = InSession(original)
    kjt = KeyedJaggedTensor(
        ["b", "a"],
        torch.tensor([1, 2, 3, 8, 4]),
        lengths=torch.tensor([2, 1, 0, 2]),
        stride_per_key_per_rank=[[3], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0, 0], [2, 1, 0, 0]])),
    )
    session.fetch(kjt)
    ours, theirs = session.collections[0](kjt), original(kjt)
    assert ours.values().shape == (4, 16)
    assert torch.equal(ours.values(), theirs.values())
    (ours.values() ** 2 + theirs.values() ** 2).sum().backward()
    session.check_gradients()


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_a_tensor_dict_is_taken_for_a_keyed_jagged_tensor(kind):
    if kind == "bags":
        original = torchrec.EmbeddingBagCollection([item_table()])
    else:
        original = torchrec.EmbeddingCollection([item_table(EmbeddingConfig)])
    session = InSession(original)
    ids, ends = torch.tensor([3, 89, 3, 0]), torch.tensor([0, 2, 2, 4])
    features = TensorDict({"clicked": torch.nested.nested_tensor_from_jagged(ids, ends)})
    assert find_kjts({"label": ids, "features": features}) == [features]
    session.fetch(features)
    ours, theirs = session.collections[0](features), original(features)
    if kind == "rows":
        ours, theirs = ours["clicked"], theirs["clicked"]
    assert torch.equal(ours.values(), theirs.values())


def test_two_collections_share_a_row_space_and_a_batch():
    user = torchrec.EmbeddingBagCollection(
        [EmbeddingBagConfig(name="user", num_embeddings=5, embedding_dim=4, feature_names=["u"])]
    )
    item = torchrec.EmbeddingCollection([item_table(EmbeddingConfig)])
    session = InSession(user, item)
    assert len(session.spaces) == 1
    kjts = clicks([4, 0], feature="u"), clicks([80, 3], [0, 2])
    fetched = session.fetch(*kjts)
    assert fetched.batch.rows[0].tolist() == [0, 4, 5 + 3, 5 + 80]
    assert torch.equal(session.collections[0](kjts[0]).values(), user(kjts[0]).values())
    assert torch.equal(
        session.collections[1](kjts[1])["clicked"].values(), item(kjts[1])["clicked"].values()
    )


def test_a_kjt_that_the_model_made_is_searched_for():
    original = torchrec.EmbeddingBagCollection([item_table()])
    session = InSession(original)
    session.fetch(clicks([7, 3, 50, 3]))
    other = clicks([3, 50], [2, 0])
    assert torch.equal(session.collections[0](other).values(), original(other).values())
    with pytest.raises(UsageError) as error:
        session.collections[0](clicks([3, 4], [0, 2]))
    assert str(error.value) == (
        'feature "clicked" of sample 1: id 4 of table item was not fetched for this batch: '
        "give the session a sparse= that returns every KeyedJaggedTensor whose ids the model "
        "looks up"
    )
    session.fetch()
    with pytest.raises(UsageError, match="id 3 of table item was not fetched"):
        session.collections[0](clicks([3]))


@pytest.mark.parametrize("kind", ["kjt", "dict"])
def test_a_model_may_change_ids_in_place(kind):
    original = torchrec.EmbeddingBagCollection([item_table()])
    session = InSession(original)
    batch = clicks([7, 3, 50])
    if kind == "dict":
        values = torch.nested.nested_tensor_from_jagged(batch.values(), torch.arange(4))
        batch = TensorDict({"clicked": values})
    fetched = session.fetch(batch)
    before = session.collections[0](batch).values()
    assert torch.equal(before, original(batch).values())
    fetched.batch._search = lambda *_: pytest.fail("searched for")
    session.collections[0](batch)
    del fetched.batch._search
    (batch["clicked"]._values if kind == "dict" else batch.values()).clamp_(max=7)
    changed = session.collections[0](batch).values()
    assert torch.equal(changed, original(batch).values()) and not torch.equal(changed, before)


def test_a_model_may_mend_ids_before_it_looks_them_up():
    """The session asks for no row of an id that no table has, nor reads one of the next table."""
    tables = [item_table(), EmbeddingBagConfig(name="next", num_embeddings=9, embedding_dim=4)]
    original = torchrec.EmbeddingBagCollection(tables)
    session = InSession(original)
    ids = KeyedJaggedTensor(
        ["clicked", "next"], torch.tensor([-1, 91, 5, 8]), lengths=torch.tensor([2, 1, 0, 1])
    )
    assert session.fetch(ids).batch.rows[0].tolist() == [5, 98]
    mended = KeyedJaggedTensor(
        ["clicked", "next"], torch.tensor([5, 8]), lengths=torch.tensor([0, 1, 0, 1])
    )
    assert torch.equal(session.collections[0](mended).values(), original(mended).values())
    with pytest.raises(StrayId, match='feature "clicked" of sample 0: id -1'):
        session.collections[0](ids)


@pytest.mark.parametrize("where", ["session", "derived", "alone"])
@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("stray", [91, 90, -1])
def test_an_id_that_its_table_does_not_have(kind, where, stray):
    kjt = clicks([0, 89, stray, 7, 3], [1, 1, 0, 3])
    ours = {
        "bags": lambda: EmbeddingBagCollection([item_table()]),
        "rows": lambda: EmbeddingCollection([item_table(EmbeddingConfig)]),
    }[kind]()
    if where != "alone":
        session = InSession(ours)
        session.fetch(kjt if where == "session" else clicks([0]))
        ours = session.collections[0]
    with pytest.raises(StrayId) as error:
        ours(kjt)
    assert str(error.value) == (
        f'feature "clicked" of sample 3: id {stray} is not in table item, whose ids are 0 to 89'
    )
    assert isinstance(error.value, IndexError) and isinstance(error.value, DataError)


def test_errors_that_torchrec_raises_too():
    original = torchrec.EmbeddingBagCollection([item_table()], is_weighted=True)
    session = InSession(original)
    other, unweighted = clicks([1], feature="other"), clicks([1])
    session.fetch(other, unweighted)
    for collection in (original, session.collections[0]):
        with pytest.raises(KeyError, match="clicked"):
            collection(other)
        with pytest.raises(AssertionError, match="doesn't have weights"):
            collection(unweighted)
    means = torchrec.EmbeddingBagCollection([item_table(pooling=PoolingType.MEAN)], True)
    session = InSession(means)
    weighted = KeyedJaggedTensor(["clicked"], torch.tensor([1]), torch.ones(1), torch.tensor([1]))
    session.fetch(weighted)
    for collection in (means, session.collections[0]):
        with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
            collection(weighted)
    for kind in (torchrec.EmbeddingBagCollection, EmbeddingBagCollection):
        with pytest.raises(ValueError, match="Duplicate table name item"):
            kind([item_table(), item_table()])
    for kind in (torchrec.EmbeddingCollection, EmbeddingCollection):
        narrow = EmbeddingConfig(name="narrow", num_embeddings=1, embedding_dim=2)
        with pytest.raises(ValueError, match="same embedding dimension"):
            kind([item_table(EmbeddingConfig), narrow])


def test_ids_that_are_no_whole_numbers():
    session = InSession(torchrec.EmbeddingBagCollection([item_table()]))
    session.fetch(kjt := clicks([1.5], id_type=torch.float32))
    assert session.source.current.batch.rows[0].numel() == 0
    with pytest.raises(DataError) as error:
        session.collections[0](kjt)
    assert str(error.value) == (
        'ids of feature "clicked" are torch.float32, needed: torch.int64 or torch.int32'
    )


def test_a_lookup_outside_a_step():
    session = InSession(torchrec.EmbeddingBagCollection([item_table()]))
    with pytest.raises(UsageError) as error:
        session.collections[0](clicks([1]))
    assert str(error.value) == (
        "rows of table item are looked up, and no step fetched any: "
        "call the model inside session.steps or session.eval_batches"
    )


def odd(keys="ab", ids=(1, 2, 3, 4), lengths=(1, 1, 1, 1), dtype=torch.float32, **more):
    ids = torch.tensor(ids, dtype=torch.int64)
    weights = torch.full((len(ids),), 0.3, dtype=dtype)
    return KeyedJaggedTensor(list(keys), ids, weights, torch.tensor(lengths).long(), **more)


ODD = {
    "no ids": lambda: odd(ids=(), lengths=(0,) * 4),
    "no samples": lambda: odd(ids=(), lengths=()),
    "no features": KeyedJaggedTensor.empty,
    "no weights": lambda: KeyedJaggedTensor(["a", "b"], torch.arange(4), offsets=torch.arange(5)),
    "a feature missing": lambda: odd("ac"),
    "a feature twice": lambda: odd("aab", range(6), (1,) * 6),
    "batch sizes": lambda: odd("ab", (1, 2, 3), (1, 1, 1), stride_per_key_per_rank=[[2], [1]]),
    "weights of 64 bits": lambda: odd(dtype=torch.float64),
    "views": lambda: KeyedJaggedTensor(
        ["a", "b"], torch.arange(8)[::2], torch.rand(8)[::2], torch.ones(8, dtype=torch.int32)[::2]
    ),
}


@pytest.mark.parametrize("kind", ["bags", "mean", "weighted", "rows", "no tables"])
@pytest.mark.parametrize("name", ODD)
def test_odd_batches_come_to_what_torchrec_makes_of_them(name, kind):
    """Values, or the type of the error."""
    table = {"num_embeddings": 9, "embedding_dim": 4, "feature_names": ["a", "b", "a"]}
    if kind == "rows":
        original = torchrec.EmbeddingCollection([EmbeddingConfig(name="t", **table)], None, True)
    else:
        pooling = PoolingType.MEAN if kind == "mean" else PoolingType.SUM
        tables = [EmbeddingBagConfig(name="t", pooling=pooling, **table)]
        original = torchrec.EmbeddingBagCollection(
            [] if kind == "no tables" else tables, is_weighted=kind == "weighted"
        )
    session = InSession(original)
    alone = type(session.collections[0])(*arguments_of(original))
    alone.load_state_dict(original.state_dict())
    kjt = ODD[name]()
    session.fetch(kjt)
    expected = outcome(original, kjt)
    assert outcome(alone, kjt) == expected
    if name == "no samples" and kind != "no tables":
        assert expected is IndexError  # a session gives no samples for no samples
        found = session.collections[0](kjt)
        parts = found.values() if kind == "rows" else [found]
        assert all(len(part.values()) == 0 for part in parts)
    else:
        assert outcome(session.collections[0], kjt) == expected


def arguments_of(original):
    if isinstance(original, torchrec.EmbeddingBagCollection):
        return configs_of(original), original.is_weighted()
    return configs_of(original), None, original.need_indices()


def outcome(collection, kjt):
    """What a batch comes to, as something that can be compared."""
    try:
        found = collection(kjt)
    except Exception as error:
        return type(error)
    if isinstance(found, dict):
        return [
            (name, j.values().tolist(), j.lengths().tolist(), j.weights().tolist())
            for name, j in found.items()
        ]
    return found.keys(), found.length_per_key(), found.values().tolist()


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_rows_of_a_session_are_not_drawn_anew_by_the_script(kind):
    bags = kind is EmbeddingBagCollection
    config_type = EmbeddingBagConfig if bags else EmbeddingConfig
    alone = kind([item_table(config_type, init_fn=nn.init.ones_)])
    next(alone.parameters()).data.zero_()
    alone.reset_parameters()
    assert float(next(alone.parameters()).detach().min()) == 1.0
    with pytest.raises(UsageError) as error:
        InSession(alone).collections[0].reset_parameters()
    assert str(error.value) == (
        "reset_parameters() of the collection with table item, whose rows a session keeps: "
        "call it before the session is made, or give the table an init_fn"
    )


def test_evaluation_builds_no_graph():
    session = InSession(torchrec.EmbeddingBagCollection([item_table()]))
    session.fetch(kjt := clicks([1]), training=False)
    assert not session.collections[0](kjt).values().requires_grad


def test_a_copy_of_the_model_looks_up_the_same_rows():
    session = InSession(torchrec.EmbeddingBagCollection([item_table()]))
    session.fetch(kjt := clicks([1, 5]))
    average = copy.deepcopy(session.collections[0])
    session.fetch(kjt := clicks([7, 8]))
    assert torch.equal(average(kjt).values(), session.collections[0](kjt).values())


@pytest.mark.parametrize("seed", range(4))
def test_built_by_themselves_they_are_torchrecs(seed):
    draw = random.Random(seed)
    tables, sizes = random_tables(
        draw, EmbeddingBagConfig, [4, 8], poolings=[PoolingType.SUM, PoolingType.MEAN]
    )
    rows, row_sizes = random_tables(draw, EmbeddingConfig, [4])
    for ours, theirs, kjt in (
        (EmbeddingBagCollection(tables), torchrec.EmbeddingBagCollection(tables), sizes),
        (EmbeddingCollection(rows), torchrec.EmbeddingCollection(rows), row_sizes),
    ):
        kjt = a_batch(draw, kjt, 3)
        theirs.load_state_dict(ours.state_dict())
        found, expected = ours(kjt), theirs(kjt)
        if isinstance(found, dict):
            assert list(found) == list(expected)
            pairs = [(found[name].values(), expected[name].values()) for name in expected]
        else:
            pairs = [(found.values(), expected.values())]
        assert all(torch.equal(a, b) for a, b in pairs)
        sum((a.sum() + b.sum() for a, b in pairs), torch.zeros(())).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "rows"])
def test_gradients_are_summed_in_the_order_of_the_ids(kind):
    """Sums of floats depend on their order: many threads must not change it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (4000,), generator=generator)
    weights = torch.rand(4000, generator=generator)
    kjt = KeyedJaggedTensor(["clicked"], ids, weights, lengths=torch.tensor([0, 3, 1] * 1000))
    bag_of = torch.repeat_interleave(kjt.lengths())
    if kind == "rows":
        session = InSession(torchrec.EmbeddingCollection([item_table(EmbeddingConfig)]))
        slope = torch.randn(4000, 4, generator=generator)
        of_ids = slope
    else:
        pooling = PoolingType.MEAN if kind == "mean" else PoolingType.SUM
        session = InSession(
            torchrec.EmbeddingBagCollection([item_table(pooling=pooling)], kind == "weighted")
        )
        slope = torch.randn(3000, 4, generator=generator)
        of_ids = slope[bag_of]
        if kind == "mean":
            of_ids = of_ids / kjt.lengths()[bag_of].unsqueeze(1)
        if kind == "weighted":
            of_ids = of_ids * weights.unsqueeze(1)
    session.fetch(kjt)
    output = session.collections[0](kjt)
    output = output["clicked"] if kind == "rows" else output
    (output.values() * slope).sum().backward()
    expected = torch.zeros(3, 4)
    for number, part in zip(ids.tolist(), of_ids):
        expected[number] += part
    assert torch.equal(session.source.current.leaves[0].grad, expected)


def test_weights_of_a_batch_may_be_learned():
    original = torchrec.EmbeddingBagCollection([item_table()], is_weighted=True)
    session, grads = InSession(original), []
    for collection in (original, session.collections[0]):
        weights = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
        kjt = KeyedJaggedTensor(
            ["clicked"], torch.tensor([1, 80, 1]), weights, lengths=torch.tensor([2, 0, 1])
        )
        session.fetch(kjt)
        (collection(kjt).values() * torch.arange(12.0).view(3, 4)).sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(*grads)
    session.check_gradients()


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_batch_without_any_id(pooling):
    original = torchrec.EmbeddingBagCollection([item_table(pooling=pooling)])
    session = InSession(original)
    session.fetch(kjt := clicks([], [0, 0]))
    output = session.collections[0](kjt).values()
    assert torch.equal(output, torch.zeros(2, 4))
    output.sum().backward()
    assert session.source.current.leaves[0].grad.shape == (0, 4)


def test_built_on_the_meta_device_they_say_the_shapes_of_their_output():
    collection = EmbeddingBagCollection([item_table()], device=torch.device("meta"))
    ids, lengths = torch.tensor([1, 2, 3], device="meta"), torch.tensor([1, 2], device="meta")
    kjt = KeyedJaggedTensor(["clicked"], ids, lengths=lengths, length_per_key=[3])
    values = collection(kjt).values()
    assert values.is_meta and values.shape == (2, 4)


def test_kjts_are_found_in_batches_of_any_kind():
    a, b, c = (clicks([i]) for i in range(3))
    pair = namedtuple("pair", "first, second")

    @dataclasses.dataclass
    class Batch:
        dense: torch.Tensor
        sparse: KeyedJaggedTensor
        more: object

    class Plain:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    dense = torch.zeros(2)
    assert find_kjts(a) == [a]
    assert find_kjts((dense, a, {"x": [b, c]})) == [a, b, c]
    assert find_kjts({"x": a, "y": dense, "z": a}) == [a]
    assert find_kjts(Batch(dense, b, pair(a, "text"))) == [b, a]
    assert find_kjts(Plain(x=3, y=c, z=Plain(u=None, v=a))) == [c, a]
    assert find_kjts(TensorDict({"dense": dense})) == []
    assert find_kjts([[[[a]]]]) == [] and find_kjts([[[a]]]) == [a]
    assert find_kjts(nn.Linear(1, 1)) == [] and find_kjts(None) == []
    assert find_kjts(JaggedTensor(a.values(), lengths=a.lengths())) == []


@pytest.mark.parametrize("samples", [0, 1, 5])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_bags_of_a_sample_side_by_side_are_those_of_one_feature_each(mode, samples):
    torch.manual_seed(3)
    features, width = 3, 4
    lengths = torch.randint(0, 4, (features * samples,))
    places = torch.randint(0, 7, (int(lengths.sum()),))
    found = []
    for at_once in (True, False):
        rows = torch.arange(28.0).view(7, width).div(7).requires_grad_()
        weights = (
            torch.arange(1.0, 1 + len(places)).requires_grad_() if mode == "weighted" else None
        )
        given = (rows, places, lengths, "sum" if mode == "weighted" else mode, weights)
        if at_once:
            bags = pool(*given, features)
        else:
            bags = torch.cat(pool(*given).split([samples] * features), 1)
        assert bags.shape == (samples, features * width)
        (bags * torch.arange(1.0, 1 + bags.numel()).view(bags.shape)).sum().backward()
        found.append((bags, rows.grad, weights.grad if weights is not None else None))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


@pytest.mark.parametrize("ids_per_bag", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("beside", [(4, 0), (0, 8), (3, 0), (4, 4)])
def test_gradients_that_lie_apart_sum_up_as_those_in_one_piece(beside, mode, ids_per_bag):
    """torch.cat with something `beside` the bags gives back gradients with a longer stride."""
    torch.manual_seed(4)
    features, width, samples = 3, 4, 5
    lengths = torch.randint(0, 4, (features * samples,))
    if ids_per_bag is not None:
        lengths.fill_(ids_per_bag)
    places = torch.randint(0, 7, (int(lengths.sum()),))
    weights = torch.arange(1.0, 1 + len(places)) if mode == "weighted" else None
    whole = torch.randn(samples, beside[0] + features * width + beside[1])
    part = whole[:, beside[0] :][:, : features * width]
    whole[:, : beside[0]] = whole[:, beside[0] + features * width :] = torch.nan
    found = []
    for gradients in part, part.clone():
        rows = torch.arange(28.0).view(7, width).div(7).requires_grad_()
        kind = "sum" if mode == "weighted" else mode
        pool(rows, places, lengths, kind, weights, features).backward(gradients)
        found.append(rows.grad)
    assert not part.is_contiguous() and found[0].isfinite().all()
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_bags_are_pooled_where_the_rows_lie(mode):
    """The leaf holds NaN, so a read of the leaf shows; the sums are those of a filled leaf."""
    ids, lengths = torch.tensor([3, 1, 3, 3, 2, 1]), torch.tensor([2, 0, 3, 1])
    unique, places, uses = unique_with_uses(ids, 1)
    weights = torch.tensor([0.5, -2.0, 3.0, 0.1, 7.0, -0.3]) if mode == "weighted" else None
    kind = "sum" if mode == "weighted" else mode
    values = torch.randn(len(unique), 8, generator=torch.Generator().manual_seed(1))
    pieces = [Piece(values[[0]], 0, None, torch.tensor([0]))]
    pieces.append(Piece(values, 0, torch.tensor([2, 1]), torch.tensor([2, 1])))
    found = FoundRows(len(unique), 8, pieces, torch.empty)
    filled, leaf = values.clone().requires_grad_(), torch.full_like(values, torch.nan)
    assert reads_in_place(leaf.requires_grad_(), kind, weights)
    expected = pool(filled, places, lengths, kind, weights)
    bags = pool(leaf, places, lengths, kind, weights, uses=uses, found=found)
    assert torch.equal(bags, expected) and not bags.isnan().any()
    for each in (expected, bags):
        (each * torch.arange(32.0).view(4, 8).div(7)).sum().backward()
    assert torch.equal(leaf.grad, filled.grad)
    if mode == "weighted":
        assert not reads_in_place(leaf, kind, weights.requires_grad_())
        assert not reads_in_place(leaf, "mean", weights.detach())
    assert not reads_in_place(leaf.double(), kind, None)


def test_gradients_left_for_later_are_those_of_backward_whoever_changes_its_own():
    """A parameter added to the bags has the same gradient, and a script may change it in place."""
    ids = torch.tensor([3, 1, 3, 3, 2])
    unique, places, uses = unique_with_uses(ids, 1)
    lengths, kept = torch.tensor([2, 0, 3]), []
    for later in (lambda gradients: False, lambda gradients: not kept.append(gradients)):
        rows = torch.randn(len(unique), 8, generator=torch.Generator().manual_seed(1))
        bias = nn.Parameter(torch.zeros(3, 8))
        bags = pool(rows.requires_grad_(), places, lengths, "sum", uses=uses, later=later)
        (bags + bias).square().sum().backward()
        bias.grad.mul_(7)
        if rows.grad is not None:
            expected = rows.grad
    sums = torch.full_like(expected, torch.nan)
    (gradients,) = kept
    assert rows.grad is None and gradients.sum_into(sums)
    assert torch.equal(sums, expected)
    assert gradients.sum_into(sums, 3.0) and torch.equal(sums, expected / 3)
