"""A prepared dataset as training sees it: splits, batches, caps, damage."""

import json

import numpy as np
import pytest
import torch

from ecrm.base.errors import DataError, UsageError
from ecrm.data.dataset import CriteoDataset
from ecrm.data.generate import generate_criteo
from ecrm.data.prepare import prepare

ROWS = 1003


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    generate_criteo(ROWS, 3, str(directory / "rows.txt"))
    prepare([str(directory / "rows.txt")], str(directory / "ready"), 5000)
    return directory / "ready"


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the dataset that a test may damage."""
    target = tmp_path / "copy"
    target.mkdir()
    for file in made.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture(scope="module")
def content(made):
    """The three arrays read without the class under test: dense, ids, labels."""
    return (
        np.fromfile(made / "dense.bin", "<f4").reshape(ROWS, 13),
        np.fromfile(made / "sparse.bin", "<i4").reshape(ROWS, 26),
        np.fromfile(made / "labels.bin", np.uint8),
    )


def assert_rows(batch, content, rows):
    dense, ids, labels = batch
    assert (dense.dtype, ids.dtype, labels.dtype) == (torch.float32, torch.int64, torch.float32)
    assert all(tensor.is_contiguous() for tensor in batch)
    for tensor, array in zip(batch, content, strict=True):
        assert np.array_equal(tensor.numpy(), array[rows])


def test_the_last_rows_are_held_out(made, content):
    dataset = CriteoDataset.open(made)
    assert (dataset.train_rows, dataset.eval_rows) == (903, 100)
    assert dataset.tables == [(f"t_cat_{i}", 5000) for i in range(26)]
    assert_rows(dataset.train_batch(0, 903), content, np.arange(903))
    assert_rows(dataset.eval_batch(0, 100), content, np.arange(903, 1003))
    whole = CriteoDataset.open(made, eval_fraction=0)
    assert (whole.train_rows, whole.eval_rows) == (ROWS, 0)
    assert [t.shape for t in whole.eval_batch(0, 5)] == [(0, 13), (0, 26), (0,)]


@pytest.mark.parametrize(
    "start, size", [(0, 1), (5, 0), (899, 10), (903, 3), (5000, 64), (10, 3000), (4 * 10**12, 7)]
)
def test_train_batches_go_round(made, content, start, size):
    dataset = CriteoDataset.open(made)
    assert_rows(dataset.train_batch(start, size), content, np.arange(start, start + size) % 903)


@pytest.mark.parametrize(
    "start, size, rows",
    [(0, 40, (0, 40)), (90, 40, (90, 100)), (100, 5, (100, 100)), (10**12, 5, (100, 100))],
)
def test_eval_batches_stop_at_the_end(made, content, start, size, rows):
    assert_rows(CriteoDataset.open(made).eval_batch(start, size), content, 903 + np.arange(*rows))


def test_batches_are_the_callers_own_and_the_same_each_time(made):
    dataset = CriteoDataset.open(made)
    first = dataset.train_batch(7, 20)
    kept = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.zero_()
    again = CriteoDataset.open(made).train_batch(7, 20)
    for expected, one, other in zip(kept, dataset.train_batch(7, 20), again, strict=True):
        assert torch.equal(expected, one) and torch.equal(expected, other)


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_slots_share_out_the_global_batch(made, slots):
    dataset = CriteoDataset.open(made)
    for step in (0, 1, 30):
        whole = dataset.train_batch(step * 64, 64)
        parts = [dataset.batch_for(step, slot, slots, 64) for slot in range(slots)]
        for expected, *got in zip(whole, *parts, strict=True):
            assert torch.equal(expected, torch.cat(got))
        assert max(len(p[0]) for p in parts) - min(len(p[0]) for p in parts) <= 1
    with pytest.raises(ValueError):
        dataset.batch_for(0, slots, slots, 64)


@pytest.mark.parametrize("cap", [2, 3, 1000, 5000, 10**6])
def test_cap_keeps_the_missing_row_and_folds_the_others(made, content, cap):
    dataset = CriteoDataset.open(made, max_rows_per_table=cap)
    assert dataset.tables == [(f"t_cat_{i}", min(cap, 5000)) for i in range(26)]
    ids = dataset.train_batch(0, 903)[1].numpy()
    stored = content[1][:903].astype(np.int64)
    assert np.array_equal(ids, np.where(stored == 0, 0, 1 + (stored - 1) % (min(cap, 5000) - 1)))
    assert (ids == 0).any() and ids.max() < cap


def test_cap_of_none_and_zero_is_no_cap(made):
    for cap in (None, 0):
        assert CriteoDataset.open(made, max_rows_per_table=cap).tables[0] == ("t_cat_0", 5000)


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows_per_table": 1},
        {"max_rows_per_table": -5},
        {"max_rows_per_table": 2**32},
        {"eval_fraction": 1.0},
        {"eval_fraction": -0.1},
    ],
)
def test_arguments_out_of_range(made, options):
    with pytest.raises(UsageError):
        CriteoDataset.open(made, **options)


@pytest.mark.parametrize(
    "name, row_bytes", [("labels.bin", 1), ("dense.bin", 52), ("sparse.bin", 104)]
)
def test_a_file_of_another_length_is_named_with_its_bytes(copy, name, row_bytes):
    data = (copy / name).read_bytes()
    for found in (data[:-1], data + b"x", b""):
        (copy / name).write_bytes(found)
        with pytest.raises(DataError) as caught:
            CriteoDataset.open(copy)
        assert (
            str(caught.value)
            == f"{copy / name}: expected {ROWS * row_bytes} bytes, found {len(found)}"
        )
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing, expected"):
        CriteoDataset.open(copy)


def test_directories_that_hold_no_dataset(tmp_path):
    with pytest.raises(UsageError, match="there is no such directory"):
        CriteoDataset.open(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"not a prepared dataset.*ecrm prepare criteo"):
        CriteoDataset.open(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "other"}, "not the manifest of a dataset"),
        ({"rows": 0}, "rows is 0"),
        ({"rows": ROWS + 1}, "does not agree with 1004 rows"),
        ({"tables": {"t_cat_0": 5}}, "tables are not t_cat_0 to t_cat_25"),
        ({"tables": {f"t_cat_{i}": 1 for i in range(26)}}, "table t_cat_0 has 1 rows"),
        ({"files": {}}, "files are not labels.bin"),
    ],
)
def test_damaged_manifests(copy, change, words):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(DataError, match=words):
        CriteoDataset.open(copy)


def test_manifests_of_no_use(copy):
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UsageError, match="format version 2, this program reads 1"):
        CriteoDataset.open(copy)
    for broken in (text[: len(text) // 2], "", "[]"):
        (copy / "manifest.json").write_text(broken)
        with pytest.raises(DataError):
            CriteoDataset.open(copy)


def test_damaged_content_is_found_by_verify_and_ids_out_of_range_at_once(copy):
    CriteoDataset.open(copy).verify()
    data = np.fromfile(copy / "sparse.bin", "<i4")
    for bad in (5000, -1):
        data[26 * 12 + 3] = bad
        data.tofile(copy / "sparse.bin")
        dataset = CriteoDataset.open(copy, max_rows_per_table=100)
        dataset.train_batch(0, 12)
        with pytest.raises(
            DataError,
            match=f"sparse.bin: row 12 has id {bad} in table t_cat_3, whose ids are 0 to [0-9]+$",
        ):
            dataset.train_batch(10, 10)
        with pytest.raises(DataError, match="sparse.bin: expected SHA-256"):
            dataset.verify()
