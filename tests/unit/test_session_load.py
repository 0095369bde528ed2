"""Files of models that others have saved, and what is told where one does not fit."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.base.wording import MOST_SHOWN
from ecrm.checkpoint.checksums import check_share
from ecrm.checkpoint.exported_model import exported_model
from ecrm.checkpoint.model_file import ModelFile, as_array
from ecrm.checkpoint.saved_model import open_model, read_model
from ecrm.placement import initial_values
from ecrm.placement.initial_values import FileValues, Values
from ecrm.placement.tables import Table, row_spaces
from ecrm.run import loaded_files
from ecrm.run.loaded_files import check_names, with_digests
from ecrm.run.started import Wanted
from ecrm.run.trained_module import TrainedModule
from ecrm.session.loading import load
from ecrm.session.save import FORMATS
from ecrm.storage.initial_rows import InitialRows

KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    table = torch.randn(70, 4, generator=random)
    return {
        "user.weight": table,
        "friend.weight": table,
        "top.weight": torch.randn(4, 3, generator=random).t(),  # not contiguous
        "small": torch.randn(3, generator=random).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
    }


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As the format says, from scratch."""
    entries, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(parts))
    return path


def write_torch(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, path)
    return path


WRITERS = {"m.pt": write_torch, "m.safetensors": write_safetensors}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_read_without_being_held(tmp_path, name, monkeypatch):
    path = WRITERS[name](tmp_path / name, state())
    found = read_model(path)
    assert found.keys() == state().keys()
    for key, tensor in state().items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)
    # a byte that is changed in the file is changed in the tensor: it was mapped
    before = found["user.weight"].clone()
    data = bytearray(path.read_bytes())
    at = data.index(before.numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<f", 42.0))
    assert found["user.weight"][0, 0] == 42.0 and before[0, 0] != 42.0


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_told(tmp_path, name, share):
    path = WRITERS[name](tmp_path / name, state())
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(EcrmError, match=str(path)) as told:
        read_model(path)
    assert told.value.exit_code in (2, 4) and "\n" not in str(told.value)


def test_what_is_no_model_is_told(tmp_path):
    path = tmp_path / "m.pt"
    with pytest.raises(UsageError, match="there is no such file"):
        read_model(path)
    path.write_text("no model")
    with pytest.raises(UsageError, match=r"no file of torch.save or .*: save it with torch.save"):
        read_model(path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(UsageError, match="holds a list, no state_dict: save it with"):
        read_model(path)
    torch.save({"epoch": 3, "model": state()}, path)
    with pytest.raises(UsageError, match=r"in another dict, as 'model': give the inner dict, tor"):
        read_model(path)
    torch.save({"top.weight": torch.ones(2), "top._extra_state": {"x": torch.ones(3)}}, path)
    assert read_model(path).keys() == {"top.weight", "top._extra_state"}
    torch.save({"model": nn.Linear(2, 2)}, path)
    with pytest.raises(UsageError, match="holds more than tensors and numbers") as told:
        read_model(path)
    assert "\n" not in str(told.value)


def test_a_write_into_a_tensor_of_a_file_leaves_the_file_alone(tmp_path):
    for name, write in WRITERS.items():
        path = write(tmp_path / name, state())
        read_model(path)["user.weight"][0, 0] = 42.0
        assert torch.equal(read_model(path)["user.weight"], state()["user.weight"])


def test_names_of_a_tensor_share_memory(tmp_path):
    table = torch.ones(70, 4)
    path = write_torch(tmp_path / "m.pt", {"a": table, "b": table.detach(), "c": table.clone()})
    found = read_model(path)
    assert found["a"].is_set_to(found["b"]) and not found["a"].is_set_to(found["c"])


@pytest.mark.parametrize("shape", [[5], [3, -1], [-1], "no shape", [2.0, 2], [1 << 40]])
def test_a_header_whose_shapes_are_not_those_of_its_data_is_told(tmp_path, shape):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": torch.ones(4)})
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["a"]["shape"] = shape
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])
    with pytest.raises(DataError, match="m.safetensors: a has shape .* in the header"):
        read_model(path)


def module() -> nn.Module:
    model = nn.Module()
    for name in ("user", "friend"):
        model.register_module(name, nn.Module())
        model.get_submodule(name).weight = nn.Parameter(torch.empty(70, 4, device="meta"))
    model.friend.weight = model.user.weight
    model.top = nn.Linear(4, 3, bias=False)
    model.small = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    for name, buffer in state().items():
        if name in ("count", "mask", "none"):
            model.register_buffer(name, torch.zeros_like(buffer))
    return model


TABLE = Table("user", 70, 4)


def test_all_but_tables_is_put_into_the_module_and_rows_begin_as_the_file_has_them(tmp_path):
    path = write_torch(tmp_path / "m.pt", {**state(), "note": "no tensor"})
    model, parameter = module(), None
    parameter = model.top.weight
    (table,) = load(model, [TABLE], {"friend": "user"}, read_model(path), "here", str(path))
    assert model.top.weight is parameter and torch.equal(parameter, state()["top.weight"])
    assert torch.equal(model.small, state()["small"]) and model.count == 7
    assert model.user.weight.is_meta and isinstance(table.initial, FileValues)
    rows = torch.tensor([69, 0, 3])
    values = InitialRows(row_spaces([table])[0], 1)(rows)
    assert torch.equal(values, state()["user.weight"][rows])
    (again,) = load(model, [TABLE], {"friend": "user"}, state(), "here")
    assert isinstance(again.initial, Values)


WRONG = {
    "shape": ({"user.weight": torch.zeros(71, 4)}, "user.weight is 71 x 4 float32 there, 70 x 4 "),
    "dtype": ({"top.weight": torch.zeros(3, 4).half()}, "top.weight is 3 x 4 float16 there, 3 x 4"),
    "too many": ({"extra": torch.tensor(1.0)}, "extra is one number float32 there, missing here"),
    "missing": ({"count": None}, "count is missing there, one number int64 here"),
    "two tables": (
        {"friend.weight": torch.zeros(70, 4)},
        "friend.weight and user.weight are one table here, and have other numbers there",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_that_does_not_fit_is_refused_tensor_by_tensor(what):
    changed, said = WRONG[what]
    model = module()
    with pytest.raises(UsageError) as told:
        load(model, [TABLE], {"friend": "user"}, {**state(), **changed}, "session.load: m.pt")
    assert said in str(told.value) and str(told.value).startswith("session.load: m.pt")
    assert "\n" not in str(told.value) and not model.small.any()  # it is as it was


def test_no_more_tensors_are_named_than_one_can_read():
    others = {f"layer{number}": torch.zeros(1) for number in range(MOST_SHOWN + 3)}
    with pytest.raises(UsageError, match=f"layer{MOST_SHOWN - 1} is .*; and 3 more$"):
        load(module(), [TABLE], {}, {**state(), **others}, "m.pt")


@pytest.fixture
def in_windows(monkeypatch):
    monkeypatch.setattr(initial_values, "WINDOW_BYTES", 30 * 16)


def known(values: FileValues) -> tuple[int, ...]:
    return () if values.opened is None else values.opened.known


def told_by(monkeypatch, files: dict[int, FileValues], hosts: dict[int, str]) -> list[Table]:
    """`with_digests` on several ranks, all of which live."""
    rank, read = 0, {}
    shares: list[dict[int, object]] = []

    def share(transport, facts):
        facts()
        return shares.pop(0)

    said = {
        n: [hosts[n], [["user", 70, 4, *values.others]], [[*known(values)]]]
        for n, values in files.items()
    }
    seen = {n: (hosts[n], known(values)) for n, values in files.items()}
    for number, values in files.items():
        together = [other for other in sorted(hosts) if seen[other] == seen[number]]
        table = Table("user", 70, 4, None, values)
        read[number] = loaded_files._digests([table], together.index(number), together)
    monkeypatch.setattr(loaded_files, "gather_results", share)
    monkeypatch.setattr(loaded_files, "host_name", lambda: hosts[rank])
    found = []
    for rank in files:
        shares[:] = [said, read]
        transport = SimpleNamespace(rank=rank)
        found += with_digests(transport, [Table("user", 70, 4, None, files[rank])])
    names = 1 + len(files[0].others)
    assert sum(map(len, read.values())) == 3 * names * len(set(seen.values()))  # once per host
    return found


def test_every_host_reads_the_file_once_and_all_must_have_the_same(monkeypatch, in_windows):
    same = {rank: FileValues(state()["user.weight"], "m.pt") for rank in range(4)}
    hosts = {0: "a", 1: "b", 2: "a", 3: "b"}
    digests = {table.initial.digest for table in told_by(monkeypatch, same, hosts)}
    assert len(digests) == 1 and "" not in digests
    for row in (0, 31, 69):
        other = state()["user.weight"]
        other[row, 3] = math.nextafter(float(other[row, 3]), 9.0) + 1e-6
        changed = FileValues(other, "m.pt")
        moved = told_by(monkeypatch, dict.fromkeys(same, changed), hosts)
        assert {table.initial.digest for table in moved}.isdisjoint(digests)
        with pytest.raises(UsageError, match="other numbers on b than on a: user from row") as told:
            told_by(monkeypatch, {**same, 1: changed, 3: changed}, hosts)
        assert told.value.speaker == 0


def test_ranks_of_a_host_that_have_opened_other_files_of_one_name_are_told(
    tmp_path, monkeypatch, in_windows
):
    """A link that moves while they start: without a look at the files, each reads some windows."""
    link, hosts, files = tmp_path / "m.pt", {0: "a", 1: "a"}, {}
    for rank, row in ((0, 0), (1, 31)):
        changed = state()
        changed["user.weight"][row] += 1
        target = write_torch(tmp_path / f"{rank}.pt", changed)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        (table,) = load(module(), [TABLE], {"friend": "user"}, *opened(link))
        files[rank] = table.initial
    assert files[0].opened.known != files[1].opened.known and files[0].source == files[1].source
    with pytest.raises(UsageError, match="other numbers on rank 1 than on rank 0 of a: user from"):
        told_by(monkeypatch, files, hosts)
    same = told_by(monkeypatch, {0: files[0], 1: files[0]}, hosts)
    assert same[0].initial.digest == same[1].initial.digest != ""


@pytest.mark.parametrize("change", ["written", "cut"])
def test_a_file_that_changes_after_it_was_opened_is_named_whenever_it_is_read(tmp_path, change):
    path = write_torch(tmp_path / "m.pt", state())
    (table,) = load(module(), [TABLE], {"friend": "user"}, *opened(path))
    rows = torch.arange(70)
    assert torch.equal(table.initial.read(rows), state()["user.weight"])
    replaced = write_torch(tmp_path / "other.pt", state())
    replaced.rename(tmp_path / "m.pt")  # under its name is another: what was opened is as it was
    assert torch.equal(table.initial.read(rows), state()["user.weight"])

    (table,) = load(module(), [TABLE], {"friend": "user"}, *opened(path))
    if change == "cut":
        os.truncate(path, 100)
    else:
        with path.open("r+b") as file:
            file.write(path.read_bytes())  # even to the same bytes: who knows since when
        os.utime(path)
    for read in (lambda: table.initial.read(rows), lambda: table.initial.window_digest(0)):
        with pytest.raises(DataError, match=r"m\.pt has changed since this run opened it"):
            read()


def opened(path: Path) -> tuple[dict[str, torch.Tensor], str, str, OpenedFile]:
    found, marks = open_model(path)
    return found, "session.load", str(path), marks


def test_names_of_one_table_in_a_file_are_compared_where_ranks_share_the_reading(
    tmp_path, monkeypatch, in_windows
):
    read: list[int] = []
    digest = FileValues.window_digest

    def counted(values: FileValues, first: int) -> str:
        read.append(first)
        return digest(values, first)

    monkeypatch.setattr(FileValues, "window_digest", counted)
    hosts, aliases = {0: "a", 1: "a", 2: "b"}, {"friend": "user"}
    for writer, count in ((write_torch, 3), (write_safetensors, 6)):  # torch's are one tensor
        path = writer(tmp_path / "m", state())
        (table,) = load(module(), [TABLE], aliases, *opened(path))
        assert not read  # no rank reads it whole by itself
        told_by(monkeypatch, dict.fromkeys(hosts, table.initial), hosts)
        assert len(read) == 2 * 2 * count  # once a host, and once more by this test
        check_names([table])
        read.clear()
    other = state()["user.weight"]
    other[69, 3] += 1
    path = write_safetensors(tmp_path / "m", {**state(), "friend.weight": other})
    (table,) = load(module(), [TABLE], aliases, *opened(path))
    told = "m: friend.weight and user.weight are one table here, and have other numbers there"
    with pytest.raises(UsageError, match=told):
        told_by(monkeypatch, dict.fromkeys(hosts, table.initial), hosts)
    with pytest.raises(UsageError, match=told):
        check_names([table])


def test_a_state_dict_that_its_owner_changes_later_changes_no_row():
    given = state()
    given["user.weight"] = torch.randn(4, 70).t()
    expected = given["user.weight"].clone()
    (table,) = load(module(), [TABLE], {}, {**given, "friend.weight": torch.zeros(70, 4)}, "here")
    given["user.weight"].zero_()
    assert torch.equal(InitialRows(row_spaces([table])[0], 1)(torch.tensor([3])), expected[3:4])
    assert table.initial.values.is_contiguous()


def test_a_run_goes_on_with_the_same_file_alone_and_export_reads_it_again(tmp_path):
    path = write_torch(tmp_path / "m.pt", state())

    def identity(values: torch.Tensor) -> TrainedModule:
        files = FileValues(values, str(path))
        parts = [files.window_digest(first) for first in files.windows]
        done = FileValues(values, str(path), initial_values.digest_of_windows(parts))
        wanted = Wanted([Table("user", 70, 4, None, done)], lambda: None, 2, 3, 5, None)
        return TrainedModule(wanted, {}, {}, {})

    values = read_model(path)["user.weight"]
    mine = identity(values)
    said = mine.identity()
    mine.check_identity(path, said)
    assert said["told"]["loaded"] == str(path) and "loaded" not in mine.about()
    other = identity(values + 1)
    for check in (other.check_identity, other.check_init):
        with pytest.raises(UsageError, match="table user is 70 x 4, begun as values .* there, 70 "):
            check(path, said)
    model = exported_model(said)
    assert torch.equal(model.tables[0].initial.values, values)
    write_torch(path, {**state(), "user.weight": values + 1})
    with pytest.raises(UsageError, match=f"put {path} back as it was, or call session.save"):
        exported_model(said)


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_bit_that_flips_in_a_saved_file_is_noticed_when_it_is_loaded(tmp_path, name):
    path, tensors = tmp_path / name, {n: as_array(t) for n, t in state().items()}
    form = FORMATS[path.suffix]
    shapes = {n: (array.dtype, array.shape) for n, array in tensors.items()}
    with path.open("w+b") as output:
        file = ModelFile(form, output, tmp_path, shapes, {})
        for n, array in tensors.items():
            file.arrays[n][...] = array
        file.finish()
        file.close()
    check_share(path)
    found = read_model(path)
    assert all(torch.equal(found[n], tensor) for n, tensor in state().items())
    (table,) = load(module(), [TABLE], {"friend": "user"}, *opened(path))
    check_names([table])
    data = bytearray(path.read_bytes())
    for tensor in ("user.weight", "small", "top.weight"):
        flipped = bytearray(data)
        flipped[data.index(tensors[tensor].tobytes()) + 3] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=rf"{name} is damaged: the checksum of "):
            check_share(path)
        shares = [_is_damaged(path, place) for place in range(3)]
        assert sorted(shares) == [False, False, True], "one of the ranks that share the reading"


def _is_damaged(path: Path, place: int) -> bool:
    try:
        check_share(path, place, 3)
    except DataError:
        return True
    return False
