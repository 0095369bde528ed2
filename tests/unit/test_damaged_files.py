"""Models, datasets and checkpoints that are damaged, or made to harm, are one line of an error."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.base.errors import DataError, EcrmError
from ecrm.checkpoint.checksums import check_share
from ecrm.checkpoint.folder import locate
from ecrm.checkpoint.manifest import Manifest, as_a_run_writes, parse
from ecrm.checkpoint.model_file import ModelFile, as_array
from ecrm.checkpoint.saved_model import open_model
from ecrm.data.dataset import CriteoDataset
from support.seeds import some_and_more

STATE = {
    "a.weight": torch.arange(400.0).reshape(50, 8),
    "b": torch.tensor([1.0, 2.0, 3.0]),
    "c": torch.tensor(7),
    "d": torch.tensor([True]),
    "e": torch.arange(4).bfloat16(),
}


def saved(path: Path) -> bytes:
    if path.suffix == ".pt":
        torch.save(STATE, path)
    else:
        arrays = {name: as_array(tensor) for name, tensor in STATE.items()}
        shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        with path.open("w+b") as output:
            file = ModelFile("safetensors", output, path.parent, shapes, {})
            for name, array in arrays.items():
                file.arrays[name][...] = array
            file.finish()
            file.close()
    return path.read_bytes()


def damaged(data: bytes, head: int, draws: random.Random) -> bytes:
    """Cut, flipped, overwritten in its first `head` bytes, with bytes more or fewer."""
    found, kind, at = bytearray(data), draws.randrange(5), draws.randrange(len(data))
    if kind == 0:
        return bytes(found[:at])
    if kind == 1:
        for _ in range(draws.randrange(1, 4)):
            found[draws.randrange(len(found))] ^= 1 << draws.randrange(8)
    elif kind == 2:
        for _ in range(draws.randrange(1, 20)):
            found[draws.randrange(head)] = draws.randrange(256)
    elif kind == 3:
        found[at:at] = draws.randbytes(draws.randrange(1, 50))
    else:
        del found[at : at + draws.randrange(1, 60)]
    return bytes(found)


@pytest.mark.parametrize("seeds", some_and_more(250, 1500))
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_damaged_model_is_an_error_in_one_line(tmp_path, name, seeds):
    path = tmp_path / name
    data = saved(path)
    assert open_model(path)[0].keys() == STATE.keys()
    head = len(data) if path.suffix == ".pt" else 8 + struct.unpack("<Q", data[:8])[0]
    refused = 0
    for seed in seeds:
        path.write_bytes(damaged(data, head, random.Random(seed)))
        try:
            for tensor in open_model(path)[0].values():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    tensor.clone()
            check_share(path)
        except EcrmError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            refused += 1
    assert refused > 100


WRONG = [None, -1, 0, "x", "", [], {}, 1e99, float("nan"), True, 2**70, [1], {"a": 1}, "../x"]
GONE = object()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to what is in nested dicts and lists; the first three of a list."""
    if at:
        yield at
    parts = list(value.items()) if isinstance(value, dict) else []
    parts += list(enumerate(value[:3])) if isinstance(value, list) else []
    for key, part in parts:
        yield from places(part, (*at, key))


def with_one_wrong(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for at in places(manifest):
        for value in (*WRONG, GONE):
            changed = copy.deepcopy(manifest)
            inner = changed
            for key in at[:-1]:
                inner = inner[key]
            if value is GONE:
                del inner[at[-1]]
            else:
                inner[at[-1]] = value
            yield changed


def check(path: Path, manifests: Iterator[dict[str, Any]], use: Callable[[], object]) -> int:
    """How many manifests are refused, each in one line."""
    use()
    refused = 0
    for manifest in manifests:
        path.write_text(json.dumps(manifest))
        try:
            use()
        except EcrmError as error:
            assert "\n" not in str(error)
            refused += 1
    return refused


def test_a_datasets_manifest_that_says_what_cannot_be(tmp_path, criteo_rows):
    folder = tmp_path / "data"
    shutil.copytree(criteo_rows, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())

    def use() -> None:
        dataset = CriteoDataset.open(folder)
        dataset.train_batch(0, 5)
        dataset.eval_batch(0, 3)

    assert check(path, with_one_wrong(manifest), use) > 100


def with_its_checksum(fields: dict[str, Any]) -> dict[str, Any]:
    """As somebody writes it who wants it to be believed."""
    said = {key: value for key, value in fields.items() if key != "manifest_crc32"}
    if not said.get("evaluations"):
        said.pop("evaluations", None)
    said["manifest_crc32"] = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    return said


def test_a_checkpoints_manifest_that_says_what_cannot_be(tmp_path):
    folder = tmp_path / "step-00000020"
    folder.mkdir()
    (folder / "rows.bin").write_bytes(bytes(100))
    (folder / "dense.bin").write_bytes(bytes(10))
    rows = {"name": "rows.bin", "space": 0, "rows": 3, "frames": 1, "bytes": 100, "crc32": 7}
    dense = {"name": "dense.bin", "space": -1, "bytes": 10, "crc32": 7}
    tensors = [{"dtype": "float32", "shape": [2]}]
    manifest = Manifest(20, {"train.seed": 7}, None, 0, [12], [50], [rows, dense], tensors)
    path = folder / "manifest.json"
    path.write_bytes(manifest.to_bytes())
    fields = json.loads(path.read_text())
    mutants = (with_its_checksum(each) for each in with_one_wrong(fields))
    assert check(path, mutants, lambda: locate(folder)) > 100


def test_a_file_outside_of_its_checkpoint_is_refused():
    entry = {
        "name": "../other/rows.bin",
        "space": 0,
        "rows": 3,
        "frames": 1,
        "bytes": 9,
        "crc32": 7,
    }
    manifest = Manifest(20, {}, None, 0, [12], [50], [entry], [])
    with pytest.raises(DataError, match="its list of files is not what a run writes"):
        parse(manifest.to_bytes(), "manifest.json")


def test_what_an_identity_lacks_is_told():
    with (
        pytest.raises(DataError, match="says of its model what no run has written .KeyError: 'x'"),
        as_a_run_writes(Path("step")),
    ):
        {}["x"]
