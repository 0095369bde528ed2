"""A full disk: one line, an exit code other than 0, no half-written files, in every format."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ecrm.base import atomic_files
from ecrm.base.errors import EcrmError
from ecrm.checkpoint.export import export
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, name_of
from ecrm.checkpoint.manifest import DENSE, Manifest
from ecrm.checkpoint.model_file import read_safetensors
from ecrm.checkpoint.row_file import SummedFile, write_rows
from ecrm.cli.commands import main
from ecrm.drill import drill_runs as drill_run
from ecrm.model.nested_state import packed
from support.commands import forked

ROWS, DIM = 3000, 16
IDENTITY = {
    "model.architecture": "dlrm",
    "model.bottom_mlp": [8, DIM],
    "model.top_mlp": [8, 1],
    "model.embedding_dim": DIM,
    "tables": {"a": ROWS, "b": 5},
    "train.seed": 1,
    "dense": "module",
}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A checkpoint of a model with two tables."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    draft, record = folder.draft(7), 4 * DIM + 8
    numbers = np.arange(40)
    rows = write_rows(
        folder.disk,
        draft / "rows-0.bin",
        0,
        [(numbers, np.ones((40, record // 4), np.float32).view(np.uint8))],
    )
    state = packed({"over_arch.model.1.weight": torch.full((1, 8), 2.0)})
    with SummedFile(folder.disk, draft / DENSE) as file:
        file.write(state.numpy().data)
    dense = {"name": DENSE, "space": -1, "bytes": file.bytes, "crc32": file.checksum}
    manifest = Manifest(
        7,
        IDENTITY,
        None,
        0,
        [record],
        [ROWS + 5],
        [rows, dense],
        [{"dtype": "uint8", "shape": [len(state)]}],
    )
    folder.publish(manifest)
    return folder.path / name_of(7)


def export_with_room_for(
    size: int, checkpoint: Path, form: str, output: Path
) -> subprocess.CompletedProcess:
    """`ecrm export` where no file may be larger: that fails where a full disk does."""
    words = ["export", str(checkpoint), "--format", form, "--output", str(output)]
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
        f"from ecrm.cli.commands import main; sys.exit(main({words!r}))"
    )
    return forked(["-c", program], timeout=120)


def test_both_formats_hold_the_same(tmp_path, made):
    for form in ("safetensors", "torchrec"):
        assert (
            main(["export", str(made), "--format", form, "--output", str(tmp_path / "new" / form)])
            == 0
        )
    plain = read_safetensors(tmp_path / "new" / "safetensors")
    state = torch.load(tmp_path / "new" / "torchrec", weights_only=True)
    assert state.keys() == plain.keys()
    assert all(np.array_equal(state[name].numpy(), array) for name, array in plain.items())
    table = plain["sparse_arch.embedding_bag_collection.embedding_bags.a.weight"]
    assert (table[:40] == 1).all() and (table[40:] != 1).all() and table.shape == (ROWS, DIM)
    assert sorted(os.listdir(tmp_path / "new")) == ["safetensors", "torchrec"]


@pytest.mark.parametrize("form", ["safetensors", "torchrec"])
@pytest.mark.parametrize("missing", [1, pytest.param(100_000, marks=pytest.mark.drill)])
def test_export_without_room_is_one_line_and_leaves_nothing(tmp_path, made, form, missing):
    """The last byte of the file, or nearly all of it, does not fit.

    For torchrec this is tried with its own file and with the file that it is made from.
    """
    whole, output = tmp_path / "whole", tmp_path / "new" / "model"
    output.parent.mkdir()
    for size_of in {form, "safetensors"}:
        assert main(["export", str(made), "--format", size_of, "--output", str(whole)]) == 0
        room = whole.stat().st_size - missing
        whole.unlink()
        done = export_with_room_for(room, made, form, output)
        assert (done.returncode, done.stderr) == (
            1,
            f"ecrm: error: {output}: cannot be written, nothing was changed there: File too "
            f"large\n",
        )
        assert done.stdout == "" and os.listdir(output.parent) == []


def test_a_page_that_cannot_be_had_is_an_error_before_it_is_written(tmp_path, made, monkeypatch):
    """A sparse file can be created on a full disk, but using its pages later kills the process."""

    def full(*words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with open(tmp_path / "model", "w+b") as file, pytest.raises(OSError):
        export(Checkpoint.open(made), "safetensors", file, tmp_path)
    with open(tmp_path / "model", "rb") as file:
        assert len(file.read()) < 4096, "no room was taken"


def test_what_a_drill_writes_is_whole_or_not_there(tmp_path, monkeypatch):
    names = ("headline", "throughput", "standalone", "page", "effective")
    for name in ("_facts", "to_dict", *names):
        given = "text" if name in names else {}
        monkeypatch.setattr(drill_run, name, lambda *words, given=given, **more: given)
    config = type("Config", (), {"to_dict": lambda self: {}})()
    report = type("Report", (), {"line": None, "unit": ""})()
    drill_run.write(report, tmp_path / "drill", config, "")
    assert sorted(os.listdir(tmp_path / "drill")) == ["drill.html", "drill.json", "timeline.svg"]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(
        EcrmError,
        match="drill.json: cannot be written, nothing was changed there: No space left on device",
    ):
        drill_run.write(report, tmp_path / "full", config, "")
    assert os.listdir(tmp_path / "full") == []
