"""Checksums of the tensors in a file of a model: what a flipped bit on a disk is noticed by."""

from __future__ import annotations

import functools
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from ecrm.errors import DataError

CHECKSUMS = "xxh3"
"""The entry of a safetensors file's metadata with {tensor: 16 hexadecimal digits}, as JSON.

They are XXH3, of 64 bits, of the tensor's bytes. A file of torch.save has a CRC-32 of each part.
"""

_PIECE = 16 << 20


def check_share(path: Path, place: int = 0, of: int = 1) -> None:
    """Raise DataError where a tensor in a file is not what was written there.

    Ranks share the work: this one, at `place`, looks at every `of`-th part. Files without checksums
    are not checked.
    """
    with path.open("rb") as file:
        try:
            parts = list(_of_torch(file) if zipfile.is_zipfile(file) else _of_safetensors(file))
        except OSError:
            raise
        except Exception:  # what zipfile raises for damaged files has no common class
            raise DataError(f"{path} is damaged: its checksums cannot be read") from None
        for name, right in parts[place::of]:
            if not right():
                raise DataError(
                    f"{path} is damaged: the checksum of {name} is not that of what it holds; "
                    "take another copy of the file"
                )


def _of_torch(file: BinaryIO) -> Iterator[tuple[str, Callable[[], bool]]]:
    archive = zipfile.ZipFile(file)
    for entry in archive.infolist():
        if entry.CRC:  # torch can be told to leave them out
            name = entry.filename.partition("/")[2]
            yield name, functools.partial(_is_right_in_zip, archive, entry)


def _is_right_in_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as part:  # which raises at its end where the CRC-32 is another
            while part.read(_PIECE):
                pass
    except OSError:
        raise
    except Exception:  # zipfile's, and those of codecs for names
        return False
    return True


def _of_safetensors(file: BinaryIO) -> Iterator[tuple[str, Callable[[], bool]]]:
    (size,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 0))
    entries = json.loads(os.pread(file.fileno(), size, 8))
    known = entries.get("__metadata__", {}).get(CHECKSUMS)
    for name, wanted in json.loads(known).items() if known else ():
        first, last = entries[name]["data_offsets"]
        yield name, functools.partial(_is_right, file, 8 + size + first, 8 + size + last, wanted)


def _is_right(file: BinaryIO, first: int, last: int, wanted: str) -> bool:
    digest = xxhash.xxh3_64()
    for at in range(first, last, _PIECE):
        digest.update(os.pread(file.fileno(), min(_PIECE, last - at), at))
    return digest.hexdigest() == wanted
