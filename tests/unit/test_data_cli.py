"""The data commands as a user types them."""

import argparse
import json
import shutil
import subprocess
import sys

import pytest

from ecrm.base.errors import DataError, UsageError
from ecrm.cli.data import add_parsers
from support.paths import ROOT


def ecrm(*words) -> int:
    """Parse a command line and run it."""
    parser = argparse.ArgumentParser(prog="ecrm")
    add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(word) for word in words])
    return args.run(args)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.txt.gz"
    assert ecrm("generate", "criteo", "--rows", 300, "--seed", 4, "--output", path) == 0
    return path


def test_generate_then_prepare(rows, tmp_path, capsys):
    assert (
        ecrm("generate", "criteo", "--rows", 200, "--seed", 4, "--output", tmp_path / "more") == 0
    )
    generated = capsys.readouterr().out
    assert (
        generated.startswith(f"{tmp_path / 'more'}: 200 rows, ")
        and "the true probabilities reach AUC 0." in generated
    )
    copy = shutil.copy(rows, tmp_path / f"copy-{rows.name}")
    assert (
        ecrm("prepare", "criteo", rows, copy, "--output", tmp_path / "out", "--hash-size", 50) == 0
    )
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: 600 rows, ")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rows"] == 600 and set(manifest["tables"].values()) == {50}


def test_hash_sizes_force_and_strict(rows, tmp_path, capsys):
    out, sizes = tmp_path / "out", list(range(10, 36))
    assert (
        ecrm("prepare", "criteo", rows, "--output", out, "--hash-sizes", ",".join(map(str, sizes)))
        == 0
    )
    assert list(json.loads((out / "manifest.json").read_text())["tables"].values()) == sizes
    with pytest.raises(UsageError, match="--force"):
        ecrm("prepare", "criteo", rows, "--output", out)
    assert ecrm("prepare", "criteo", rows, "--output", out, "--force") == 0
    bad = tmp_path / "bad"
    bad.write_text("1\t2\n")
    with pytest.raises(DataError, match="bad:1: 2 columns instead of 40"):
        ecrm("prepare", "criteo", bad, "--output", tmp_path / "other", "--strict")
    with pytest.raises(DataError, match="bad: 1 of 1 lines .*; correct the file$"):
        ecrm("prepare", "criteo", bad, rows, "--output", tmp_path / "other")
    bad.write_text(bad.read_text() + "0" + "\t" * 39 + "\n")
    with pytest.raises(DataError, match="bad: 1 of 2 lines .* type --max-malformed 1 to skip"):
        ecrm("prepare", "criteo", bad, rows, "--output", tmp_path / "other")
    capsys.readouterr()
    words = ["prepare", "criteo", bad, rows, "--output", tmp_path / "other"]
    assert ecrm(*words, "--max-malformed", 1) == 0
    captured = capsys.readouterr()
    assert (
        f"skipped {bad}:1: 2 columns instead of 40" in captured.err
        and ", 1 malformed line skipped (named in malformed.txt), " in captured.out
    )


@pytest.mark.parametrize(
    "words",
    [["--hash-sizes", "1,2,x"], ["--hash-sizes", "10,20"], ["--hash-size", "1"]],
    ids=lambda words: " ".join(words),
)
def test_bad_sizes(rows, tmp_path, words):
    with pytest.raises(UsageError):
        ecrm("prepare", "criteo", rows, "--output", tmp_path / "out", *words)


def test_category_values_by_zipf(tmp_path, capsys):
    words = [
        "generate",
        "criteo",
        "--rows",
        300,
        "--seed",
        4,
        "--output",
        tmp_path / "rows",
        "--zipf",
        "1.05:1.2",
    ]
    assert ecrm(*words, "--values", 40) == 0
    values = {line.split("\t")[14] for line in (tmp_path / "rows").read_text().splitlines()}
    assert 20 < len(values) <= 40
    assert ecrm(*words) == 0
    assert (
        len({line.split("\t")[14] for line in (tmp_path / "rows").read_text().splitlines()}) > 100
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["--zipf", "1.1"], "two numbers"),
        (["--zipf", "a:b"], "two numbers"),
        (["--zipf", "1.2:1.1"], "must ascend"),
        (["--zipf", "1.1:1.2", "--values", "1"], "1 values of each column"),
        (["--values", "5"], "--values goes with --zipf"),
    ],
)
def test_laws_that_are_none(tmp_path, words, says):
    with pytest.raises(UsageError, match=says):
        ecrm("generate", "criteo", "--rows", 3, "--seed", 1, "--output", tmp_path / "rows", *words)
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    "words",
    [
        "prepare",
        "prepare criteo x",
        "generate criteo --rows x",
        "prepare criteo x --output y --hash-size 5 --hash-sizes 5",
    ],
)
def test_lines_that_do_not_parse(words):
    with pytest.raises(SystemExit) as caught:
        ecrm(*words.split())
    assert caught.value.code == 2


def test_help_needs_none_of_the_heavy_libraries():
    code = (
        "import sys, ecrm.cli.data; "
        "sys.exit(bool({'numpy', 'torch', 'pyarrow'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
