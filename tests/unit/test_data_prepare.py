"""Prepared datasets: their content, and that one is never half there."""

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ecrm.base import atomic_files
from ecrm.base.console import Progress
from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.cli.data import parse_hash_sizes
from ecrm.data import malformed
from ecrm.data import prepare as module
from ecrm.data.criteo import read_criteo
from ecrm.data.generate import generate_criteo
from ecrm.data.hashing import mix64
from ecrm.data.layout import COLUMN_NAMES
from ecrm.data.prepare import (
    DEFAULT_HASH_SIZES,
    check_hash_sizes,
    order_warning,
    prepare,
    transform_integers,
)
from support.paths import ROOT, TERABYTE_HEAD


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 2,000 generated rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.txt"
    generate_criteo(2000, 11, str(path))
    return path


def arrays(directory):
    """(labels, dense, sparse) of a dataset, read without the project."""
    return (
        np.fromfile(directory / "labels.bin", np.uint8),
        np.fromfile(directory / "dense.bin", "<f4").reshape(-1, 13),
        np.fromfile(directory / "sparse.bin", "<i4").reshape(-1, 26),
    )


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def splitmix64(value: int) -> int:
    """The documented formula in Python integers."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix64_is_the_published_one():
    # first output of the reference implementation from state 0
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    values = np.array([0, 1, 0xFFFFFFFF, 2**63, 2**64 - 1], np.uint64)
    assert mix64(values).tolist() == [splitmix64(int(v)) for v in values]


def test_content_is_the_documented_transform_of_each_row(rows, tmp_path):
    sizes = [2 + 37 * i for i in range(26)]
    manifest = prepare([str(rows)], str(tmp_path / "out"), sizes, block_bytes=50_000)
    labels, dense, sparse = arrays(tmp_path / "out")
    lines = [text.split("\t") for text in rows.read_text().splitlines()]
    assert labels.tolist() == [int(f[0]) for f in lines]
    expected = [[np.log(max(int(x or 0), -2) + 3) for x in f[1:14]] for f in lines]
    assert np.allclose(dense, expected, rtol=1e-6, atol=0)
    assert sparse.tolist() == [
        [
            1 + splitmix64(int(x, 16)) % (size - 1) if x else 0
            for x, size in zip(f[14:], sizes, strict=True)
        ]
        for f in lines
    ]
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rows"] == 2000 and manifest["clicks"] == labels.sum()
    assert manifest["tables"] == {f"t_cat_{i}": size for i, size in enumerate(sizes)}
    assert manifest["missing"] == {
        name: sum(not f[i] for f in lines) for i, name in enumerate(COLUMN_NAMES) if i
    }
    assert manifest["sources"] == [
        {"name": str(rows), "bytes": rows.stat().st_size, "rows": 2000, "malformed": 0}
    ]
    for name, record in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert record["bytes"] == len(data) and record["sha256"] == hashlib.sha256(data).hexdigest()


def test_integers_below_minus_two_and_huge_ones():
    dense = transform_integers(np.array([[-(10**17), -3, -2, -1, 0, 10**17]]))
    assert dense.dtype == np.float32
    assert np.allclose(dense[0], [0, 0, 0, np.log(2), np.log(3), np.log(1e17)], rtol=1e-6)


def test_a_row_comes_out_the_same_whatever_file_it_stands_in(rows, tmp_path):
    lines = rows.read_bytes().splitlines(keepends=True)
    first, second = tmp_path / "first", tmp_path / "second.gz"
    first.write_bytes(b"".join(lines[:777]))
    # Extreme neighbours, which a transform fitted to the file would notice.
    extreme = b"1" + b"\t99999999" * 13 + b"\t" * 26 + b"\n"
    second.write_bytes(gzip.compress(extreme + b"".join(lines[777:])))
    prepare([str(rows)], str(tmp_path / "whole"))
    prepare([str(first), str(second)], str(tmp_path / "parts"), block_bytes=999)
    for whole, parts in zip(arrays(tmp_path / "whole"), arrays(tmp_path / "parts"), strict=True):
        assert np.array_equal(whole, np.delete(parts, 777, axis=0))


def test_the_same_input_gives_the_same_dataset_whatever_blocks_and_threads(rows, tmp_path):
    dirty = tmp_path / "dirty"
    lines = rows.read_text().splitlines()
    dirty.write_text("\n".join([*lines[:900], "bad", "", *lines[900:1500], "worse"]))
    inputs = [str(rows), str(dirty)]
    prepare(inputs, str(tmp_path / "a"), threads=1)
    prepare(inputs, str(tmp_path / "b"), block_bytes=4321, threads=3)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert b"dirty:901: 1 columns instead of 40" in tree(tmp_path / "a")["malformed.txt"]
    with pytest.raises(UsageError, match="--threads 0: type at least 1"):
        prepare(inputs, str(tmp_path / "c"), threads=0)


def test_default_hash_sizes_leave_room_for_both_published_sets():
    assert (
        len(DEFAULT_HASH_SIZES) == 26
        and min(DEFAULT_HASH_SIZES) == 1000
        and max(DEFAULT_HASH_SIZES) == 2_000_000
    )
    assert (
        DEFAULT_HASH_SIZES[8] == 1000
        and DEFAULT_HASH_SIZES[2] == 2_000_000
        and DEFAULT_HASH_SIZES[6] == 8 * 12517
    )


@pytest.mark.parametrize("sizes", [0, 1, 2**31, [10] * 25, [10] * 25 + [1]])
def test_hash_sizes_out_of_range_are_refused_before_anything_is_written(rows, tmp_path, sizes):
    with pytest.raises(UsageError, match="hash size"):
        prepare([str(rows)], str(tmp_path / "new" / "out"), sizes)
    assert not any(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_malformed_lines_are_counted_and_the_first_twenty_shown(rows, tmp_path):
    lines = rows.read_text().splitlines()[:60]
    for i in range(5, 50, 2):
        lines[i] = "broken"
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("\n".join(lines))
    two.write_text("\n".join([lines[0], "broken", lines[2]]))
    out = io.StringIO()
    progress = Progress("prepare", out)
    inputs = [str(one), str(two)]
    manifest = prepare(
        inputs, str(tmp_path / "out"), progress=progress, block_bytes=2000, max_malformed=1
    )
    assert [(s["rows"], s["malformed"]) for s in manifest["sources"]] == [(37, 23), (2, 1)]
    assert manifest["rows"] == 39
    printed = out.getvalue().splitlines()
    assert printed == [
        f"skipped {one}:{i + 1}: 1 columns instead of 40" for i in range(5, 45, 2)
    ] + [
        f"{one}: 23 malformed lines skipped, 37 rows read",
        f"{two}: 1 malformed line skipped, 2 rows read",
    ]
    named = [f"{one}:{i + 1}: 1 columns instead of 40\n" for i in range(5, 50, 2)] + [
        f"{two}:2: 1 columns instead of 40\n"
    ]
    assert (tmp_path / "out" / "malformed.txt").read_text() == "".join(named)
    prepare([str(rows)], str(tmp_path / "out"), force=True)
    assert not (tmp_path / "out" / "malformed.txt").exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_too_malformed_is_refused(rows, tmp_path, compressed):
    lines = rows.read_text().splitlines()[:1000]
    for i in range(5, 75, 7):
        lines[i] = "broken"
    lines[10] += "0123456789"
    path = tmp_path / "rows.txt"
    path.write_bytes((gzip.compress if compressed else bytes)("\n".join(lines).encode()))
    with pytest.raises(DataError) as caught:
        prepare([str(rows), str(path)], str(tmp_path / "out"), block_bytes=2000)
    said = str(caught.value)
    assert said.startswith(f"{path}: 11 of 1,000 lines (1.10%) are malformed, ")
    assert (
        "--max-malformed is 0.01, so nothing was written; line 6: 1 columns instead of 40; line "
        "11: cat_25 is '" in said
    )
    assert "; line 13: 1 columns instead of 40; and so on; " in said
    assert said.endswith("; correct the file, or type --max-malformed 1 to skip all such lines")
    assert os.listdir(tmp_path) == ["rows.txt"]
    for allowed in (0.011, 1):  # as advised, and just enough
        prepare([str(rows), str(path)], str(tmp_path / "out"), force=True, max_malformed=allowed)
    path.write_text("\n".join(lines[6:]))
    prepare([str(path)], str(tmp_path / "out"), force=True, max_malformed=10 / 994)


def test_a_long_file_is_refused_before_its_end(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(module.dataset_info, "JUDGED_LINES", 1500)
    path = tmp_path / "rows.txt"
    path.write_text("broken\n" * 30 + rows.read_text() * 10)  # 0.15 % of all
    with pytest.raises(DataError, match=r"rows.txt: 30 of the first 1,5\d\d lines \(1\.\d\d%\)"):
        prepare([str(path)], str(tmp_path / "out"), block_bytes=2000)
    monkeypatch.setattr(module.dataset_info, "JUDGED_LINES", 4000)
    prepare([str(path)], str(tmp_path / "out"), block_bytes=2000)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(rows, tmp_path, share):
    with pytest.raises(UsageError, match="type a share, from 0 to 1"):
        prepare([str(rows)], str(tmp_path / "out"), max_malformed=share)
    assert not any(tmp_path.iterdir())


def test_the_list_of_malformed_lines_is_bounded(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(malformed, "MALFORMED_BYTES", 1000)
    lines = tmp_path / "lines"
    lines.write_text("broken\n" * 5000 + rows.read_text())
    prepare([str(lines)], str(tmp_path / "out"), block_bytes=2000, max_malformed=1)
    *named, last = (tmp_path / "out" / "malformed.txt").read_text().splitlines()
    assert sum(len(line) + 1 for line in named[:-1]) < 1000 <= sum(len(line) + 1 for line in named)
    assert named == [f"{lines}:{i + 1}: 1 columns instead of 40" for i in range(len(named))]
    assert last == f"and {5000 - len(named):,} more"


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["day_0", "day_1", "day_10", "day_2"], "day_10 comes before day_2"),
        (["d/day_10.gz", "e/day_9.gz"], "d/day_10.gz comes before e/day_9.gz"),
        (["day_0", "day_1", "day_10"], None),
        (["train.txt", "day_3", "extra", "day_4"], None),
    ],
)
def test_days_out_of_order_are_told(names, first):
    warning = order_warning(names)
    assert (
        warning is None
        if first is None
        else warning.startswith(f"{first}: ") and "day_{0..23}" in warning
    )


def test_days_out_of_order_are_told_once_while_preparing(rows, tmp_path):
    for day in (2, 10):
        (tmp_path / f"day_{day}").write_bytes(rows.read_bytes())
    out = io.StringIO()
    prepare(
        [str(tmp_path / "day_10"), str(tmp_path / "day_2")],
        str(tmp_path / "out"),
        progress=Progress("prepare", out),
    )
    assert out.getvalue().startswith("ecrm: warning: ") and out.getvalue().count("\n") == 1


def test_what_the_terabyte_config_says_to_type_can_be_typed():
    text = (ROOT / "configs" / "criteo-terabyte.toml").read_text()
    command = text[text.index("--hash-sizes") : text.index("# (eight")]
    sizes = check_hash_sizes(
        parse_hash_sizes("".join(filter(set("0123456789,").__contains__, command)))
    )
    assert max(sizes) == 40_000_000 and min(sizes) == 1000


def test_strict_stops_and_leaves_nothing(rows, tmp_path):
    bad = tmp_path / "bad"
    bad.write_text(rows.read_text() + "broken\n")
    with pytest.raises(DataError) as caught:
        prepare([str(rows), str(bad)], str(tmp_path / "out"), strict=True)
    assert str(caught.value) == f"{bad}:2001: 1 columns instead of 40"
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_failures_leave_nothing(rows, tmp_path):
    truncated, nothing, broken = tmp_path / "day.gz", tmp_path / "nothing", tmp_path / "broken"
    truncated.write_bytes(gzip.compress(rows.read_bytes())[:-100])
    nothing.write_text("broken\n")
    broken.write_text(rows.read_text() + "broken\n" * 21)
    before = tree(tmp_path)
    for inputs, error, words in (
        ([rows, truncated], DataError, "truncated"),
        ([nothing], DataError, r"no well-formed row \(1 malformed\)"),
        ([rows, broken], DataError, r"broken: 21 of 2,021 lines \(1\.04%\) are malformed"),
        ([rows, tmp_path / "absent"], UsageError, "absent: No such file"),
        ([tmp_path], UsageError, "is a directory"),
        ([], UsageError, "at least one input"),
    ):
        allowed = 1 if nothing in inputs else 0.01
        with pytest.raises(error, match=words):
            prepare([str(p) for p in inputs], str(tmp_path / "out"), max_malformed=allowed)
        assert tree(tmp_path) == before and not (tmp_path / "out").exists()


def test_what_may_be_replaced(rows, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare([str(rows)], str(out), 100)  # an empty directory may
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="already holds a prepared dataset; --force replaces it"):
        prepare([str(rows)], str(out), 200)
    assert tree(tmp_path) == before
    prepare([str(rows)], str(out), 200, force=True)
    assert json.loads((out / "manifest.json").read_text())["tables"]["t_cat_0"] == 200
    assert set(os.listdir(tmp_path)) == {"out"}

    (out / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"not a dataset made by prepare \(it holds notes.txt\)"):
        prepare([str(rows)], str(out), force=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not a directory"):
        prepare([str(rows)], str(tmp_path / "file"), force=True)
    with pytest.raises(UsageError, match="cannot be written: .*file is not a directory"):
        prepare([str(rows)], str(tmp_path / "file" / "out"))
    assert tree(tmp_path) == before | {"file": b"mine"}


def test_force_that_fails_keeps_the_old_dataset(rows, tmp_path):
    prepare([str(rows)], str(tmp_path / "out"), 100)
    before = tree(tmp_path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(rows.read_bytes())[:-100])
    with pytest.raises(DataError):
        prepare([str(tmp_path / "cut.gz")], str(tmp_path / "out"), force=True)
    (tmp_path / "cut.gz").unlink()
    assert tree(tmp_path) == before


def test_a_kill_between_the_two_renames_of_force_loses_neither(rows, tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare([str(rows)], str(out), 100)
    before = tree(out)
    rename = Path.rename

    class Killed(BaseException):
        pass

    def die_at_the_second(self, target):
        if self.name == ".out.preparing":
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die_at_the_second)
    with pytest.raises(Killed):
        prepare([str(rows)], str(out), 200, force=True)
    monkeypatch.undo()
    assert not out.exists()
    with pytest.raises(UsageError, match="already holds"):
        prepare([str(rows)], str(out), 200)
    assert tree(out) == before and os.listdir(tmp_path) == ["out"]


PREPARE = (
    "import sys; from ecrm.data.prepare import prepare; "
    "prepare([sys.argv[1]], sys.argv[2], block_bytes=1 << 14)"
)


def test_kill_in_the_middle_leaves_no_dataset_and_the_next_call_clears_up(rows, tmp_path):
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    process = subprocess.Popen([sys.executable, "-c", PREPARE, str(pipe), str(out)], cwd=ROOT)
    try:
        with open(pipe, "wb") as feed:
            feed.write(rows.read_bytes())
            feed.flush()
            deadline = time.monotonic() + 30
            written = tmp_path / ".out.preparing" / "sparse.bin"
            while not (written.exists() and written.stat().st_size > 0):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            with pytest.raises(UsageError, match="another process is writing it"):
                prepare([str(rows)], str(out))
            assert written.exists()
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        process.kill()
        process.wait()
    assert not out.exists() and written.exists()
    prepare([str(rows)], str(out))
    assert set(os.listdir(tmp_path)) == {"pipe", "out"}
    assert set(os.listdir(out)) == {"labels.bin", "dense.bin", "sparse.bin", "manifest.json"}


LIMITED = """
import resource, sys
from ecrm.data.prepare import prepare
from ecrm.data.generate import generate_criteo
from ecrm.base.errors import EcrmError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for call in (
    lambda: prepare([sys.argv[1]], sys.argv[2]),
    lambda: generate_criteo(2000, 1, sys.argv[2]),
):
    try:
        call()
    except EcrmError as error:
        print(error.exit_code, error)
"""


def test_no_room_left_is_one_line_and_leaves_nothing(rows, tmp_path):
    # A limit on file size fails in the same place as a full disk, in a write, and needs no disk of
    # its own.
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(rows), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout.splitlines()
        == [f"1 {out}: cannot be written, nothing was changed there: File too large"] * 2
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "number, error",
    [(errno.ENOSPC, EcrmError), (errno.EACCES, UsageError), (errno.EROFS, UsageError)],
)
def test_write_errors_tell_whose_fault_it_is(tmp_path, number, error):
    with (
        pytest.raises(EcrmError) as caught,
        atomic_files.staged_directory(tmp_path / "out", lambda: None),
    ):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is error and os.strerror(number) in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_file(rows, tmp_path):
    large = tmp_path / "large"
    large.write_bytes(rows.read_bytes() * 20)
    prepare([str(rows)], str(tmp_path / "warm"))
    peaks = []
    for path in (rows, large):
        tracemalloc.start()
        prepare([str(path)], str(tmp_path / f"out {path.name}"), block_bytes=1 << 16, threads=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] and large.stat().st_size > 5 * peaks[1]


RESIDENT = """
import resource, sys
from ecrm.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare([sys.argv[3]], sys.argv[4])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_resident_memory_does_not_grow_with_the_file(rows, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(rows.read_bytes() * 8)  # some full blocks
    large.write_bytes(rows.read_bytes() * 80)
    arguments = [str(small), str(tmp_path / "a"), str(large), str(tmp_path / "b")]
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < large.stat().st_size / 4


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def test_progress_is_a_line_every_five_seconds_without_a_terminal():
    clock, out = Clock(), io.StringIO()
    with Progress("prepare", out, clock) as progress:
        for second in range(12):
            clock.seconds = float(second)
            progress.update(second * 1000, f"{second:.1f} MB", second / 100)
    assert out.getvalue() == (
        "prepare: 5%  ETA 1m35s  5,000 rows  5.0 MB  1,000 rows/s\n"
        "prepare: 10%  ETA 1m30s  10,000 rows  10.0 MB  1,000 rows/s\n"
    )


def test_progress_is_one_refreshed_line_on_a_terminal():
    clock, out = Clock(), Terminal()
    with Progress("prepare", out, clock) as progress:
        for second in (1, 2):
            clock.seconds = float(second)
            progress.update(second, "0.0 MB", None)
        progress.note("skipped x")
        clock.seconds = 10.0
        progress.update(10_000_000, "0.0 MB", 0.0005)
    text = out.getvalue()
    assert text.startswith(
        "\rprepare: 1 rows  0.0 MB  1 rows/s\rprepare: 2 rows  0.0 MB  1 rows/s\r"
    )
    assert "\rskipped x\n" in text and "ETA 5h33m" in text
    assert text.endswith(" \r") and text.count("\n") == 1


def test_a_progress_line_is_no_wider_than_its_terminal():
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    clock = Clock()
    with open(writing, "w") as terminal, Progress("prepare", terminal, clock) as progress:
        clock.seconds = 10.0
        progress.update(10_000_000, "0.0 MB", 0.5)
        assert os.read(reading, 1000) == b"\rprepare: 50%  ETA 10s  10,000"
    assert os.read(reading, 1000) == b"\r" + b" " * 29 + b"\r"
    os.close(reading)


def test_real_terabyte_rows(tmp_path):
    if not TERABYTE_HEAD.exists():
        pytest.skip(
            f"{TERABYTE_HEAD} is not there: the Criteo rows are never copied into the project"
        )
    manifest = prepare([str(TERABYTE_HEAD)], str(tmp_path / "out"))
    assert (manifest["rows"], manifest["clicks"], manifest["sources"][0]["malformed"]) == (
        10_000,
        265,
        0,
    )
    blocks = list(read_criteo(str(TERABYTE_HEAD)))
    categories = np.concatenate([b.categories for b in blocks])
    _, _, sparse = arrays(tmp_path / "out")
    assert (sparse >= 0).all() and (sparse < DEFAULT_HASH_SIZES).all()
    for column in range(26):
        distinct, used = (len(np.unique(a[:, column])) for a in (categories, sparse))
        # the default sizes keep nearly all values apart
        assert distinct - used <= 1 + distinct / 20
