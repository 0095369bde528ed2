"""The manifest of a checkpoint: the last file, which makes it complete. No torch is imported."""

from __future__ import annotations

import builtins
import contextlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ecrm.base.errors import DataError, EcrmError, UsageError

NAME = "manifest.json"
FORMAT = "ecrm-checkpoint"
VERSION = 2
DENSE = "dense.bin"
CHECK_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    `step`: steps done, also the position in the data. `identity`: everything that decides the bits
    of the model, by config key. `base`: None for a full checkpoint, else {"step", "checksum"} of
    the checkpoint this one adds to; `chain`: number of checkpoints after the full checkpoint.
    `record_bytes` and `space_rows` by row space. `files`: a list of {"name", "space", "rows",
    "frames", "bytes", "crc32"}; the dense state has space -1 and neither rows nor frames. `dense`:
    a list of {"dtype", "shape"}, by tensor in order. `evaluations`: only of
    version 0.2.0 and before, [step, AUC, log loss, sum of training losses] of each evaluation.
    """

    step: int
    identity: dict[str, Any]
    base: dict[str, int] | None
    chain: int
    record_bytes: list[int]
    space_rows: list[int]
    files: list[dict[str, Any]]
    dense: list[dict[str, Any]]
    evaluations: list[list[float | None]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return "full" if self.base is None else "incremental"

    @property
    def row_files(self) -> list[dict[str, Any]]:
        return [entry for entry in self.files if entry["space"] >= 0]

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files)

    @property
    def rows(self) -> int:
        return sum(entry["rows"] for entry in self.row_files)

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields of the manifest."""
        return zlib.crc32(_canonical(self._fields))

    @property
    def _fields(self) -> dict[str, Any]:
        fields = {"format": FORMAT, "format_version": VERSION, **asdict(self)}
        return (
            fields
            if self.evaluations
            else {name: value for name, value in fields.items() if name != "evaluations"}
        )

    def to_bytes(self) -> builtins.bytes:
        fields = {**self._fields, "manifest_crc32": self.checksum}
        return json.dumps(fields, indent=1).encode() + b"\n"


def parse(data: bytes, name: str) -> Manifest:
    """A manifest from the bytes of its file; `name` is for error messages.

    Raises DataError for a damaged manifest, UsageError for another version.
    """
    try:
        fields = json.loads(data)
        if fields.pop("format") != FORMAT:
            raise ValueError("not the manifest of a checkpoint")
        if (version := fields.pop("format_version")) != VERSION:
            raise UsageError(
                f"{name}: checkpoint format version {version}, this program reads {VERSION}"
            )
        said = fields.pop("manifest_crc32")
        manifest = Manifest(**fields)
        if manifest.checksum != said:
            raise ValueError("its checksum does not match")
        if wrong := _first_wrong(manifest):
            raise ValueError(f"its {wrong} is not what a run writes")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{name}: damaged manifest: {error}") from None
    return manifest


def _first_wrong(manifest: Manifest) -> str:
    """The first field with a value never written by a run; "" for none."""
    counts = {"step": manifest.step, "chain": manifest.chain}
    for name, value in counts.items():
        if not _is_count(value):
            return name
    base = manifest.base
    if base is not None and not (
        isinstance(base, dict) and all(_is_count(base.get(key)) for key in ("step", "checksum"))
    ):
        return "base"
    if not isinstance(manifest.identity, dict):
        return "identity"
    for name in ("record_bytes", "space_rows"):
        if not _are_counts(getattr(manifest, name)):
            return name
    for entry in _entries(manifest.files):
        file, space = entry.get("name"), entry.get("space")
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            return "list of files"
        if not isinstance(space, int) or not -1 <= space < len(manifest.record_bytes):
            return f"file {file}"
        of_rows = ("rows", "frames") if space >= 0 else ()
        if not all(_is_count(entry.get(key)) for key in (*of_rows, "bytes", "crc32")):
            return f"file {file}"
    for entry in _entries(manifest.dense):
        if not isinstance(entry.get("dtype"), str) or not _are_counts(entry.get("shape")):
            return "list of dense tensors"
    rows = manifest.evaluations
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return "list of evaluations"
    return ""


def _entries(value: Any) -> list[dict[str, Any]]:
    """The dicts of a list, with {} for any other element; [{}] for anything but a list."""
    return (
        [each if isinstance(each, dict) else {} for each in value]
        if (isinstance(value, list))
        else [{}]
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


@contextlib.contextmanager
def as_a_run_writes(path: Path) -> Iterator[None]:
    """Around code reading the identity in a manifest: DataError if no run has written the identity.

    An identity has different keys for each kind of model, so the keys are not checked one by one.
    """
    try:
        yield
    except (EcrmError, OSError, MemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"{path}: its manifest says of its model what no run has written ({what})"
        ) from None


def checksums_of(path: Path) -> Iterator[int]:
    """Yield the CRC-32 of the part of a file read so far, after every few megabytes.

    The last value is the CRC-32 of the file. An empty file yields nothing.
    """
    checksum = 0
    with open(path, "rb") as file:
        while data := file.read(CHECK_BYTES):
            checksum = zlib.crc32(data, checksum)
            yield checksum


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()
