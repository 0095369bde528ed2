"""A prepared table as a dataset: batches, parts, damage, and the attributes for a model."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.base.errors import DataError, UsageError
from support.columns import CSV, SMALL, prepared_small, row_of
from support.datasets import prepared
from support.paths import ROOT


@pytest.fixture
def table(tmp_path):
    return ecrm.Table(prepared_small(tmp_path))


def test_a_batch_is_torchrec_s(table):
    (batch,) = [table.collate(table.__getitems__([3, 0]))]
    assert batch.dense_features.tolist() == [[4], [2.5]]
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [0, 1]
    kjt = batch.sparse_features
    assert kjt.keys() == ["movie", "genres", "tags"]
    assert kjt.lengths().tolist() == [1, 1, 2, 2, 1, 2]
    movie, new, old, other = (
        row_of(t, n) for t, n in (("m1", 50), ("new", 20), ("old", 20), ("x:y", 20))
    )
    assert kjt.values().tolist() == [movie, movie, 3, 1, 1, 2, other, new, old]
    assert kjt.weights().tolist() == [1, 1, 1, 1, 1, 1, 3, 0.5, 2]
    assert kjt.values().dtype == torch.int64


def test_names_and_sizes_for_a_model(table):
    assert table.rows == {"movie": 50, "genres": 4, "tags": 20}
    assert table.features == {"movie": ["movie"], "genres": ["genres"], "tags": ["tags"]}
    assert table.dense == ["price"] and table.weighted == ["tags"]


def test_rows_one_by_one_and_many_are_the_same(table):
    whole = table.collate(table.__getitems__([0, 1, 2, 3]))
    for batch in (
        table.collate([table[0], table[1], table[-2], table[3]]),
        next(iter(DataLoader(table, 4, collate_fn=table.collate))),
        next(iter(DataLoader(Subset(table, range(4)), 4, collate_fn=table.collate))),
        ecrm.Indexed(table, 4, table.collate, shuffle=False).batch(0, 0, 1),
    ):
        assert torch.equal(batch.dense_features, whole.dense_features)
        assert torch.equal(batch.labels, whole.labels)
        for part in ("keys", "values", "lengths", "weights"):
            one, two = (getattr(b.sparse_features, part)() for b in (batch, whole))
            assert one == two if part == "keys" else torch.equal(one, two)
    with pytest.raises(IndexError, match="row 4 of 4 rows"):
        table[4]


def test_two_tables_in_a_row(table):
    batches = ecrm.Indexed(ConcatDataset([table.train, table]), 7, table.collate, shuffle=False)
    batch = batches.batch(0, 0, 1)
    assert batch.labels.tolist() == [1, 0, 1, 1, 0, 1, 0]
    assert batch.sparse_features["genres"].lengths().tolist() == [2, 1, 0, 2, 1, 0, 2]


def test_parts(table, tmp_path):
    assert [len(part) for part in (table, table.train, table.held_out)] == [4, 3, 1]
    assert table.held_out[0].labels.tolist() == [0]
    assert table.held_out[0].dense.tolist() == [[4]]
    assert len(table.train.held_out) == 0 and len(table.train.train) == 3
    schema = SMALL.replace('note = { kind = "unused" }', 'note = { kind = "time" }')
    (tmp_path / "timed").mkdir()
    text = "".join(
        f"{line.rsplit(',', 1)[0]},{t}\n" for line, t in zip(CSV.splitlines(), ["note", 4, 1, 3, 2])
    )
    timed = ecrm.Table(prepared_small(tmp_path / "timed", text.replace(',"a', ""), schema))
    assert timed.train.__getitems__([0, 1, 2]).dense[:, 0].tolist() == [0, 4, -3]
    assert timed.held_out[0].dense.tolist() == [[2.5]]


def test_without_dense_columns_and_without_weights(tmp_path):
    schema = '[columns]\ny = { kind = "label" }\nid = { kind = "categorical", rows = 9 }\n'
    table = ecrm.Table(prepared_small(tmp_path, "y,id\n1,a\n0,\n", schema))
    batch = table.collate(table.__getitems__([1, 0]))
    assert batch.dense_features.shape == (2, 0)
    assert batch.sparse_features.weights_or_none() is None
    assert batch.sparse_features.values().tolist() == [0, row_of("a", 9)]


def test_lists_all_empty(tmp_path):
    schema = '[columns]\ny = { kind = "label" }\n'
    schema += 'id = { kind = "multi_hot", rows = 9, separator = " " }\n'
    table = ecrm.Table(prepared_small(tmp_path, "y,id\n1,\n0,\n", schema))
    batch = table.collate(table.__getitems__([1, 0]))
    assert batch.sparse_features.lengths().tolist() == [0, 0]
    assert batch.sparse_features.values().tolist() == []


def test_the_digest_is_of_the_data_alone(tmp_path):
    digests = []
    for name, text in (("a", CSV), ("b", CSV), ("c", CSV.replace("2.5", "2.6"))):
        (tmp_path / name).mkdir()
        digests.append(ecrm.Table(prepared_small(tmp_path / name, text)).digest)
    assert digests[0] == digests[1] != digests[2]
    schema = SMALL.replace("rows = 20", 'rows = 20, table = "other"')
    assert (
        ecrm.Table(prepared_small(tmp_path / "c", schema=schema, force=True)).digest != digests[0]
    )


class Model(nn.Module):
    """Bags of two unweighted tables and of a weighted table, under a linear layer."""

    def __init__(self, table):
        super().__init__()
        weighted = set(table.weighted)
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=4, feature_names=table.features[name]
            )
            for name, rows in table.rows.items()
        ]
        plain = [one for one in configs if not weighted & set(one.feature_names)]
        others = [one for one in configs if weighted & set(one.feature_names)]
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(tables=plain, device=meta)
        self.weighted = EmbeddingBagCollection(tables=others, is_weighted=True, device=meta)
        self.layer = nn.Linear(4 * len(configs) + len(table.dense), 1)

    def forward(self, batch):
        kjt = batch.sparse_features
        parts = [self.bags(kjt).values(), self.weighted(kjt).values(), batch.dense_features]
        return self.layer(torch.cat(parts, 1)).squeeze(1)


def trained(table, workers):
    """The losses of a session over the training rows, and of the held-out rows at the end."""
    torch.manual_seed(0)
    model = Model(table)
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(RowWiseAdagrad, model.weighted.parameters(), {"lr": 0.1})
    session = ecrm.Session(
        model, slots=2, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), check_determinism=0
    )
    losses = []
    batches = ecrm.Indexed(table.train, 2, table.collate, workers=workers)
    for batch in session.steps(batches, 20):
        loss = F.binary_cross_entropy_with_logits(session.model(batch), batch.labels)
        loss.backward()
        losses.append(loss.item())
    for batch in session.eval_batches(ecrm.Indexed(table.held_out, 2, table.collate)):
        session.gather(scores=session.model(batch))
    return losses, session.gathered["scores"].tolist()


def test_a_session_trains_from_a_table_the_same_with_workers(table):
    losses, scores = trained(table, workers=0)
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:8]) and len(scores) == 1
    assert trained(table, workers=1) == (losses, scores)


def damaged(folder, name, change):
    """Change a file of a table in place."""
    path = folder / name
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))


def test_damage_is_told_by_name(tmp_path):
    out = prepared_small(tmp_path)
    table = ecrm.Table(out)
    os.utime(out / "dense.bin", (1, 1))
    with pytest.raises(DataError, match="dense.bin has changed since this run opened it"):
        table[0]
    damaged(out, "feature-2-ids.bin", lambda data: data.__setitem__(slice(0, 4), b"\xff" * 4))
    with pytest.raises(
        DataError, match="feature tags has id -1, and ids of table tags are 0 to 19"
    ):
        ecrm.Table(out)[0]
    damaged(out, "feature-1-ends.bin", lambda data: data.__setitem__(slice(0, 8), b"\x7f" * 8))
    with pytest.raises(DataError, match="feature-1-ends.bin: damaged"):
        ecrm.Table(out)[0]
    os.truncate(out / "labels.bin", 3)
    with pytest.raises(DataError, match="labels.bin: expected 16 bytes, found 3"):
        ecrm.Table(out)
    (out / "labels.bin").unlink()
    with pytest.raises(DataError, match="labels.bin: missing, expected 16 bytes"):
        ecrm.Table(out)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda m: m.clear(), DataError, "not the manifest of a table made by"),
        (lambda m: m.update(format_version=99), UsageError, "prepare the data again"),
        (lambda m: m.update(rows=5), DataError, "labels.bin has 4 rows instead of 5"),
        (lambda m: m.update(train_rows=5), DataError, "rows is 4, train_rows is 5"),
        (lambda m: m["tables"].pop("tags"), DataError, "the tables are not the schema's"),
        (lambda m: m["schema"]["columns"].pop("clicked"), DataError, "damaged: .*no column is the"),
        (lambda m: m["files"].pop("ids.bin"), DataError, "damaged: KeyError"),
    ],
)
def test_damaged_manifests(tmp_path, change, error, said):
    out = prepared_small(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    change(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(error, match=said):
        ecrm.Table(out)


def test_folders_without_a_table(tmp_path):
    with pytest.raises(UsageError, match="absent: no such directory; `ecrm prepare table FILES "):
        ecrm.Table(tmp_path / "absent")
    (tmp_path / "ok.csv").write_text("y,id\n")
    with pytest.raises(
        UsageError, match=r"ok.csv: is a file, .* ecrm prepare table \S+/ok.csv --sch"
    ):
        ecrm.Table(tmp_path / "ok.csv")
    with pytest.raises(UsageError, match="it has no manifest.json"):
        ecrm.Table(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        ecrm.Table(tmp_path)


def test_a_dataset_of_prepare_criteo_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="of `ecrm prepare criteo`, and no table; `ecrm prep"):
        ecrm.Table(prepared(tmp_path, rows=50, seed=1))


def test_reading_needs_no_pyarrow(tmp_path):
    out = prepared_small(tmp_path)
    program = (
        "import sys; sys.modules['pyarrow'] = None; import ecrm; "
        f"table = ecrm.Table({str(out)!r}); print(table.collate(table.__getitems__([0])).labels)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "tensor([1.])\n", done.stderr
