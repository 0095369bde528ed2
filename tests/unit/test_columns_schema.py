"""Schema files: every mistake is one line, and drafts that can be prepared."""

import datetime
import json
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

import ecrm
from ecrm.base.errors import DataError, UsageError
from ecrm.data.columns.draft import draft
from ecrm.data.columns.prepare import prepare_table
from ecrm.data.columns.schema import KINDS, load_schema, parse_schema
from support.columns import SMALL, schema_of
from support.commands import assert_one_line
from support.commands import forked_ecrm as command
from support.paths import ROOT

REST = 'y = { kind = "label" }\nid = { kind = "categorical", rows = 9 }\n'
MISTAKES = [
    ("a =", "not valid TOML"),
    ("", r"no \[columns\], the table with a line for each column"),
    ("[columns]", r"no \[columns\]"),
    ("colums = 1\n[columns]\n" + REST, "no key 'colums': did you mean columns?"),
    ("held_out = 1\n[columns]\n" + REST, "held_out is 1: type a share, from 0 to below 1"),
    ("held_out = true\n[columns]\n" + REST, "held_out is True: type a number"),
    ("header = 1\n[columns]\n" + REST, "header is 1: type true or false"),
    ('delimiter = "::"\n[columns]\n' + REST, "delimiter is '::': type one ASCII character"),
    (
        "[columns]\na = 3\n" + REST,
        "column 'a': type { kind = \"...\" } with a kind of label, dense",
    ),
    ('[columns]\na = { kind = "dence" }\n' + REST, "no kind 'dence': did you mean dense?"),
    ('[columns]\na = { kind = "dense", row = 3 }\n' + REST, "no option of dense 'row': the known"),
    ('[columns]\na = { kind = "unused", rows = 3 }\n' + REST, "no option of unused 'rows'.* none"),
    ('[columns]\na = { kind = "multi_hot" }\n' + REST, "'a': type rows = N, .* or vocabulary = tr"),
    (
        '[columns]\na = { kind = "multi_hot", rows = 9, vocabulary = true }\n' + REST,
        "'a': type rows = N",
    ),
    ('[columns]\na = { kind = "multi_hot", rows = 1 }\n' + REST, "rows is 1: must be in 2"),
    ('[columns]\na = { kind = "multi_hot", rows = 1.5 }\n' + REST, "rows is 1.5: type a whole"),
    ('[columns]\na = { kind = "dense", transform = "sqrt" }\n' + REST, "transforms are log, sign"),
    ('[columns]\na = { kind = "dense", missing = nan }\n' + REST, "missing is nan: type a finite"),
    ('[columns]\na = { kind = "dense", missing = -inf }\n' + REST, "missing is -inf: type a fin"),
    (f"[columns]\na = {{ kind = 'dense', missing = 1{'0' * 400} }}\n" + REST, "missing is inf: t"),
    (
        '[columns]\na = { kind = "dense", missing = 1e300 }\n' + REST,
        "missing is 1e.300: type a .*32",
    ),
    ('[columns]\ny = { kind = "label", above = nan }\n', "above is nan: type a finite number"),
    ("held_out = nan\n[columns]\n" + REST, "held_out is nan: type a finite number"),
    ('[columns]\na = { kind = "multi_hot", rows = 9, separator = "" }\n' + REST, "is empty: leave"),
    ('[columns]\na = { kind = "split", train = ["x"] }\n' + REST, "type the values of both parts"),
    (
        'held_out = 0.2\n[columns]\na = { kind = "split", train = ["x"], held_out = ["y"] }\n'
        + REST,
        "held_out is 0.2, but the column 'a' of kind split has the held-out rows: leave out",
    ),
    (
        '[columns]\na = { kind = "split", train = "x", held_out = ["y"] }\n' + REST,
        "train is 'x': type a list of texts",
    ),
    (
        '[columns]\ny = { kind = "label", above = 1, equals = "x" }\n',
        "above and equals exclude each other",
    ),
    (
        '[columns]\na = { kind = "label" }\n' + REST,
        r"2 columns are of kind label \(a, y\): keep one, and give the others kind = \"unused\"",
    ),
    ('[columns]\nid = { kind = "categorical", rows = 9 }\n', "no column is the label: give"),
    ('[columns]\ny = { kind = "label" }\n', "no column has ids for tables of embeddings: give"),
    (
        '[columns]\na = { kind = "multi_hot", rows = 8, table = "id" }\n' + REST,
        "columns 'a' and 'id' share the table 'id': type the same rows or vocabulary for both",
    ),
    ('[columns]\nw = { kind = "weights" }\n' + REST, "column 'w' needs kind = \"weights\", and ex"),
    (
        '[columns]\na = { kind = "weighted", rows = 8, weights = "w" }\n' + REST,
        "column 'w' needs kind = \"weights\", and exactly one",
    ),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES)
def test_a_mistake_in_a_schema_is_told_with_the_file(tmp_path, text, said):
    with pytest.raises(UsageError, match=said) as caught:
        schema_of(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "schema.toml"))


def test_schema_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "schema.toml"
    with pytest.raises(UsageError, match="No such file.*: type ecrm schema FILES > .*schema.toml"):
        load_schema(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_schema(path)


def test_a_schema_written_down_is_the_same_schema(tmp_path):
    schema = schema_of(tmp_path)
    written = json.loads(json.dumps(schema.to_dict()))
    assert parse_schema(written, "x") == schema
    assert written["columns"]["price"] == {"kind": "dense"}


def test_every_kind_is_in_the_tutorial():
    page = (ROOT / "docs/tutorial/your-columns.md").read_text()
    for kind, (_, options) in KINDS.items():
        assert f"| `{kind}` |" in page
        assert all(f"`{option}`" in page for option in options)


MADE = {
    "user_id": [str(number % 2000) for number in range(4000)],
    "country": ["de", "fr"] * 2000,
    "price": [number / 10 for number in range(4000)],
    "longitude": [number - 2000.0 for number in range(4000)],
    "age": [20 + number % 50 for number in range(4000)],
    "genres": [["a", "b"][: number % 3] for number in range(4000)],
    "tags": [[{"id": number % 7, "weight": 0.5}] for number in range(4000)],
    "read_at": list(range(4000)),
    "subset": (["train"] * 3 + ["test"]) * 1000,
    "session": [f"s{number}" for number in range(4000)],
    "version": [1] * 4000,
    "nothing": [None] * 4000,
    "is_new": [True, False] * 2000,
    "click": [0, 1] * 2000,
    "strange name": ["x|y", "y|z"] * 2000,
}
GUESSED = {
    "user_id": 'kind = "categorical", rows = 16000',
    "country": 'kind = "categorical", vocabulary = true',
    "price": 'kind = "dense", transform = "log"',
    "longitude": 'kind = "dense", transform = "signed_log"',
    "age": 'kind = "dense"',
    "genres": 'kind = "multi_hot", vocabulary = true',
    "tags": 'kind = "weighted", vocabulary = true',
    "read_at": 'kind = "time"',
    "subset": 'kind = "split", train = ["train"], held_out = ["test"]',
    "session": 'kind = "unused"',
    "version": 'kind = "unused"',
    "nothing": 'kind = "unused"',
    "is_new": 'kind = "dense"',
    "click": 'kind = "label"',
    '"strange name"': 'kind = "multi_hot", separator = "|", vocabulary = true',
}


@pytest.fixture
def made(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table(MADE), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_a_draft_guesses_from_names_and_values(made):
    lines = draft([str(made)]).splitlines()
    guessed = dict(line.split("  #")[0].split(" = { ", 1) for line in lines if " = { " in line)
    assert {name: text.removesuffix(" }") for name, text in guessed.items()} == GUESSED
    assert "genres = { " in "\n".join(lines) and "list<" in "\n".join(lines)


def drafted(tmp_path, columns):
    """The columns of a draft for a Parquet file, as in the schema."""
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows")
    return tomllib.loads(draft([str(tmp_path / "rows")]))["columns"]


TIMES = {
    "click": [0, 1] * 500,
    "day_of_week": [number % 7 for number in range(1000)],
    "watch_time": list(range(1000)),
    "timestamp": [1_700_000_000 + number // 2 for number in range(1000)],
}


def test_a_draft_chooses_the_column_of_time(tmp_path):
    """By the type, then the name, then the number of different values."""
    found = drafted(tmp_path, TIMES)
    assert [found[name]["kind"] for name in TIMES] == ["label", "dense", "dense", "time"]
    days = [datetime.date(2024, 1, 1 + number % 9) for number in range(1000)]
    found = drafted(tmp_path, TIMES | {"bought": days})
    assert [name for name in found if found[name]["kind"] == "time"] == ["bought"]
    others = {name: TIMES[name] for name in ("click", "day_of_week")}
    found = drafted(tmp_path, others | {"time": [number % 900 for number in range(1000)]})
    assert found["time"]["kind"] == "time"
    found = drafted(tmp_path, others)
    assert found["day_of_week"] == {"kind": "dense"}


def test_a_draft_holds_out_the_last_fold(tmp_path):
    columns = {"click": [0, 1] * 10, "user_id": list(range(20))}
    fold = [1 + number % 10 for number in range(20)]
    found = drafted(tmp_path, columns | {"fold": fold})["fold"]
    assert found == {
        "kind": "split",
        "train": [str(number) for number in range(1, 10)],
        "held_out": ["10"],
    }
    text = draft([str(tmp_path / "rows")])
    assert "\nheld_out" not in text
    manifest = prepare_table(
        [str(tmp_path / "rows")], str(tmp_path / "out"), schema_of(tmp_path, text)
    )
    assert manifest["train_rows"] == 18
    found = drafted(tmp_path, columns | {"part": ["train", "a"] * 10})["part"]
    assert (found["train"], found["held_out"]) == (["train"], ["a"])
    found = drafted(tmp_path, columns | {"part": ["valid", "test"] * 10})["part"]
    assert (found["train"], found["held_out"]) == (["test"], ["valid"])


def test_a_draft_knows_pairs_in_texts_and_names_of_things(tmp_path):
    columns = {
        "click": [0, 1] * 10,
        "movie": list(range(20)),
        "movies": list(range(20)),
        "seen": [f"m{number}:0.53|m{number + 1}:-2e-3" for number in range(20)],
        "genres": ["drama|film:noir", "drama|sci-fi:2"] * 10,
    }
    found = drafted(tmp_path, columns)
    assert found["movie"]["kind"] == "categorical" and found["movies"]["kind"] == "dense"
    assert found["seen"] == {"kind": "weighted", "separator": "|", "vocabulary": True}
    assert found["genres"]["kind"] == "multi_hot"
    text = draft([str(tmp_path / "rows")])
    assert "{ " + 'kind = "weighted", separator = "|", vocabulary = true }  # string, 21 ' in text
    manifest = prepare_table(
        [str(tmp_path / "rows")], str(tmp_path / "out"), schema_of(tmp_path, text), strict=True
    )
    assert manifest["tables"]["seen"] == 22


HALVES = [number % 10 / 2 + 0.5 for number in range(20)]
LABELS = [
    ({"rating": HALVES}, {"kind": "label", "above": 3}),
    ({"label": ["yes", "no"] * 10}, {"kind": "label", "equals": "yes"}),
    ({"click": ["Y", None] * 10}, {"kind": "unused"}),
    ({"y": ["b", "a"] * 10}, {"kind": "label", "equals": "b"}),
    ({"score": [number / 20 for number in range(20)]}, {"kind": "dense"}),
]


@pytest.mark.parametrize(("column", "guessed"), LABELS)
def test_a_draft_finds_labels_of_half_stars_and_of_two_texts(tmp_path, column, guessed):
    found = drafted(tmp_path, {"id": list(range(20)), **column})
    assert [found[name] for name in column] == [guessed]


def test_a_draft_says_how_to_read_dates_with_points(tmp_path):
    days = [f"{1 + number % 9:02}.02.2024" for number in range(20)]
    drafted(tmp_path, {"click": [0, 1] * 10, "day": days, "id": list(range(20))})
    text = draft([str(tmp_path / "rows")])
    (line,) = [line for line in text.splitlines() if line.startswith("day = ")]
    assert line.endswith('9 different values, dates: kind = "time", format = "%d.%m.%Y"')
    advised = text.replace(line, "day = { " + line.split("dates: ")[1] + " }")
    prepare_table(
        [str(tmp_path / "rows")], str(tmp_path / "out"), schema_of(tmp_path, advised), strict=True
    )


ODD = {
    "bytes": pyarrow.array([b"\xff", b"a"]),
    "fixed": pyarrow.array([b"ab", b"cd"], pyarrow.binary(2)),
    "how_long": pyarrow.array([1, 2], pyarrow.duration("s")),
    "clock": pyarrow.array([1, 2], pyarrow.time32("s")),
    "nested": pyarrow.array([[[1]], [[2]]]),
    "triple": pyarrow.array([[{"a": 1, "b": 2, "c": 3}], []]),
    "record": pyarrow.array([{"a": 1}, {"a": 2}]),
    "cost": pyarrow.array([1, 2]).cast(pyarrow.decimal128(30, 2)),
    "words": pyarrow.array(["NA", "null"]),
    "nothing": pyarrow.array([float("nan"), None]),
    "half": pyarrow.array(np.array([1.5, 2.5], np.float16)),
    "a.b": pyarrow.array([1.5, 2.5]),
    "label": pyarrow.array([True, False]),
}


def test_a_draft_of_odd_types_can_be_prepared(tmp_path):
    path = tmp_path / "rows"
    pyarrow.parquet.write_table(pyarrow.table(ODD), path)
    text = draft([str(path)])
    for name in ("bytes", "how_long", "clock", "nested", "triple", "record", "nothing"):
        assert f'{name} = {{ kind = "unused" }}' in text
    for name in ("cost", "half", '"a.b"'):
        assert f'{name} = {{ kind = "dense" }}' in text
    prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path, text))
    table = ecrm.Table(tmp_path / "out")
    assert table.dense == ["cost", "half", "a.b"] and table[1].dense.tolist() == [[2, 2.5, 2.5]]


def test_a_draft_can_be_prepared_as_it_is(made, tmp_path):
    schema = schema_of(tmp_path, draft([str(made)]))
    prepare_table([str(made)], str(tmp_path / "out"), schema)
    table = ecrm.Table(tmp_path / "out")
    assert (len(table.train), len(table.held_out)) == (3000, 1000)
    assert table.rows == {
        "user_id": 16000,
        "country": 3,
        "genres": 3,
        "tags": 8,
        "strange name": 4,
    }


def test_a_draft_of_text_with_and_without_a_header(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("label,id,amount\n" + "1,a,3.5\n0,b,\n1,2,3,4\n" * 3)
    text = draft([str(path)])
    assert "# 3 malformed lines skipped." in text and "header" not in text
    assert (
        'label = { kind = "label" }' in text
        and 'amount = { kind = "unused" }  # string, 50%' in text
    )
    path.write_text("1\tx\n0\ty\n")
    text = draft([str(path)])
    assert "header = false" in text and 'column_0 = { kind = "label" }' in text
    prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path, text))
    assert len(ecrm.Table(tmp_path / "out")) == 2


@pytest.mark.parametrize("divider", [";", "|", ",", "\t"])
def test_a_draft_finds_the_delimiter(tmp_path, divider):
    path = tmp_path / "rows.csv"
    path.write_text("label,id,amount\n1,a,3.5\n0,b,2\n".replace(",", divider))
    text = draft([str(path)])
    assert (f'\ndelimiter = "{divider}"\n' in text) == (divider in ";|")
    assert 'amount = { kind = "dense" }' in text
    manifest = prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path, text))
    assert manifest["rows"] == 2
    plain = schema_of(tmp_path, text.replace("delimiter", "# delimiter"))
    if divider in ";|":
        said = f'or type delimiter = "[{divider}]" above .columns., or type header = false'
        with pytest.raises(DataError, match=said):
            prepare_table([str(path)], str(tmp_path / "other"), plain)


NO_TEXT = [
    (b"label,id\n1,\0\n", "has a NUL byte, so the file is no text"),
    ("label,id\n1,2\n".encode("utf-16"), "is UTF-16: type iconv -f UTF-16 -t UTF-8 < FILE > NEW"),
    ("\ufefflabel,id\n".encode("utf-16-be"), "is UTF-16: type iconv"),
    ("label,id\n1,2\n".encode("utf-16-le"), "has a NUL byte, so the file is no text"),
    (b"FEA1\n", "is a feather file of version 1"),
    (b'{"clicked": 1, "price": 2}\n', "JSON lines are not read: write Parquet, Arrow or CSV"),
    (b"label,caf\xe9\n1,2\n", "the first line is not UTF-8 at byte 10: for Latin-1 type iconv"),
]


@pytest.mark.parametrize(("data", "said"), NO_TEXT)
def test_bytes_that_are_no_text_are_refused(tmp_path, data, said):
    path = tmp_path / "rows"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said):
        draft([str(path)])
    with pytest.raises(DataError, match=said):
        prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path))


def test_only_local_files_are_read(tmp_path):
    said = "^s3://bucket/rows.parquet: an address, and only local files are read: copy the file to"
    with pytest.raises(UsageError, match=said):
        draft(["s3://bucket/rows.parquet"])
    with pytest.raises(UsageError, match=said):
        prepare_table(["s3://bucket/rows.parquet"], str(tmp_path / "out"), schema_of(tmp_path))


def test_long_names_are_cut_in_messages(tmp_path):
    path = tmp_path / "rows"
    path.write_text("n" * 9000 + ",y\n1,2\n")
    with pytest.raises(DataError) as caught:
        prepare_table([str(path)], str(tmp_path / "out"), schema_of(tmp_path))
    assert "'nnn" in str(caught.value) and len(str(caught.value)) < 700


def test_a_draft_without_a_label_says_so(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a", "b", "a"]}), tmp_path / "rows")
    text = draft([str(tmp_path / "rows")])
    assert '# No column looks like the label: give one kind = "label".' in text
    with pytest.raises(UsageError, match="no column is the label"):
        schema_of(tmp_path, text)


@pytest.mark.parametrize("form", ["parquet", "arrow", "text"])
def test_doubled_names_are_refused_by_a_draft(tmp_path, form):
    path = tmp_path / "rows"
    table = pyarrow.Table.from_arrays([pyarrow.array([0, 1])] * 3, ["y", "id", "id"])
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif form == "arrow":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("y,id,id\n0,1,2\n")
    with pytest.raises(DataError, match="rows: several columns have the name 'id'"):
        draft([str(path)])


def test_a_draft_takes_other_types_of_the_same_columns(tmp_path):
    """Dates of other units and zones, and ids as numbers and texts, as `prepare table` does."""
    moment = datetime.datetime(2024, 1, 1)
    stamp = pyarrow.timestamp
    first = {
        "visited_at": pyarrow.array([moment, None], stamp("s")),
        "seen_at": pyarrow.array([moment, None], stamp("ns", "Europe/Berlin")),
        "id": pyarrow.array([1.0, None]),
        "click": pyarrow.array([True, False]),
        "color": pyarrow.array(["red", "blue"]).dictionary_encode(),
        "tags": pyarrow.array([["a"], ["b"]]),
    }
    second = {
        "visited_at": pyarrow.array([moment.date(), None]),
        "seen_at": pyarrow.array([1_704_067_200, 5]),
        "id": pyarrow.array(["1", "2"]),
        "click": pyarrow.array([1, 0]),
        "color": pyarrow.array(["red", None], pyarrow.large_string()),
        "tags": pyarrow.nulls(2),
    }
    paths = [str(tmp_path / name) for name in ("first", "second")]
    for path, columns in zip(paths, (first, second)):
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    found = tomllib.loads(draft(paths))["columns"]
    assert {name: column["kind"] for name, column in found.items()} == {
        "visited_at": "unused",
        "seen_at": "time",
        "id": "categorical",
        "click": "label",
        "color": "categorical",
        "tags": "multi_hot",
    }
    assert found["seen_at"]["unit"] == "s"
    (tmp_path / "schema.toml").write_text(draft(paths))
    schema = load_schema(tmp_path / "schema.toml")
    manifest = prepare_table(paths, str(tmp_path / "out"), schema, max_malformed=1)
    assert manifest["rows"] == 3 and manifest["tables"]["id"] == 3
    pyarrow.parquet.write_table(pyarrow.table(second | {"tags": [1, 2]}), paths[1])
    with pytest.raises(
        DataError, match=r"second: column 'tags' holds int64, and in \S+first list<"
    ):
        draft(paths)


def test_files_of_a_draft_have_the_same_columns(made, tmp_path):
    other = tmp_path / "other"
    pyarrow.parquet.write_table(pyarrow.table({"click": [1]}), other)
    with pytest.raises(DataError, match="other: the columns differ from those of .*: 'age', 'cou"):
        draft([str(made), str(other)])
    copy = shutil.copy(made, tmp_path / "copy")
    text = draft([str(made), str(copy)])
    assert text.splitlines()[0].startswith(
        "# A draft of `ecrm schema`, from the first 8,000 rows of"
    )


def test_the_commands(made, tmp_path):
    done = command("schema", str(made))
    assert done.returncode == 0, done.stderr
    (tmp_path / "schema.toml").write_text(done.stdout)
    words = ["prepare", "table", "rows.parquet", "--schema", "schema.toml", "--output"]
    done = command(*words, "out", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "out: 4,000 rows, 1,000 of them held out, label 0.5 on average, 0 malformed rows skipped, "
        "16,018 table rows, 0.3 MB"
    ]
    assert_one_line(command(*words, "out", cwd=tmp_path), "--force replaces it")
    (tmp_path / "schema.toml").write_text(SMALL)
    assert_one_line(command(*words, "new", cwd=tmp_path), "lacks columns 'clicked', 'movie'", 4)
    (tmp_path / "schema.toml").write_text("x")
    assert_one_line(command(*words, "new", cwd=tmp_path), "schema.toml: not valid TOML")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out",
        "rows.parquet",
        "schema.toml",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["schema", "x"],
        ["prepare", "table", "x", "--output", "y", "--schema", "schema.toml"],
        ["prepare", "criteo", "x", "--output", "y"],
    ],
)
def test_without_pyarrow_a_line_says_what_to_type(tmp_path, words):
    (tmp_path / "schema.toml").write_text(SMALL)
    program = (
        "import sys; sys.modules['pyarrow'] = None; from ecrm.cli.commands import main; "
        f"sys.exit(main({words!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert_one_line(done, 'type pip install "ecrm[tables]", or pip install pyarrow')
