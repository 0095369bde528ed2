"""Checksums of the tensors in a model file, by which a bit flipped on disk is noticed."""

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

from ecrm.base.errors import DataError

CHECKSUMS = "xxh3"
"""The metadata entry of a safetensors file with {tensor: 16 hexadecimal digits}, as JSON.

The digits are the 64-bit XXH3 of the tensor's bytes. A file of torch.save has a CRC-32 per part.
"""

_PIECE = 16 << 20


def check_share(path: Path, place: int = 0, of: int = 1) -> None:
    """Raise DataError if the bytes of a tensor in a file do not match the checksum.

    Ranks share the work: this rank, at `place`, checks every `of`-th part. Files without checksums
    are not checked.
    """
    with path.open("rb") as file:
        try:
            parts = list(_of_torch(file) if zipfile.is_zipfile(file) else _of_safetensors(file))
        except OSError:
            raise
        except Exception:  # zipfile's errors for damaged files have no common class
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
        if entry.CRC:  # torch can be told to leave checksums out
            name = entry.filename.partition("/")[2]
            yield name, functools.partial(_is_right_in_zip, archive, entry)


def _is_right_in_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as part:  # raises at the end if the CRC-32 differs
            while part.read(_PIECE):
                pass
    except OSError:
        raise
    except Exception:  # errors of zipfile, and of codecs for names
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
