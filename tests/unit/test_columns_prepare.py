"""Files of columns prepared by a schema: the bits, the malformed rows, and the refusals."""

import datetime
import gzip
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from decimal import Decimal
from fnmatch import fnmatch

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from ecrm.base.console import Progress
from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.cli.commands import main
from ecrm.data.columns import text_lines
from ecrm.data.columns.draft import draft
from ecrm.data.columns.prepare import prepare_table
from ecrm.data.columns.text_hash import hashed_rows, text_hash, text_hashes
from ecrm.data.columns.times import read_times
from ecrm.data.columns.values import WrongType, texts
from ecrm.data.prepare import prepare
from ecrm.run.files import TABLE
from support.columns import CSV, SMALL, prepared_small, read_back, row_of, schema_of


def splitmix64(value: int) -> int:
    """The published formula in Python integers."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_hash_of_texts_is_the_documented_one():
    assert text_hash(b"") == 0
    assert text_hash(b"ab") == splitmix64(2 ^ 0x6261)
    assert text_hash(b"12345678z") == splitmix64(
        splitmix64(9 ^ int.from_bytes(b"12345678", "little")) ^ ord("z")
    )
    random = np.random.default_rng(3)
    lengths = random.choice([0, 1, 7, 8, 9, 16, 17, 40, 333], 500)
    data = random.integers(0, 256, int(lengths.sum()) + 8, np.uint8)
    starts = np.cumsum(lengths) - lengths
    texts = [data[start : start + size].tobytes() for start, size in zip(starts, lengths)]
    assert text_hashes(data, starts, lengths).tolist() == [text_hash(text) for text in texts]
    nothing = np.zeros(0, np.int64)
    assert text_hashes(np.zeros(0, np.uint8), nothing, nothing).tolist() == []
    hashes = np.array([0, 2**62 - 1, 2**62, 2**64 - 1], np.uint64)
    assert hashed_rows(hashes, 5).tolist() == [1, 1, 2, 4]
    assert hashed_rows(hashes, 2).tolist() == [1, 1, 1, 1]
    assert hashed_rows(hashes, 2**31 - 1).tolist() == [1, 2**29, 2**29, 2**31 - 2]


def test_a_prepared_csv_has_the_documented_bits(tmp_path):
    out = prepared_small(tmp_path)
    found = read_back(out)
    assert found["labels.bin"].tolist() == [1, 0, 1, 0]
    assert found["dense.bin"].tolist() == [[2.5], [0], [-3], [4]]
    assert found["ids.bin"].tolist() == [
        [row_of("m1", 50)],
        [row_of("m2", 50)],
        [0],
        [row_of("m1", 50)],
    ]
    assert found["feature-1-ends.bin"].tolist() == [2, 3, 3, 5]
    assert found["feature-1-ids.bin"].tolist() == [1, 2, 2, 3, 1]
    assert (out / "vocabulary-1.jsonl").read_text() == '"comedy"\n"drama"\n"horror"\n'
    assert found["feature-2-ends.bin"].tolist() == [2, 2, 3, 4]
    assert found["feature-2-ids.bin"].tolist() == [
        row_of(t, 20) for t in ("new", "old", "new", "x:y")
    ]
    assert found["feature-2-weights.bin"].tolist() == [0.5, 2, 1, 3]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rows"] == 4 and manifest["train_rows"] == 3
    assert manifest["tables"] == {"movie": 50, "genres": 4, "tags": 20}
    assert manifest["missing"] == {"price": 1, "movie": 1, "genres": 0, "tags": 0}
    assert manifest["label_mean"] == 0.5
    for name, record in manifest["files"].items():
        data = (out / name).read_bytes()
        assert record["bytes"] == len(data)
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
    assert sorted(os.listdir(out)) == sorted([*manifest["files"], "manifest.json"])
    assert all(any(fnmatch(name, file.name) for file in TABLE) for name in os.listdir(out))


ROWS = {
    "clicked": [True, False, True, False],
    "price": [2.5, None, -3.0, 4.0],
    "movie": ["m1", "m2", None, "m1"],
    "genres": [["comedy", "drama"], ["drama"], None, ["horror", None, "comedy"]],
    "tags": [[("new", 0.5), ("old", 2.0)], [], [("new", 1.0)], [("x:y", 3.0)]],
    "note": [{"a": 1}] * 4,
}


def arrow_rows():
    """The rows of `CSV` in types of Arrow."""
    tags = pyarrow.array(ROWS["tags"], pyarrow.map_(pyarrow.string(), pyarrow.float64()))
    plain = {name: column for name, column in ROWS.items() if name != "tags"}
    table = pyarrow.table(plain).append_column("tags", tags)
    return table.set_column(2, "movie", table.column("movie").dictionary_encode())


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream", "tsv", "gz", "other order"])
def test_every_format_gives_the_bits_of_the_csv(tmp_path, kind):
    expected = prepared_small(tmp_path)
    source = tmp_path / "source"
    rows = arrow_rows()
    if kind == "parquet":
        pyarrow.parquet.write_table(rows, source, row_group_size=3)
    elif kind == "arrow":
        with pyarrow.ipc.new_file(source, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=3)
    elif kind == "stream":
        with pyarrow.ipc.new_stream(source, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=3)
    elif kind == "tsv":
        source.write_text(CSV.replace('"a, b"', "a; b").replace('"', "").replace(",", "\t"))
    elif kind == "gz":
        source.write_bytes(gzip.compress(CSV.replace("\n", "\r\n").encode()))
    else:
        pyarrow.parquet.write_table(rows.select(sorted(rows.column_names)), source)
    prepare_table([str(source)], str(tmp_path / "other"), schema_of(tmp_path))
    manifests = []
    for folder in (expected, tmp_path / "other"):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest.pop("sources")[0]["rows"] == 4
        manifest.pop("missing")  # a null in a list is none of a text
        manifests.append(manifest)
    assert manifests[0] == manifests[1]


def test_the_bits_depend_neither_on_threads_nor_on_blocks(tmp_path, monkeypatch):
    lines = CSV.splitlines()[1:]
    text = "\n".join([CSV.splitlines()[0], *(lines[i * 7 % 4] for i in range(500)), "1,2,3"])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = prepared_small(tmp_path / "a", text, threads=1)
    monkeypatch.setattr(text_lines.text_pieces, "__defaults__", (200,))
    two = prepared_small(tmp_path / "b", text, threads=3)
    assert (two / "malformed.txt").read_text().endswith("rows.csv:502: 3 columns instead of 6\n")
    for name in os.listdir(one):
        if name.endswith(".bin"):
            assert (one / name).read_bytes() == (two / name).read_bytes()


def test_malformed_rows_are_counted_named_and_left_out(tmp_path, capsys):
    text = CSV + (
        "maybe,1,m3,sole,,\n"  # 6
        "\n"
        "1,abc,m3,sole,,\n"  # 8
        "1,2,3\n"
        '1,"2\n3",m3,sole,,\n'  # 10, 11
        "1,1e39,m3,sole,,\n"
        ",1,m3,sole,,\n"
        "1,inf,m3,sole,,\n"
        "1,1,m3,sole,new,\n"
        "1,1,m3,sole,new:nan,\n"
        "1,1,m3,sole,new:heavy,\n"
        "true,NULL,m2,drama,,\n"
    )
    with Progress("prepare", sys.stderr) as progress:
        out = prepared_small(tmp_path, text, max_malformed=1, progress=progress)
    path = tmp_path / "rows.csv"
    expected = [
        "6: clicked is 'maybe', not a number",
        "8: price is 'abc', not a number",
        "9: 3 columns instead of 6",
        "10: a quote is not closed on the line",
        "11: 5 columns instead of 6",
        "12: price is not finite as a float32",
        "13: clicked is missing",
        "14: price is not finite as a float32",
        "15: tags has 'new', an id without a weight",
        "16: tags has a weight that is missing or not finite",
        "17: tags has a weight that is 'heavy', not a number",
    ]
    assert (out / "malformed.txt").read_text().splitlines() == [f"{path}:{one}" for one in expected]
    said = capsys.readouterr().err.splitlines()
    assert said[:11] == [f"skipped {path}:{one}" for one in expected]
    assert said[11] == f"{path}: 11 malformed lines skipped, 5 rows read"
    found = read_back(out)
    assert found["labels.bin"].tolist() == [1, 0, 1, 0, 1]
    assert "sole" not in (out / "vocabulary-1.jsonl").read_text()
    with pytest.raises(DataError, match=r"rows.csv: 11 of 16 lines \(68.75%\) are malformed"):
        prepared_small(tmp_path, text, force=True)
    with pytest.raises(DataError, match=r"^\S+rows.csv:6: clicked is 'maybe', not a number$"):
        prepared_small(tmp_path, text, force=True, strict=True)
    assert len(read_back(out)["labels.bin"]) == 5


NO_ROW = [
    ("label", "yes,1\nno,2\n", 'type equals = "yes" or above = 3 for the label y in the schema'),
    ("time", "3/4/20,1\n4/4/20,2\n", 'type format = "%d.%m.%Y" or the like for the column y'),
    ("dense", "abc,1\n", 'type another kind for the column y, or kind = "unused" in the schema'),
    (
        "label",
        "1,1,\n0,2,\n",
        "give the header and the rows the same number of columns, or type del",
    ),
    ("label", "1,1\r3\n", "a carriage return inside the line; correct the file"),
]


@pytest.mark.parametrize(("kind", "lines", "way"), NO_ROW)
def test_a_file_without_a_sound_line_is_not_to_be_skipped(tmp_path, kind, lines, way):
    schema = f'[columns]\ny = {{ kind = "{kind}" }}\nid = {{ kind = "categorical", rows = 9 }}\n'
    text, count = f"y,id\n{lines}", lines.count("\n")
    if kind != "label":
        schema += 'z = { kind = "label" }\n'
        text = text.replace("\n", ",1\n").replace("id,1", "id,z")
    with pytest.raises(DataError) as caught:
        prepared_small(tmp_path, text, schema)
    said = str(caught.value)
    assert f"{count} of {count} lines (100.00%) are malformed" in said and way in said
    assert "--max-malformed 1" not in said
    with pytest.raises(DataError, match=rf"\({count} malformed; the first is \S+rows.csv:2: "):
        prepared_small(tmp_path, text, schema, max_malformed=1)


def test_malformed_rows_of_parquet_are_numbered_from_one(tmp_path):
    columns = {"y": [1, None, 0, 1], "id": [1.0, 2.0, 2.5, math.nan], "w": [[1.0], [], [], []]}
    columns["tags"] = [["a"], [], [7 * "b"], []]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows")
    schema = schema_of(
        tmp_path,
        """[columns]
y = { kind = "label" }
id = { kind = "categorical", rows = 9 }
tags = { kind = "weighted", rows = 9, weights = "w" }
w = { kind = "weights" }
""",
    )
    prepare_table([str(tmp_path / "rows")], str(tmp_path / "out"), schema, max_malformed=1)
    assert (tmp_path / "out" / "malformed.txt").read_text().splitlines() == [
        f"{tmp_path}/rows:2: y is missing",
        f"{tmp_path}/rows:3: id is 2.5, not a whole number",
    ]
    assert read_back(tmp_path / "out")["ids.bin"].tolist() == [[row_of("1", 9)], [0]]
    with pytest.raises(DataError, match="2 of 4 rows .*; row 3: id is 2.5"):
        prepare_table([str(tmp_path / "rows")], str(tmp_path / "other"), schema)


def test_numbers_and_texts_of_an_id_are_one_value(tmp_path):
    big = 2**53
    columns = (
        pyarrow.array([big, 7], pyarrow.uint64()),
        pyarrow.array([float(big), 7.0]),
        pyarrow.array([float(big), 7.0], pyarrow.float32()),
        pyarrow.array([Decimal(big), Decimal("7.00")], pyarrow.decimal128(20, 2)),
        pyarrow.array([str(big), "7"]),
        pyarrow.array([f"{big}.", "7.0"]),
        pyarrow.array([str(big), "7"], pyarrow.large_string()),
        pyarrow.array([b"%d.00" % big, b"7"]),
    )
    paths = [tmp_path / f"rows{number}" for number in range(len(columns))]
    for path, column in zip(paths, columns):
        lists = pyarrow.ListArray.from_arrays([0, 1, 2], column)
        rows = {"y": column.slice(1).take([0, 0]), "id": column, "ids": lists}
        pyarrow.parquet.write_table(pyarrow.table(rows), path)
    paths.append(tmp_path / "rows.csv")
    paths[-1].write_text(f"y,id,ids\n7.0,{big}.0,{big}\n7,7,7.0\n")
    schema = schema_of(
        tmp_path,
        """[columns]
y = { kind = "label", equals = "7.0" }
id = { kind = "categorical", rows = 1000 }
ids = { kind = "multi_hot", vocabulary = true, separator = "|" }
""",
    )
    prepare_table(list(map(str, paths)), str(tmp_path / "out"), schema)
    found = read_back(tmp_path / "out")
    times = len(paths)
    assert found["ids.bin"].ravel().tolist() == [row_of(str(big), 1000), row_of("7", 1000)] * times
    assert found["feature-1-ids.bin"].tolist() == [1, 2] * times
    assert found["labels.bin"].tolist() == [1, 1] * times
    assert (tmp_path / "out" / "vocabulary-1.jsonl").read_text() == f'"{big}"\n"7"\n'


TEXTS = [
    (np.uint64(2**64 - 1), str(2**64 - 1)),
    ("v1.0", "v1.0"),
    ("05.0", "05.0"),
    ("1.5", "1.5"),
    ("1.0.0", "1.0.0"),
    ("-3.", "-3"),
    (Decimal("-0.00"), "0"),
    (datetime.datetime(2024, 1, 1, 5, 0, 0, 120_000), "2024-01-01 05:00:00.12"),
    (datetime.datetime(2024, 1, 1), "2024-01-01 00:00:00"),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_a_point_in_an_id_is_dropped_from_whole_numbers_alone(value, text):
    assert texts(pyarrow.array([None, value]).slice(1))[0].to_pylist() == [text]


def test_truth_values_are_the_same_ids_in_every_format(tmp_path):
    others = ["TRUE", "True\nx", "xTrue", None]
    found = texts(pyarrow.array(["True", "False", "true", *others]))
    assert found[0].to_pylist() == ["true", "false", "true", *others]
    text = "y,id\n1,True\n0,False\n1,\n"
    schema = '[columns]\ny = { kind = "label" }\nid = { kind = "categorical", rows = 1000 }\n'
    from_text = read_back(prepared_small(tmp_path, text, schema))["ids.bin"]
    rows = pyarrow.table({"y": [1, 0, 1], "id": [True, False, None]})
    pyarrow.parquet.write_table(rows, tmp_path / "rows")
    prepare_table([str(tmp_path / "rows")], str(tmp_path / "other"), schema_of(tmp_path, schema))
    assert read_back(tmp_path / "other")["ids.bin"].tolist() == from_text.tolist()
    assert len(set(from_text.ravel().tolist())) == 3


def test_a_number_with_a_fraction_is_no_id():
    for value in (2.5, Decimal("2.50")):
        assert [row for row, _ in texts(pyarrow.array([1, value, None]))[1]] == [1]


LABELS = [
    ('{ kind = "label" }', ["True", "false", "1", "0.5"], [1, 0, 1, 0.5]),
    ('{ kind = "label", above = 3 }', ["3", "3.5", "5", "-1"], [0, 1, 1, 0]),
    ('{ kind = "label", equals = ">50K" }', [">50K", "<=50K", ">50K", "x"], [1, 0, 1, 0]),
]


@pytest.mark.parametrize(("label", "texts", "expected"), LABELS)
def test_labels(tmp_path, label, texts, expected):
    schema = f'[columns]\ny = {label}\nid = {{ kind = "categorical", rows = 9 }}\n'
    text = "y,id\n" + "".join(f"{one},1\n" for one in texts)
    found = read_back(prepared_small(tmp_path, text, schema))
    assert found["labels.bin"].tolist() == expected


def test_transforms_and_values_in_place_of_missing_ones(tmp_path):
    schema = """[columns]
y = { kind = "label" }
id = { kind = "categorical", rows = 9 }
a = { kind = "dense", transform = "log" }
b = { kind = "dense", transform = "signed_log", missing = -1 }
c = { kind = "dense", missing = 0.5 }
"""
    text = "y,id,a,b,c\n1,1,5,-7,true\n1,1,-9,7,N/A\n1,1,,,nan\n"
    found = read_back(prepared_small(tmp_path, text, schema))["dense.bin"]
    expected = [
        [math.log(8), -math.log(8), 1],
        [0, math.log(8), 0.5],
        [math.log(3), -math.log(2), 0.5],
    ]
    assert np.allclose(found, expected, rtol=1e-6, atol=0)


TIMES = {
    "numbers": [3, 1, 2],
    "fractions": [3.5, 1.25, 1.5],
    "dates": [datetime.date(2021, 1, 2), datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)],
    "moments": [
        datetime.datetime(2021, 1, 2),
        datetime.datetime(2020, 1, 1),
        datetime.datetime(2020, 1, 1, 5),
    ],
    "texts": [
        "2021-01-02 00:00:01.5+00:00",
        "2020-01-01 00:00:00+00:00",
        "2020-01-01 00:00:01+00:00",
    ],
    "texts of numbers": ["30", "4", "5"],
}


@pytest.mark.parametrize("kind", TIMES)
def test_rows_are_in_the_order_of_time(tmp_path, kind):
    rows = pyarrow.table({"t": TIMES[kind], "y": [3, 1, 2], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(rows, tmp_path / "rows")
    text = 'held_out = 0.4\n[columns]\nt = { kind = "time" }\ny = { kind = "label" }\n'
    schema = schema_of(tmp_path, text + 'id = { kind = "categorical", rows = 9 }\n')
    manifest = prepare_table([str(tmp_path / "rows")], str(tmp_path / "out"), schema)
    assert manifest["train_rows"] == 2
    assert read_back(tmp_path / "out")["order.bin"].tolist() == [1, 2, 0]


MOMENTS = [datetime.datetime(2024, 1, 1, 12), datetime.datetime(2024, 1, 3, 12)]
BERLIN = ["2024-01-01 13:00:00+01:00", "2024-01-03T13:00:00.000000+0100"]
NOON = 1_704_110_400  # the first of MOMENTS in seconds since 1970


def stamps(unit, zone=None):
    """MOMENTS in a type of Arrow."""
    return pyarrow.array(MOMENTS).cast(pyarrow.timestamp(unit, zone), safe=False)


DATED = {
    "s": stamps("s"),
    "ms": stamps("ms", "UTC"),
    "us": stamps("us", "Europe/Berlin"),
    "ns": stamps("ns"),
    "date64": pyarrow.array([datetime.date(2024, 1, 2)] * 2, pyarrow.date64()),
    "texts": pyarrow.array(["2024-01-01 12:00:00.000000001", "2024-01-03T12:00"]),
    "zoned": pyarrow.array(BERLIN),
    "dictionary": pyarrow.array(BERLIN).dictionary_encode(),
    "numbers": pyarrow.array([NOON + 0.5, NOON + 2 * 86_400]),
    "decimals": pyarrow.array([Decimal(NOON) + Decimal("0.25"), Decimal(NOON)]),
    "texts of numbers": pyarrow.array([f"{NOON}.125", str(NOON)]),
}


def test_dates_of_all_types_have_one_order_over_files(tmp_path):
    """Only numbers need the unit; the order is that of the seconds since 1970."""
    seconds: list[float] = []
    for name, column in DATED.items():
        days = [0, 2] if name not in ("decimals", "texts of numbers", "date64") else [0, 0]
        extra = {"numbers": 0.5, "decimals": 0.25, "texts of numbers": 0.125, "texts": 1e-9}
        seconds += [days[0] * 86_400 + extra.get(name, 0), days[1] * 86_400]
        if name == "date64":
            seconds[-2:] = [43_200, 43_200]
        rows = pyarrow.table({"t": column, "y": [1, 0], "id": [1, 2]})
        pyarrow.parquet.write_table(rows, tmp_path / name)
    text = '[columns]\nt = { kind = "time", unit = "s" }\ny = { kind = "label" }\n'
    schema = schema_of(tmp_path, text + 'id = { kind = "categorical", rows = 9 }\n')
    paths = [str(tmp_path / name) for name in DATED]
    prepare_table(paths, str(tmp_path / "out"), schema)
    found = read_back(tmp_path / "out")["order.bin"].tolist()
    assert found == sorted(range(len(seconds)), key=seconds.__getitem__)
    without = schema_of(tmp_path, text.replace(', unit = "s"', "") + schema_ids)
    prepare_table(paths[:8], str(tmp_path / "dates"), without)
    with pytest.raises(DataError) as caught:
        prepare_table(paths, str(tmp_path / "other"), without)
    assert str(caught.value) == (
        f"{tmp_path}/numbers: column 't' holds double, and a column of kind time needs dates as in "
        'the rows before, or unit = "s", "ms", "us" or "ns" to read the numbers as dates: correct '
        "the file, or the kind in the schema"
    )


schema_ids = 'id = { kind = "categorical", rows = 9 }\n'


def test_numbers_among_dates_of_a_text_file_are_malformed(tmp_path):
    schema = '[columns]\nt = { kind = "time" }\ny = { kind = "label" }\n' + schema_ids
    text = "t,y,id\n,1,1\n2024-01-02,1,1\n20240103,1,1\n2024-01-01,1,1\n"
    out = prepared_small(tmp_path, text, schema, max_malformed=0.5)
    assert read_back(out)["order.bin"].tolist() == [1, 0]
    assert (out / "malformed.txt").read_text().splitlines() == [
        f"{tmp_path}/rows.csv:2: t is missing",
        f"{tmp_path}/rows.csv:4: t is a number, and the times before are dates",
    ]
    (tmp_path / "numbers.csv").write_text("t,y,id\n1,1,1\n2,1,1\n")
    (tmp_path / "rows.csv").write_text("t,y,id\n2024-01-02,1,1\n")
    files = [str(tmp_path / name) for name in ("rows.csv", "numbers.csv")]
    with pytest.raises(DataError, match=r'numbers.csv: 2 of 2 .*; type unit = "s", "ms", "us" or'):
        prepare_table(files, str(tmp_path / "other"), schema_of(tmp_path, schema))
    dated = schema_of(tmp_path, schema.replace('"time"', '"time", unit = "ms"'))
    prepare_table(files, str(tmp_path / "other"), dated)
    assert read_back(tmp_path / "other")["order.bin"].tolist() == [1, 2, 0]


UNITS = [("s", 86_400), ("ms", 86_400_000), ("us", 86_400 * 10**6), ("ns", 86_400 * 10**9)]


@pytest.mark.parametrize(("unit", "day"), UNITS)
def test_numbers_of_a_unit_are_dates(unit, day):
    times, bad = read_times(pyarrow.array([day, None, -1]), unit=unit)
    assert not bad and not times.numbers.any()
    assert times.whole[0] == 86_400 * 10**6 and times.missing.tolist() == [False, True, False]
    assert times.whole[2] + times.part[2] == pytest.approx(-86_400 * 10**6 / day, abs=1e-9)


def test_times_beyond_the_range_are_malformed():
    far = [1e300, math.inf, 5.5, -(2.0**62)]
    times, bad = read_times(pyarrow.array(far))
    assert [row for row, _ in bad] == [0, 1] and times.whole.tolist() == [0, 0, 5, -(2**62)]
    assert [row for row, _ in read_times(pyarrow.array([2**62, 5]), unit="s")[1]] == [0]
    exact = 1_704_110_400_123_456_789
    for column in ([str(exact), "5.5"], [exact, 5], [Decimal(exact), Decimal("5.5")]):
        times, bad = read_times(pyarrow.array(column), unit="ns")
        assert not bad and times.whole[0] == exact // 1000 and round(times.part[0] * 1000) == 789
    with pytest.raises(WrongType, match="numbers, dates, or texts of dates"):
        read_times(pyarrow.array([True]))


def test_a_format_of_time_and_times_that_are_none(tmp_path):
    schema = """[columns]
t = { kind = "time", format = "%d-%b-%Y" }
y = { kind = "label" }
id = { kind = "categorical", rows = 9 }
"""
    text = "t,y,id\n03-Feb-1996,1,1\n01-Jan-1995,1,1\n1995,1,1\n,1,1\n"
    out = prepared_small(tmp_path, text, schema, max_malformed=1)
    assert read_back(out)["order.bin"].tolist() == [1, 0]
    named = (out / "malformed.txt").read_text()
    assert "rows.csv:4: t is '1995', not a time in the format %d-%b-%Y\n" in named
    assert "rows.csv:5: t is missing\n" in named


SPLIT = """[columns]
part = { kind = "split", train = ["train"], held_out = ["test", "valid"] }
t = { kind = "time" }
y = { kind = "label" }
id = { kind = "categorical", rows = 9 }
"""


def test_a_split_column_decides_and_time_orders_inside(tmp_path):
    text = "part,t,y,id\ntest,1,1,1\ntrain,9,1,1\nvalid,0,1,1\ntrain,2,1,1\nother,1,1,1\n,1,1,1\n"
    out = prepared_small(tmp_path, text, SPLIT, max_malformed=1)
    assert read_back(out)["order.bin"].tolist() == [3, 1, 2, 0]
    assert json.loads((out / "manifest.json").read_text())["train_rows"] == 2
    named = (out / "malformed.txt").read_text()
    assert "rows.csv:6: part is 'other', in neither train nor held_out\n" in named
    assert "rows.csv:7: part is missing\n" in named
    numbers = SPLIT.replace("train", "1.0").replace("1.0 =", "train =").replace("test", "2")
    out = prepared_small(tmp_path, "part,t,y,id\n2.0,1,1,1\n1,9,1,1\n", numbers, force=True)
    assert read_back(out)["order.bin"].tolist() == [1, 0]
    with pytest.raises(DataError, match="every row is held out: column 'part' has no value of"):
        prepared_small(tmp_path, "part,t,y,id\ntest,1,1,1\n", SPLIT, force=True)
    said = r"no row is held out: column 'part' has no value of held_out = \['test', 'valid'\]: corr"
    with pytest.raises(DataError, match=said):
        prepared_small(tmp_path, "part,t,y,id\ntrain,1,1,1\n", SPLIT, force=True)


def test_vocabularies_of_a_table_prepared_before(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    before = prepared_small(first)
    text = "clicked,price,movie,genres,tags,note\n1,1,m,drama|western|comedy,,\n"
    out = prepared_small(second, text, vocabularies=before)
    assert read_back(out)["feature-1-ids.bin"].tolist() == [2, 0, 1]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["unknown"] == {"genres": 1} and manifest["tables"]["genres"] == 4
    hashed = SMALL.replace("vocabulary = true", "rows = 70")
    prepared_small(first, schema=hashed, force=True)
    with pytest.raises(UsageError, match="out: has no vocabulary of the table 'genres': prepare"):
        prepared_small(second, text, vocabularies=before, force=True)


ODD_LINES = [
    ('1,"open,m1,,,', "a quote is not closed on the line"),
    ("1,2,m\r1,,,", "a carriage return inside the line"),
    ("   ", "1 columns instead of 6"),
    ("1,2,m\udcff,,,", "not valid UTF-8 at byte 6 of the line"),
    ("1,2", "2 columns instead of 6"),
]


@pytest.mark.parametrize(("line", "reason"), ODD_LINES)
def test_odd_lines_are_malformed_alone(tmp_path, line, reason):
    path = tmp_path / "rows.csv"
    text = f"\ufeff{CSV}{line}\n\n1, 5 ,m1,a,,\r\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    schema = schema_of(tmp_path)
    prepare_table([str(path)], str(tmp_path / "out"), schema, max_malformed=1)
    assert (tmp_path / "out" / "malformed.txt").read_text() == f"{path}:6: {reason}\n"
    assert read_back(tmp_path / "out")["dense.bin"].ravel().tolist() == [2.5, 0, -3, 4, 5]


def test_lines_that_end_in_a_carriage_return_alone_are_refused(tmp_path):
    said = (
        r"rows.csv: not a text file of columns, or lines end in CR: type tr '\\r' '\\n' < \S+rows"
    )
    with pytest.raises(DataError, match=said):
        prepared_small(tmp_path, CSV.replace("\n", "\r"))
    with pytest.raises(DataError, match=said):
        draft([str(tmp_path / "rows.csv")])


def test_a_long_field_beside_a_blank_line_is_read(tmp_path):
    genres = "|".join(f"genre {number}" for number in range(20_000))
    out = prepared_small(tmp_path, f"{CSV}\n1,1,m1,{genres},,\n")
    assert read_back(out)["feature-1-ends.bin"].tolist() == [2, 3, 3, 5, 20_005]


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "LONGEST_LINE", 1000)
    monkeypatch.setattr(text_lines.text_pieces, "__defaults__", (600,))
    with pytest.raises(DataError, match=r"rows.csv:6: the line does not end within \d+ bytes"):
        prepared_small(tmp_path, CSV + "1" * 3000)


FOREIGN = [
    (
        CSV.replace("price", "cost"),
        "lacks column 'price' of {schema} and has column 'cost', unknown to {schema}: correct the "
        'names in the file or the schema, or type kind = "unused" for a column not to read, or '
        "type header = false if the first line is a row",
    ),
    (CSV.replace(",note", "").replace(",first", ""), "lacks column 'note' of {schema}: correct"),
    ("new," + CSV, "has column 'new', unknown to {schema}: correct"),
    ("price," + CSV, "several columns have the name 'price'"),
    ("", "the file is empty"),
    ("\n\n", "holds no line that is not blank"),
    (CSV.splitlines()[0], "no rows: name a file with rows"),
]


@pytest.mark.parametrize(("text", "said"), FOREIGN)
def test_foreign_text_is_refused_by_name(tmp_path, text, said):
    with pytest.raises(DataError) as caught:
        prepared_small(tmp_path, text)
    said = said.replace("{schema}", str(tmp_path / "schema.toml"))
    assert str(tmp_path / "rows.csv") in str(caught.value) and said in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "schema.toml"]


MISTYPED = [
    ("price", [[1.0]], "holds list<", "a column of kind dense needs numbers"),
    ("price", [datetime.date(2020, 1, 1)], "holds date32[day]", "kind dense needs numbers"),
    ("movie", [["m1"]], "holds list<", "kind categorical needs one id a row"),
    ("genres", [3], "holds int64", 'kind multi_hot needs lists, or texts with separator = "|"'),
    ("tags", [[3]], "holds list<", "kind weighted needs lists of pairs of an id and a weight"),
    ("clicked", [{"a": 1}], "holds struct<", "kind label needs numbers"),
]


@pytest.mark.parametrize(("name", "values", "holds", "needs"), MISTYPED)
def test_mistyped_columns_are_refused_by_name(tmp_path, name, values, holds, needs):
    columns = {key: column[:1] for key, column in ROWS.items()} | {name: values}
    columns["tags"] = columns["tags"] if name == "tags" else [[{"id": "a", "w": 1.0}]]
    path = tmp_path / "day2.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError) as caught:
        schema = schema_of(tmp_path, SMALL.replace(', separator = "|"', ""))
        prepare_table([str(path)], str(tmp_path / "out"), schema)
    said = str(caught.value)
    assert said.startswith(f"{path}: column {name!r} {holds}") and needs in said
    assert not (tmp_path / "out").exists()


def test_texts_of_lists_need_a_separator(tmp_path):
    with pytest.raises(DataError, match=r"column 'genres' holds string.* separator = \"|\" for"):
        prepared_small(tmp_path, schema=SMALL.replace('true, separator = "|"', "true"))


def test_an_empty_parquet_file_beside_others_gives_no_row(tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    pyarrow.parquet.write_table(arrow_rows(), full)
    pyarrow.parquet.write_table(arrow_rows().slice(0, 0), empty)
    schema = schema_of(tmp_path)
    manifest = prepare_table([str(empty), str(full)], str(tmp_path / "out"), schema)
    assert [source["rows"] for source in manifest["sources"]] == [0, 4]
    with pytest.raises(DataError, match=r"empty: no rows: name a file with rows"):
        prepare_table([str(empty)], str(tmp_path / "other"), schema)


def test_a_damaged_parquet_file_is_one_line_and_leaves_nothing(tmp_path):
    path = tmp_path / "rows"
    pyarrow.parquet.write_table(arrow_rows(), path)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match="rows: cannot be read as Parquet or Arrow: "):
        prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["rows", "schema.toml"]


def test_files_without_a_header_have_the_columns_of_the_schema(tmp_path):
    schema = "header = false\n" + SMALL
    out = prepared_small(tmp_path, CSV.split("\n", 1)[1], schema)
    assert read_back(out)["labels.bin"].tolist() == [1, 0, 1, 0]
    with pytest.raises(DataError, match="the first line has 2 columns, and .*schema.toml has 6"):
        prepared_small(tmp_path, "1,2\n", schema, force=True)


def test_two_features_may_share_a_table(tmp_path):
    schema = """[columns]
y = { kind = "label" }
offered = { kind = "categorical", table = "item", vocabulary = true }
read = { kind = "multi_hot", table = "item", vocabulary = true, separator = " " }
"""
    out = prepared_small(tmp_path, "y,offered,read\n1,a,b a\n0,c,b\n", schema)
    found = read_back(out)
    assert json.loads((out / "manifest.json").read_text())["tables"] == {"item": 4}
    values = [json.loads(line) for line in (out / "vocabulary-0.jsonl").read_text().splitlines()]
    names = dict(enumerate(values, 1))
    assert [names[row] for row in found["ids.bin"][:, 0]] == ["a", "c"]
    assert [names[row] for row in found["feature-1-ids.bin"]] == ["b", "a", "b"]


def test_what_may_be_replaced(tmp_path):
    out = prepared_small(tmp_path)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UsageError, match="already holds a prepared dataset; --force replaces it"):
        prepared_small(tmp_path)
    with pytest.raises(DataError):
        prepared_small(tmp_path, "a,b\n1,2\n", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    prepared_small(tmp_path, CSV * 1, schema=SMALL.replace("50", "60"), force=True)
    assert json.loads((out / "manifest.json").read_text())["tables"]["movie"] == 60
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="it holds notes.txt"):
        prepared_small(tmp_path, force=True)


def test_a_killed_preparation_begins_again(tmp_path):
    (tmp_path / "rows.csv").write_text(CSV)
    (tmp_path / "schema.toml").write_text(SMALL)
    words = ["prepare", "table", "rows.csv", "--schema", "schema.toml", "--output", "out"]
    program = (
        "import os, signal; from ecrm.data.columns.writer import Writer; "
        "Writer.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL); "
        f"from ecrm.cli.commands import main; main({words!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".out.preparing", "rows.csv", "schema.toml"]
    assert len(read_back(prepared_small(tmp_path))["labels.bin"]) == 4
    assert sorted(os.listdir(tmp_path)) == ["out", "rows.csv", "schema.toml"]


EMPTY = [
    ("train,1,,1", 'fill the column y in the file, or give another column kind = "label", and the'),
    ("train,,1,1", 'fill the column t in the file, or type kind = "unused" for the column t'),
    (",1,1,1", 'fill the column part in the file, or type kind = "unused" for the column part'),
]


@pytest.mark.parametrize(("row", "advice"), EMPTY)
def test_a_column_without_values_has_an_advice_of_its_own(tmp_path, row, advice):
    with pytest.raises(DataError, match=f"is missing; {advice}"):
        prepared_small(tmp_path, f"part,t,y,id\n{row}\n{row}\n", SPLIT)


def test_the_command_says_how_many_rows_are_held_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for share, said in (("0.25", "1 of them held out, "), ("0", "no rows are held out, ")):
        prepared_small(tmp_path, schema=SMALL.replace("0.25", share), force=True)
        words = ["prepare", "table", "rows.csv", "--schema", "schema.toml", "--output", "out"]
        assert main([*words, "--force"]) == 0
        assert f"out: 4 rows, {said}" in capsys.readouterr().out


def test_text_may_come_from_a_pipe(tmp_path):
    expected = read_back(prepared_small(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", tmp_path / "rows.csv", pipe]):
        prepare_table([str(pipe)], str(tmp_path / "other"), schema_of(tmp_path))
    found = read_back(tmp_path / "other")
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


def test_a_full_disk_leaves_nothing(tmp_path):
    (tmp_path / "rows.csv").write_text(CSV + "1,2,m9,comedy,,\n" * 20_000)
    (tmp_path / "schema.toml").write_text(SMALL)
    words = [
        "prepare",
        "table",
        "rows.csv",
        "--schema",
        "schema.toml",
        "--output",
        "out",
    ]
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
        f"from ecrm.cli.commands import main; sys.exit(main({words!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"ecrm: error: {tmp_path / 'out'}: cannot be written, nothing was changed there: File too "
        "large\n",
    )
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "schema.toml"]


DIRECTORIES = [
    (["day-1.parquet", "day-2.parquet", "_SUCCESS", "notes.txt"], "type {}/*.parquet"),
    (["year=2024/a.csv", "year=2025/b.csv", ".hidden"], "type {}/*/*.csv"),
    (["day_0", "day_1"], "type {}/*"),
    ([], "name the files, there are none in the directory"),
]


@pytest.mark.parametrize(("names", "advice"), DIRECTORIES)
def test_a_directory_is_refused_with_a_pattern_of_the_files(tmp_path, names, advice):
    folder = tmp_path / "my data"
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CSV)
    said = f"{folder}: is a directory: " + advice.format(f"'{folder}'")
    for work in (
        lambda: draft([f"{folder}"]),
        lambda: prepare_table([f"{folder}"], str(tmp_path / "out"), schema_of(tmp_path)),
        lambda: prepare([f"{folder}"], str(tmp_path / "out")),
    ):
        with pytest.raises(UsageError) as caught:
            work()
        assert str(caught.value) == said


def test_a_file_named_twice_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    (tmp_path / "link.csv").symlink_to(path)
    (tmp_path / "folder").mkdir()
    schema, out = schema_of(tmp_path), str(tmp_path / "out")
    for again, said in (
        (path, "the file is named twice"),
        (tmp_path / "link.csv", f"the same file as {path}"),
        (tmp_path / "folder" / ".." / "rows.csv", f"the same file as {path}"),
    ):
        names = [str(path), str(again)]
        for work in (
            lambda: draft(names),
            lambda: prepare_table(names, out, schema),
            lambda: prepare(names, out),
        ):
            with pytest.raises(UsageError) as caught:
                work()
            assert str(caught.value) == f"{again}: {said}: name each file once"
    assert not os.path.exists(out)


@pytest.mark.parametrize("kind", ["no byte", "parquet", "csv"])
def test_a_draft_of_files_without_rows_is_refused(tmp_path, kind):
    path = tmp_path / "rows"
    if kind == "parquet":
        pyarrow.parquet.write_table(arrow_rows().slice(0, 0), path)
    else:
        path.write_text("" if kind == "no byte" else "a,b\n\n")
    said = "the file is empty: leave out" if kind == "no byte" else "no rows: name a file with rows"
    with pytest.raises(DataError, match=f"^{path}: {said}"):
        draft([str(path)])
    other = tmp_path / "other"
    if kind == "parquet":
        pyarrow.parquet.write_table(arrow_rows(), other)
        assert draft([str(path), str(other)]).count("unused") == 2  # the kinds, and note


def test_arguments_that_are_none(tmp_path):
    for options, said in (
        ({"threads": 0}, "--threads 0: type at least 1"),
        ({"max_malformed": 2}, "--max-malformed 2: type a share"),
        ({"vocabularies": tmp_path}, "is not a prepared table"),
    ):
        with pytest.raises(EcrmError, match=said):
            prepared_small(tmp_path, **options)
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "schema.toml"]
