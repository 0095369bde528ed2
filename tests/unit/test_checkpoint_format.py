"""Checkpoint files: a cut at any call or byte leaves the newest complete one; damage is named."""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from ecrm.base.errors import DataError, UsageError
from ecrm.checkpoint import disk, row_file
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find, locate, name_of
from ecrm.checkpoint.manifest import DENSE, Manifest
from ecrm.checkpoint.row_file import SummedFile, most_pieces, read_rows, write_rows

BYTES, ROWS = 12, 500


class Cut(BaseException):
    """The process dies here."""


class CuttingDisk(Disk):
    """A disk that fails at its `calls`-th call or within the `at_byte`-th byte written.

    A power cut also loses what was not synced.
    """

    def __init__(self, calls: int | None = None, at_byte: int | None = None) -> None:
        self.calls, self.at_byte = calls, at_byte
        self.made = self.written = 0
        self.open: dict[object, Path] = {}
        # not synced: (folder, old name or None, name)
        self.names: list[tuple[Path, Path | None, Path]] = []

    def _call(self) -> None:
        if self.calls is not None and self.made == self.calls:
            raise Cut
        self.made += 1

    def make_folder(self, path, parents=True):
        self._call()
        super().make_folder(path, parents)

    def create(self, path):
        self._call()
        file = super().create(path)
        self.open[file] = path
        self.names.append((path.parent, None, path))
        return file

    def write(self, file, data):
        self._call()
        if self.at_byte is not None and self.written + len(data) > self.at_byte:
            super().write(file, memoryview(data).cast("B")[: self.at_byte - self.written])
            raise Cut
        self.written += len(data)
        super().write(file, data)

    def close(self, file):
        self._call()
        file.close()  # the order of calls is what is tested, not the disk
        del self.open[file]

    def rename(self, old, new):
        self._call()
        super().rename(old, new)
        self.names.append((new.parent, old, new))

    def sync_folder(self, path):
        self._call()
        self.names = [entry for entry in self.names if entry[0] != path]

    def remove(self, file):
        self._call()
        super().remove(file)

    def remove_folder(self, path):
        self._call()
        super().remove_folder(path)

    def lose_power(self, draw: random.Random) -> None:
        """What was not synced may be lost: bytes of open files, and names given."""
        for path in self.open.values():
            if path.exists():
                with open(path, "r+b") as file:
                    file.truncate(draw.randint(0, path.stat().st_size))
        for _, old, new in reversed(self.names):
            if new.exists() and draw.random() < 0.5:
                if old is not None:
                    new.rename(old)
                elif new.is_file():
                    new.unlink()


@functools.cache
def state_of(step: int) -> dict[int, bytes]:
    """Every row's record after a step: some rows change in each."""
    records: dict[int, bytes] = {}
    for s in range(10, step + 1, 10):
        draw = np.random.default_rng(s)
        for row in draw.choice(ROWS, 40, replace=False).tolist():
            records[row] = draw.bytes(BYTES)
    return records


def write(folder: CheckpointFolder, step: int, base: Manifest | None) -> Manifest:
    """Write and publish the checkpoint of a step, adding to `base`."""
    before = state_of(base.step) if base else {}
    changed = sorted(row for row, record in state_of(step).items() if before.get(row) != record)
    draft, files = folder.draft(step), []
    for part in range(2):
        mine = changed[part::2]
        windows = [
            (
                np.array(mine[i : i + 16]),
                np.frombuffer(
                    b"".join(state_of(step)[r] for r in mine[i : i + 16]), np.uint8
                ).reshape(-1, BYTES),
            )
            for i in range(0, len(mine), 16)
        ]
        files.append(write_rows(folder.disk, draft / f"rows-{part}.bin", 0, windows))
    with SummedFile(folder.disk, draft / DENSE) as dense:
        dense.write(step.to_bytes(8, "little"))
    files.append({"name": DENSE, "space": -1, "bytes": dense.bytes, "crc32": dense.checksum})
    link = {"step": base.step, "checksum": base.checksum} if base else None
    manifest = Manifest(
        step, {"train.seed": 7}, link, base.chain + 1 if base else 0, [BYTES], [ROWS], files, []
    )
    folder.publish(manifest)
    return manifest


def read(checkpoint: Checkpoint) -> dict[int, bytes]:
    """All rows of a checkpoint and of those it adds to, every file checked."""
    records: dict[int, bytes] = {}
    for link in checkpoint.chain:
        for entry in link.manifest.files:
            link.check(entry)
        for entry in link.manifest.row_files:
            for numbers, part in read_rows(link.path / entry["name"], BYTES, ROWS):
                records |= {
                    number: row.tobytes()
                    for number, row in zip(numbers.tolist(), part, strict=True)
                }
    return records


STEPS = (10, 20, 30, 40, 50)


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of some hundred bytes are written in several calls."""
    monkeypatch.setattr(row_file, "PIECE", 192)
    monkeypatch.setattr(row_file, "BLOCK", 64)


def run(path: Path, disk: Disk, done: list[int]) -> None:
    """Writes five checkpoints (full, incr., incr., full, incr.) and keeps two.

    `done` receives the steps of the checkpoints that count.
    """
    folder, base = CheckpointFolder(path, disk), None
    for step in STEPS:
        base = write(folder, step, base if step not in (10, 40) else None)
        done.append(step)
        folder.prune(keep=2)


def newest(path: Path) -> int:
    """Returns the newest complete checkpoint's step, or 0 if there is none.

    All complete checkpoints are read and compared with what was written.
    """
    whole, _ = find(path)
    for checkpoint in whole:
        assert read(checkpoint) == state_of(checkpoint.step)
    return whole[0].step if whole else 0


@pytest.mark.parametrize("power", [False, True])
def test_a_cut_at_any_call_leaves_the_newest_complete_one(tmp_path, power, small_pieces):
    counting = CuttingDisk()
    run(tmp_path / "whole", counting, [])
    assert newest(tmp_path / "whole") == 50 and counting.made > 130
    for calls in range(counting.made):
        disk, done, path = CuttingDisk(calls=calls), [], tmp_path / "cut"
        with pytest.raises(Cut):
            run(path, disk, done)
        if power:
            disk.lose_power(random.Random(calls))
        left = newest(path)
        assert left >= (done[-1] if done else 0), (calls, done)
        redone: list[int] = []
        run(path, CuttingDisk(), redone)  # and the same folder serves the run that starts again
        assert newest(path) == 50
        shutil.rmtree(path)


def test_the_real_disk_syncs_files_and_the_manifest_before_their_names(tmp_path, monkeypatch):
    said: list[tuple[object, ...]] = []
    sync, rename = os.fsync, os.replace

    def syncing(descriptor):
        said.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def renaming(old, new):
        said.append(("rename", Path(old), Path(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", renaming)
    folder = tmp_path / "checkpoints"
    write(CheckpointFolder(folder), 10, None)
    draft, final = folder / f".{name_of(10)}", folder / name_of(10)
    assert set(said[:3]) == {("sync", draft / name) for name in ("rows-0.bin", "rows-1.bin", DENSE)}
    assert said[3:] == [
        ("sync", draft / "manifest.json"),
        ("sync", draft),
        ("rename", draft, final),
        ("sync", folder),
        ("sync", tmp_path),
    ]


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_a_file_is_read_in_pieces_of_no_more_than_the_bytes_allowed(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(row_file, "READ_BYTES", at_once * BYTES + 5)
    numbers = np.arange(40, dtype="<i8")
    records = np.random.default_rng(1).integers(0, 255, (40, BYTES), dtype=np.uint8)
    file = tmp_path / "rows.bin"
    windows = [(numbers[a:b], records[a:b]) for a, b in ((0, 3), (3, 3), (3, 24), (24, 40))]
    entry = write_rows(Disk(), file, 0, windows)
    pieces = list(read_rows(file, BYTES, ROWS))
    assert np.array_equal(np.concatenate([rows for rows, _ in pieces]), numbers)
    assert np.array_equal(np.concatenate([part for _, part in pieces]), records)
    sizes = [len(part) for rows, part in pieces]
    wanted = [min(at_once, n - at) for n in (3, 21, 16) for at in range(0, n, at_once)]
    assert sizes == wanted and len(pieces) <= most_pieces(entry, BYTES)
    file.write_bytes(file.read_bytes()[:-1])
    found = []
    with pytest.raises(DataError, match="cut off in a frame of 16 rows"):
        found.extend(read_rows(file, BYTES, ROWS))
    file.write_bytes(file.read_bytes()[: -16 * BYTES - 1])
    with pytest.raises(DataError, match="cut off in a frame of 16 rows"):
        found.extend(read_rows(file, BYTES, ROWS))


def test_a_record_larger_than_a_piece_is_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(row_file, "READ_BYTES", BYTES // 2)
    records = np.arange(3 * BYTES, dtype=np.uint8).reshape(3, BYTES)
    window = (np.arange(3, dtype="<i8"), records)
    entry = write_rows(Disk(), tmp_path / "rows.bin", 0, [window])
    pieces = list(read_rows(tmp_path / "rows.bin", BYTES, ROWS))
    assert [part.tolist() for _, part in pieces] == [[row.tolist()] for row in records]
    assert len(pieces) <= most_pieces(entry, BYTES)


def test_a_cut_at_any_byte_leaves_the_newest_complete_one(tmp_path, small_pieces):
    counting = CuttingDisk()
    run(tmp_path / "whole", counting, [])
    draw = random.Random(0)
    for at in sorted(draw.sample(range(counting.written), 150)):
        disk, done, path = CuttingDisk(at_byte=at), [], tmp_path / "cut"
        with pytest.raises(Cut):
            run(path, disk, done)
        assert newest(path) == (done[-1] if done else 0), at
        shutil.rmtree(path)


@pytest.mark.parametrize("page_cache", ["passed by", "at opening", "at writing"])
def test_a_file_is_the_same_whether_the_page_cache_is_passed_by_or_not(
    tmp_path, monkeypatch, page_cache
):
    """A file system may refuse to pass it by when a file is opened, or when it is written."""
    direct = []

    def opening(path: str, flags: int) -> int:
        if page_cache == "at opening":
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, flags | (0 if page_cache == "at writing" else os.O_DIRECT), 0o666)

    class Refusing(io.FileIO):
        def write(self, data):
            flags = fcntl.fcntl(self, fcntl.F_GETFL)
            direct.append(bool(flags & os.O_DIRECT))
            if page_cache == "at writing" and direct == [True]:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().write(data)

    monkeypatch.setattr(disk, "_past_the_page_cache", opening)
    monkeypatch.setattr(
        disk,
        "open",
        lambda path, mode, buffering, **more: Refusing(path, mode, **more),
        raising=False,
    )
    for size in (
        0,
        1,
        row_file.PIECE - 1,
        row_file.PIECE,
        row_file.PIECE + 1,
        3 * row_file.PIECE,
        3 * row_file.PIECE + 5000,
    ):
        data = np.random.default_rng(size).bytes(size)
        with SummedFile(Disk(), tmp_path / "file") as file:
            for first in range(0, size, 700_001):
                file.write(data[first : first + 700_001])
        assert (tmp_path / "file").read_bytes() == data
        assert (file.bytes, file.checksum) == (size, zlib.crc32(data))
    assert any(direct) == (page_cache == "passed by")


def test_keep_leaves_what_the_newest_need_and_no_drafts(tmp_path):
    run(tmp_path, Disk(), [])
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == [name_of(40), name_of(50)]


def test_any_flipped_bit_is_refused_by_name(tmp_path):
    done: list[int] = []
    run(tmp_path, Disk(), done)
    draw, refused = random.Random(1), 0
    whole, _ = find(tmp_path)
    names = [
        whole[0].path / name
        for name in ("manifest.json", *(entry["name"] for entry in whole[0].manifest.files))
    ]
    for trial in range(150):
        file = names[trial % len(names)]
        data = file.read_bytes()
        bit = draw.randrange(len(data) * 8)
        file.write_bytes(
            data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        )
        try:
            # white space in the manifest says nothing
            assert read(Checkpoint.open(whole[0].path)) == state_of(50)
            assert file.name == "manifest.json"
        except (DataError, UsageError) as error:
            assert str(whole[0].path) in str(error) and "\n" not in str(error)
            refused += 1
        file.write_bytes(data)
    assert refused > 100
    assert newest(tmp_path) == 50


@pytest.mark.parametrize("what", ["truncated", "missing", "no manifest", "another base"])
def test_a_checkpoint_that_is_not_whole_is_refused_and_the_one_before_used(tmp_path, what):
    run(tmp_path, Disk(), [])
    last = tmp_path / name_of(50)
    file = last / "rows-0.bin"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "missing":
        file.unlink()
    elif what == "no manifest":
        (last / "manifest.json").unlink()
    else:
        write(
            CheckpointFolder(tmp_path),
            40,
            Checkpoint.open(tmp_path / name_of(40)).manifest.__class__(
                20, {}, None, 0, [], [], [], []
            ),
        )
    whole, refused = find(tmp_path)
    if what == "another base":  # and that one adds to a checkpoint that is gone
        assert whole == [] and len(refused) == 2
        return
    assert [checkpoint.step for checkpoint in whole] == [40]
    assert len(refused) == 1 and str(last) in refused[0] and "\n" not in refused[0]


def test_what_is_named_is_found_or_said_to_be_missing(tmp_path):
    run(tmp_path / "run" / "checkpoints", Disk(), [])
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert [checkpoint.step for checkpoint in locate(given)[0]] == [50, 40]
    assert [
        checkpoint.step for checkpoint in locate(tmp_path / "run" / "checkpoints" / name_of(40))[0]
    ] == [40]
    with pytest.raises(UsageError, match="there is no such folder"):
        locate(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        locate(tmp_path / "empty")
    for step in (40, 50):
        (tmp_path / "run" / "checkpoints" / name_of(step) / "manifest.json").unlink()
    with pytest.raises(DataError, match="no checkpoint is whole"):
        locate(tmp_path / "run")
