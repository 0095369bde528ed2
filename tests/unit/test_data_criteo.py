"""The Criteo reader: what it accepts and what it refuses, with every block size."""

import gzip
import itertools
import random
import re
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ecrm.base.errors import DataError, UsageError
from ecrm.data import criteo
from ecrm.data.categories import KAGGLE
from ecrm.data.criteo import MAX_LINE_BYTES, read_criteo, row_of, why_malformed
from ecrm.data.criteo_fields import fields_of
from ecrm.data.criteo_text import format_rows
from ecrm.data.generate import Population
from ecrm.data.layout import COLUMN_NAMES, detect_layout
from support.paths import TERABYTE_HEAD

BLOCK_SIZES = (1, 7, 300, 4096, 1 << 20)


def fields_by_hand(number: int = 0) -> list[str]:
    """The 40 fields of some sound row."""
    return [
        str(number % 2),
        *(str(number * 17 + i) for i in range(13)),
        *(f"{number * 31 + i:08x}" for i in range(26)),
    ]


def line(number: int = 0, delimiter: str = "\t", **changed: str) -> str:
    """A sound row as text but for the fields given by name."""
    values = dict(zip(COLUMN_NAMES, fields_by_hand(number), strict=True)) | changed
    return delimiter.join(values.values())


def read_all(path, **options):
    """Joins all blocks of a file.

    Returns (labels, integers, categories, missing, malformed count, examples).
    """
    blocks = list(read_criteo(str(path), **options))
    arrays = [
        np.concatenate([getattr(b, name) for b in blocks])
        for name in ("labels", "integers", "categories", "missing")
    ]
    return *arrays, sum(b.malformed for b in blocks), [e for b in blocks for e in b.examples]


def reference(text: bytes):
    """The same in plain Python: (rows as lists with None where missing, {line number: reason})."""
    layout, rows, problems = None, [], {}
    for number, content in enumerate(text.split(b"\n"), 1):
        content = content.removesuffix(b"\r")
        if not content:
            continue
        layout = layout or detect_layout("", number, content)
        reason = why_malformed(content, layout)
        if reason:
            problems[number] = reason
            continue
        label, *rest = content.split(layout.delimiter)
        rows.append(
            [int(label), *(int(f, 10 if i < 13 else 16) if f else None for i, f in enumerate(rest))]
        )
    return rows, problems


def as_lists(labels, integers, categories, missing):
    """The reader's arrays in the form of `reference`."""
    values = np.concatenate((integers, categories), axis=1).astype(object)
    values[missing] = None
    return [[int(label), *row] for label, row in zip(labels, values.tolist(), strict=True)]


def test_values_of_every_field_kind(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(
        line(
            1,
            int_0="",
            int_1="-2",
            int_2="0",
            int_3="999999999999999999",
            cat_0="",
            cat_1="f",
            cat_2="DEADbeef",
            cat_25="0",
        )
        + "\n"
    )
    labels, integers, categories, missing, malformed, _ = read_all(path)
    assert (labels.dtype, integers.dtype, categories.dtype, missing.dtype) == (
        np.uint8,
        np.int64,
        np.uint32,
        bool,
    )
    assert (labels.shape, integers.shape, categories.shape, missing.shape) == (
        (1,),
        (1, 13),
        (1, 26),
        (1, 39),
    )
    assert labels[0] == 1 and malformed == 0
    assert integers[0, :5].tolist() == [0, -2, 0, 999_999_999_999_999_999, 21]
    assert categories[0, :3].tolist() == [0, 15, 0xDEADBEEF] and categories[0, 25] == 0
    assert np.flatnonzero(missing[0]).tolist() == [0, 13]


def test_all_fields_missing_but_the_label(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(b"1" + 39 * b"\t" + b"\n" + b"0" + 39 * b"\t")
    labels, integers, categories, missing, malformed, _ = read_all(path)
    assert (
        labels.tolist() == [1, 0]
        and missing.all()
        and not integers.any()
        and not categories.any()
        and malformed == 0
    )


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "unended"])
def test_malformed_lines_are_skipped_counted_and_named_with_their_line(
    tmp_path, block_bytes, ending, last
):
    bad = {
        3: (line() + "\tx", "41 columns instead of 40"),
        4: ("\t".join(fields_by_hand()[:39]), "39 columns instead of 40"),
        6: (line(int_4="12.5"), "int_4 is '12.5', not an integer"),
        7: (line(int_12="-"), "int_12 is '-', not an integer"),
        8: (line(int_0="+1"), "int_0 is '+1', not an integer"),
        9: (line(int_0=" 1"), "int_0 is ' 1', not an integer"),
        10: (
            line(int_3="1234567890123456789"),
            "int_3 is '1234567890123456789', more than 18 digits",
        ),
        11: (line(label="2"), "label is '2', not 0 or 1"),
        12: (line(label=""), "label is '', not 0 or 1"),
        13: (line(label="01"), "label is '01', not 0 or 1"),
        15: (line(cat_0="0000000g"), "cat_0 is '0000000g', not hexadecimal"),
        16: (line(cat_25="123456789"), "cat_25 is '123456789', more than 8 hex digits"),
        17: (line(cat_7="0x12"), "cat_7 is '0x12', not hexadecimal"),
        18: (line(cat_9="caf\xe9"), "cat_9 is 'caf\xe9', not hexadecimal"),
        19: (line(cat_9="\x10"), "cat_9 is '\\x10', not hexadecimal"),
        21: (" ", "1 columns instead of 40"),
        22: (line(int_1="1\x00"), "int_1 is '1\\x00', not an integer"),
        23: (line(1, ","), "1 columns instead of 40"),
        24: (line(cat_3="a" * 60), f"cat_3 is '{'a' * 40}...', more than 8 hex digits"),
    }
    blank = {2, 5, 20}
    path = tmp_path / "day_0"
    texts = ["" if n in blank else bad[n][0] if n in bad else line(n) for n in range(1, 27)]
    path.write_text(ending.join(texts) + (ending if last else ""), newline="", encoding="utf-8")
    *arrays, malformed, examples = read_all(path, block_bytes=block_bytes)
    assert malformed == len(bad)
    assert [str(e) for e in examples] == [f"{path}:{n}: {reason}" for n, (_, reason) in bad.items()]
    assert as_lists(*arrays) == [
        [int(f, 10 if i < 14 else 16) for i, f in enumerate(fields_by_hand(n))]
        for n in range(1, 27)
        if n not in bad and n not in blank
    ]


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_bytes_that_are_not_utf8(tmp_path, block_bytes):
    path = tmp_path / "train.txt"
    path.write_bytes(
        f"{line()}\n".encode()
        + line(cat_0="ab").encode().replace(b"ab", b"\xffb")
        + b"\n"
        + line().encode()
    )
    *_, malformed, examples = read_all(path, block_bytes=block_bytes)
    position = line(cat_0="ab").index("ab") + 1
    assert (
        malformed == 1
        and str(examples[0]) == f"{path}:2: not valid UTF-8 at byte {position} of the line"
    )


def test_the_reader_agrees_with_the_plain_statement_on_mutated_text(tmp_path):
    chance = random.Random(7)
    drawn = Population(5).draw(0)
    some = slice(0, 400)
    text = bytearray(
        format_rows(
            drawn.labels[some],
            drawn.integers[some],
            KAGGLE.hex_values(drawn.ids[some]),
            drawn.missing[some],
        )
    )
    for _ in range(250):
        at = chance.randrange(len(text))
        replacement = bytes(
            chance.choice(b"\t\n\r\n01aAfFgG-+ .,\x00\x7f\xc3\xff")
            for _ in range(chance.randrange(3))
        )
        text[at : at + chance.randrange(3)] = replacement
    path = tmp_path / "fuzzed"
    path.write_bytes(text)
    rows, problems = reference(bytes(text))
    assert len(rows) > 100 and len(problems) > 50
    for block_bytes in (5, 1000, 1 << 20):
        *arrays, malformed, examples = read_all(path, block_bytes=block_bytes)
        assert as_lists(*arrays) == rows
        assert malformed == len(problems)
        assert {e.line: e.reason for e in examples}.items() <= problems.items()


def test_the_reader_agrees_with_the_plain_statement_on_mutated_csv(tmp_path):
    chance = random.Random(8)
    parts = ("0", "1", "nan", "NULL", "None", "a", ".", ".0", "0000000", "-", '"', "n", "N", "")
    texts = ["".join(chance.choices(parts, k=chance.randrange(1, 4))) for _ in range(3000)]
    changed = [
        {chance.choice(("label", "int_0", "int_12", "cat_0", "cat_25")): text} for text in texts
    ]
    path = tmp_path / "fuzzed.csv"
    path.write_text(as_csv(*changed))
    layout = detect_layout("", 1, ",".join(COLUMN_NAMES).encode())
    problems = {
        n: why
        for n, row in enumerate(changed, 2)
        if (why := why_malformed(line(n - 2, ",", **row).encode(), layout))
    }
    assert 300 < len(problems) < 2700
    lines = path.read_bytes().split(b"\n")
    expected = [
        row_of(one, layout) for n, one in enumerate(lines, 1) if n > 1 and n not in problems
    ]
    for block_bytes in (20_000, 1 << 20):
        *arrays, malformed, examples = read_all(path, block_bytes=block_bytes)
        assert {e.line: e.reason for e in examples} == problems and malformed == len(problems)
        assert as_lists(*arrays) == expected
    sound = [row for n, row in enumerate(changed, 2) if n not in problems]
    path.write_text(as_csv(*sound))
    lines = path.read_bytes().split(b"\n")[1:]
    *arrays, malformed, _ = read_all(path)
    assert as_lists(*arrays) == [row_of(one, layout) for one in lines] and malformed == 0


LAYOUT = detect_layout("", 1, line().encode())


def values_of(name: str, texts: list[bytes]) -> list[int]:
    """The values of a column of lines, by pyarrow alone; without the doubtful lines."""
    lines = [line(**{name: "@"}).encode().replace(b"@", text) + b"\n" for text in texts]
    found, doubtful = fields_of(b"".join(lines), LAYOUT)
    assert len(doubtful) + len(found.labels) == len(lines)
    if name == "label":
        return found.labels.tolist()
    kind, place = name.split("_")
    return (found.integers if kind == "int" else found.categories)[:, int(place)].tolist()


def test_every_number_of_up_to_two_characters_is_read():
    digits = "0123456789abcdefABCDEF"
    hexes = ["", *digits, *("".join(pair) for pair in itertools.product(digits, repeat=2))]
    assert values_of("cat_3", [text.encode() for text in hexes]) == [
        int(text or "0", 16) for text in hexes
    ]
    numbers = [
        "",
        *(f"{sign}{n:0{width}}" for sign in ("", "-") for width in (1, 2) for n in range(10)),
    ]
    assert values_of("int_3", [text.encode() for text in numbers]) == [int(n or 0) for n in numbers]


@pytest.mark.parametrize(
    ("name", "allowed"), [("cat_3", rb"[0-9a-fA-F]"), ("int_3", rb"[0-9]"), ("label", rb"[01]")]
)
def test_every_other_character_makes_a_line_doubtful(name, allowed):
    """Every byte but the ends of fields and lines, at the end of a field and alone."""
    texts = [bytes([byte]) for byte in set(range(256)) - set(b"\t\n\r")]
    texts += [] if name == "label" else [b"1" + text for text in texts]
    lines = [line(**{name: "@"}).encode().replace(b"@", text) + b"\n" for text in texts]
    found, doubtful = fields_of(b"".join(lines), LAYOUT)
    fit = [re.fullmatch(allowed, text[-1:]) is not None for text in texts]
    assert doubtful.tolist() == [place for place, good in enumerate(fit) if not good]
    sound = [text for text, good in zip(texts, fit) if good]
    assert values_of(name, sound) == [int(text, 16 if name == "cat_3" else 10) for text in sound]
    assert len(found.labels) == len(sound)


def test_numbers_of_every_length():
    texts = [b"%d" % (sign * 10**digits // 7) for digits in range(1, 18) for sign in (1, -1)]
    texts += [b"000000000000000012", b"", b"9" * 18]
    assert values_of("int_5", texts) == [int(text or b"0") for text in texts]
    hexes = [b"%x" % (2**bits - 1) for bits in range(1, 33)]
    assert values_of("cat_5", hexes) == [2**bits - 1 for bits in range(1, 33)]
    for name, text in (("int_5", b"-" + b"9" * 18), ("int_5", b"0" * 19), ("cat_5", b"0" * 9)):
        assert values_of(name, [b"1", text, b"2"]) == [1, 2]


def test_a_longest_negative_number_is_read(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(line(int_5="-" + "9" * 18) + "\n")
    assert read_all(path)[1][0, 5] == -999_999_999_999_999_999


def test_only_doubtful_lines_are_judged_one_by_one(tmp_path, monkeypatch):
    judged = []
    monkeypatch.setattr(
        criteo, "why_malformed", lambda text, _: judged.append(text) or why_malformed(text, _)
    )
    path = tmp_path / "train.txt"
    rare = {100: {"int_0": "x"}, 700: {"int_5": "-" + "9" * 18}, 900: {"cat_3": "1-"}}
    rare |= {901: {"int_2": "-"}, 902: {"int_2": "1-2"}, 903: {"int_2": "-3"}}
    lines = [line(n, **rare.get(n, {})) for n in range(1000)]
    lines[500] += "\tmore"
    path.write_text("\n".join(lines) + "\n")
    *arrays, malformed, examples = read_all(path)
    assert [one.line for one in examples] == [101, 501, 901, 902, 903] and malformed == 5
    assert as_lists(*arrays) == reference(path.read_bytes())[0]
    assert judged == [lines[n].encode() for n in (100, 500, 700, 900, 901, 902)]
    path.write_text("\n".join([*lines[:400], "", *lines[400:]]) + "\n")
    *again, malformed, examples = read_all(path)
    assert [one.line for one in examples] == [101, 502, 902, 903, 904] and malformed == 5
    assert as_lists(*again) == as_lists(*arrays)


def test_strict_stops_at_the_first_malformed_line(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join([line(1), "", line(2), line(label="7"), line(label="8")]))
    for block_bytes in BLOCK_SIZES:
        with pytest.raises(DataError) as caught:
            read_all(path, strict=True, block_bytes=block_bytes)
        assert str(caught.value) == f"{path}:4: label is '7', not 0 or 1"
    path.write_text("\n".join([line(1), "", line(2)]))
    assert len(read_all(path, strict=True)[0]) == 2


@pytest.mark.parametrize(
    "name", ["train.txt.gz", "train.txt"], ids=["named .gz", "known by content"]
)
def test_gzip_is_known_by_its_content(tmp_path, name):
    text = "".join(line(n) + "\n" for n in range(100)).encode()
    plain, packed = tmp_path / "plain", tmp_path / name
    plain.write_bytes(text)
    # two members, as `cat a.gz b.gz` leaves
    packed.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    for block_bytes in (2000, 1 << 20):
        blocks = list(read_criteo(str(packed), block_bytes=block_bytes))
        assert blocks[-1].bytes_read == packed.stat().st_size
        assert as_lists(*read_all(packed, block_bytes=block_bytes)[:4]) == as_lists(
            *read_all(plain)[:4]
        )
    misnamed = tmp_path / "plain.gz"
    misnamed.write_bytes(text)
    assert len(read_all(misnamed)[0]) == 100


def test_damaged_gzip(tmp_path):
    whole = gzip.compress("".join(line(n) + "\n" for n in range(100)).encode())
    path = tmp_path / "day_0.gz"
    for size in (3, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=rf"day_0.gz: the gzip stream is truncated after {size} bytes"
        ):
            read_all(path)
    path.write_bytes(whole[:-8] + b"\0\0\0\0" + whole[-4:])
    with pytest.raises(DataError, match="the gzip stream is damaged.*CRC"):
        read_all(path)
    path.write_bytes(whole[:100] + bytes(50) + whole[150:])
    with pytest.raises(DataError, match="the gzip stream is damaged"):
        read_all(path)
    path.write_bytes(whole + b"trailing garbage")
    with pytest.raises(DataError, match="the gzip stream is damaged"):
        read_all(path)


def one_line(error: pytest.ExceptionInfo, path: Path) -> str:
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_inputs_that_are_no_criteo_file(tmp_path):
    path = tmp_path / "absent"
    with pytest.raises(UsageError) as caught:
        read_all(path)
    assert "No such file" in one_line(caught, path)
    with pytest.raises(UsageError) as caught:
        read_all(tmp_path)
    assert "is a directory" in one_line(caught, tmp_path)
    for content, words in (
        (b"", "the file is empty"),
        (b"\n\r\n\n", "holds no line that is not blank"),
        (gzip.compress(b""), "holds no line that is not blank"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"PAR1rest", "is a parquet file: type ecrm prepare table FILE --schema"),
        (b"ARROW1\0\0rest", "is an Arrow file: type ecrm prepare table FILE"),
        (b"\xff\xff\xff\xffrest", "is an Arrow stream: type ecrm prepare table FILE"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_all(path)
        assert words in one_line(caught, path)


def test_archives_are_refused_whatever_their_name(tmp_path):
    rows, path = tmp_path / "train.txt", tmp_path / "train.txt.gz"
    rows.write_text("".join(line(n) + "\n" for n in range(100)))
    for kind, verb in (("w", "is"), ("w:gz", "unpacks to")):
        with tarfile.open(path, kind) as archive:
            archive.add(rows, "train.txt")
        for block_bytes in BLOCK_SIZES:
            with pytest.raises(DataError) as caught:
                read_all(path, block_bytes=block_bytes)
            assert one_line(caught, path).endswith(
                f" {verb} a tar archive: unpack it; only plain text and gzip of it are read"
            )
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(rows)
    for verb in ("is", "unpacks to"):
        with pytest.raises(DataError) as caught:
            read_all(path)
        assert f" {verb} a zip archive: unpack it; " in one_line(caught, path)
        path.write_bytes(gzip.compress(path.read_bytes()))


HEADERS = {
    "ours": COLUMN_NAMES,
    "published": ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    "upper case": tuple(name.upper() for name in COLUMN_NAMES),
}


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("names", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("quote", ["", '"'])
def test_header_in_any_order_with_further_columns(tmp_path, delimiter, names, shuffled, quote):
    order = list(range(41))
    if shuffled:
        random.Random(1).shuffle(order)
    names, path = (*names, "Id"), tmp_path / "train.csv"

    def row(values):
        return delimiter.join(quote + values[i] + quote for i in order)

    lines = [
        row(names),
        *(row([*fields_by_hand(n), f"row {n}"]) for n in range(5)),
        row([*fields_by_hand(5)[:39], "x", "row 5"]),
    ]
    path.write_text("\ufeff" + "\r\n".join(lines), newline="")
    plain = tmp_path / "plain"
    plain.write_text("".join(line(n) + "\n" for n in range(5)))
    for block_bytes in (11, 1 << 20):
        *arrays, malformed, examples = read_all(path, block_bytes=block_bytes)
        assert as_lists(*arrays) == as_lists(*read_all(plain)[:4])
        assert malformed == 1 and str(examples[0]) == f"{path}:7: cat_25 is 'x', not hexadecimal"


def as_csv(*rows: dict, delimiter: str = ",") -> str:
    """A header and a sound row for each of `rows` but for the fields it gives."""
    return "\n".join(
        [
            delimiter.join(COLUMN_NAMES),
            *(line(n, delimiter, **changed) for n, changed in enumerate(rows)),
        ]
    )


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_under_a_header_numbers_end_in_zeros_and_words_stand_for_missing_values(
    tmp_path, delimiter
):
    path = tmp_path / "train.csv"
    rows = [
        {
            "label": "1.0",
            "int_0": "260.0",
            "int_1": "-2.00000000",
            "int_2": "7.",
            "int_3": "123456789012345678.0",
            "int_4": '"5.0"',
        },
        {
            "label": "0.0",
            "int_0": "NaN",
            "int_1": "nan",
            "int_2": "NULL",
            "int_3": "None",
            "int_12": '"NaN"',
        },
        {
            "label": "0",
            "cat_0": "NaN",
            "cat_1": "nan",
            "cat_2": "NULL",
            "cat_3": "None",
            "cat_25": "null",
        },
    ]
    path.write_text(as_csv(*rows, delimiter=delimiter))
    for block_bytes in (11, 1 << 20):
        labels, integers, _, missing, malformed, _ = read_all(path, block_bytes=block_bytes)
        assert malformed == 0 and labels.tolist() == [1, 0, 0]
        assert integers[0, :5].tolist() == [260, -2, 7, 123456789012345678, 5]
        assert [np.flatnonzero(row).tolist() for row in missing] == [
            [],
            [0, 1, 2, 3, 12],
            [13, 14, 15, 16, 38],
        ]


def test_other_fractions_and_words_are_malformed_under_a_header_too(tmp_path):
    path = tmp_path / "train.csv"
    bad = {
        "int_0": [
            "12.5",
            "12.01",
            ".0",
            "-.0",
            ".",
            "1.000000000",
            "1.0.",
            "1..0",
            "1.0.0",
            "nan.0",
            "1e3",
            "na",
            "nul",
            "nann",
            "nanc",
        ],
        "label": ["", "NaN", "2.0", "1.5", ".0"],
        "cat_3": ["260.0", "\x10nan", "nope"],
    }
    rows = [{name: text} for name, texts in bad.items() for text in texts]
    path.write_text(as_csv(*rows))
    layout = detect_layout("", 1, ",".join(COLUMN_NAMES).encode())
    for block_bytes in (11, 1 << 20):
        *_, malformed, examples = read_all(path, block_bytes=block_bytes)
        assert malformed == len(rows)
        assert [e.reason for e in examples] == [
            why_malformed(line(n, ",", **row).encode(), layout) for n, row in enumerate(rows)
        ]
    assert examples[0].reason == "int_0 is '12.5', not an integer"
    path.write_text(
        "".join(line(n, ",", int_0=text) + "\n" for n, text in enumerate(("1", "260.0", "NaN")))
    )
    assert read_all(path)[4] == 2, "without a header"


def test_headers_that_do_not_fit(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(
        "\n"
        + ",".join(name for name in COLUMN_NAMES if name not in ("int_3", "cat_25"))
        + "\n1,2\n"
    )
    with pytest.raises(DataError) as caught:
        read_all(path)
    lacks = (
        f"{path}:2: the header lacks 2 of 40 columns: int_3, cat_25; for a file of other columns"
    )
    assert str(caught.value).startswith(lacks)
    path.write_text("userId,movieId,rating\n1,2,3.5\n")
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert str(caught.value) == (
        f"{path}:1: 3 fields between commas, and no header of Criteo's 40 columns; for a file of "
        "other columns type ecrm schema FILE > schema.toml, then "
        "ecrm prepare table FILE --schema schema.toml --output DIR"
    )
    path.write_text(",".join((*COLUMN_NAMES, "I4")) + "\n")
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert str(caught.value) == f"{path}:1: the header names int_3 twice: 'int_3', 'I4'"


def test_commas_without_a_header(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(line(n, ",") + "\n" for n in range(3)))
    labels, *_, malformed, _ = read_all(path)
    assert labels.tolist() == [0, 1, 0] and malformed == 0


@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_overlong_lines_are_one_malformed_line_each(tmp_path, block_bytes):
    path = tmp_path / "train.txt"
    path.write_text(
        "\n".join(
            [
                line(1),
                "x" * (3 * MAX_LINE_BYTES),
                line(2),
                "y" * (MAX_LINE_BYTES + 1),
                line(3),
                line(label="3"),
            ]
        )
    )
    labels, *_, malformed, examples = read_all(path, block_bytes=block_bytes)
    assert labels.tolist() == [1, 0, 1] and malformed == 3
    reason = f"the line is longer than {MAX_LINE_BYTES} bytes"
    assert [(e.line, e.reason) for e in examples] == [
        (2, reason),
        (4, reason),
        (6, "label is '3', not 0 or 1"),
    ]


def peak_bytes(path, block_bytes) -> int:
    tracemalloc.start()
    try:
        for _ in read_criteo(str(path), block_bytes=block_bytes):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_block_not_the_file(tmp_path):
    text = "".join(line(n) + "\n" for n in range(1000)).encode()
    small, large, single = tmp_path / "small", tmp_path / "large", tmp_path / "single"
    small.write_bytes(text)
    large.write_bytes(text * 40)
    single.write_bytes(b"x" * len(text) * 40)  # one line without an end
    peak = peak_bytes(small, 1 << 16)
    assert large.stat().st_size > 8 * peak
    assert peak_bytes(large, 1 << 16) < 1.2 * peak
    assert peak_bytes(single, 1 << 16) < 1.2 * peak


def test_real_terabyte_rows():
    if not TERABYTE_HEAD.exists():
        pytest.skip(
            f"{TERABYTE_HEAD} is not there: the Criteo rows are never copied into the project"
        )
    *arrays, malformed, _ = read_all(TERABYTE_HEAD, block_bytes=100_000)
    rows, problems = reference(gzip.decompress(TERABYTE_HEAD.read_bytes()))
    assert malformed == 0 and not problems
    assert as_lists(*arrays) == rows and len(rows) == 10_000
    assert arrays[0].mean() == 0.0265
