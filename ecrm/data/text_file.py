"""Text files read in bounded memory: plain or gzip, from a disk or a pipe."""

from __future__ import annotations

import gzip
import io
import os
import shlex
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

from ecrm.base.errors import DataError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ICONV = "type iconv -f UTF-16 -t UTF-8 < FILE > NEW"
_TABLE = "type ecrm prepare table FILE --schema schema.toml --output DIR"
_FOREIGN = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it",
    b"BZh": "a bzip2 file: unpack it",
    b"\xfd7zXZ\x00": "an xz file: unpack it",
    b"PAR1": f"a parquet file: {_TABLE}",
    b"ARROW1": f"an Arrow file: {_TABLE}",
    b"\xff\xff\xff\xff": f"an Arrow stream: {_TABLE}",
    b"\x93NUMPY": "a numpy file",
    b"FEA1": "a feather file of version 1",
    b"\xff\xfe": f"UTF-16: {_ICONV}",
    b"\xfe\xff": f"UTF-16: {_ICONV}",
}
_TAR = slice(257, 262), b"ustar"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_inputs(paths: Sequence[str]) -> list[int | None]:
    """Return the sizes of input files in bytes, `None` for a pipe or device.

    Raises `UsageError` for a directory, an unreadable file and a file named twice, `DataError` for
    an empty file.
    """
    sizes = [check_input(path) for path in paths]
    named: dict[tuple[int, int], str] = {}
    for path, size in zip(paths, sizes, strict=True):
        if size is None:
            continue
        status = os.stat(path)
        file = (status.st_dev, status.st_ino)
        if file in named:
            same = named[file] == path
            again = "the file is named twice" if same else f"the same file as {named[file]}"
            raise UsageError(f"{path}: {again}", otherwise="name each file once")
        named[file] = path
    return sizes


def check_input(path: str) -> int | None:
    """Return the size of an input file in bytes, `None` for a pipe or device.

    Raises `UsageError` for a directory or an unreadable file, `DataError` for an empty file.
    """
    try:
        if "://" in path and not os.path.exists(path):
            raise UsageError(
                f"{path}: an address, and only local files are read",
                otherwise="copy the file to a local disk, and name the copy",
            )
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{path}: is a directory", otherwise=_files_in(path))
        if not stat.S_ISREG(status.st_mode):
            return None
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if status.st_size == 0:
        raise DataError(f"{path}: the file is empty: leave out the file")
    return status.st_size


def _files_in(directory: str) -> str:
    """The words to type in place of a directory: a pattern of the most common files there."""
    for folder, _, names in os.walk(directory):
        shown = sorted(name for name in names if not name.startswith((".", "_")))
        if not shown:
            continue
        depth = os.path.relpath(folder, directory).count("/") + (folder != directory)
        suffixes = Counter(os.path.splitext(name)[1] for name in shown)
        suffix = max(sorted(suffixes), key=suffixes.__getitem__)
        return f"type {shlex.quote(directory.rstrip('/'))}{'/*' * depth}/*{suffix}"
    return "name the files, there are none in the directory"


class CountedFile(io.RawIOBase):
    """A file opened for reading, with a count of the bytes read; `tell` fails for a pipe."""

    def __init__(self, path: str) -> None:
        self.count = 0
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        size = self._file.readinto(buffer)
        self.count += size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def decoded(source: CountedFile, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yield the file's text in pieces of `block_bytes`, unpacked if the file is gzip."""
    buffered: io.BufferedReader = io.BufferedReader(source, max(block_bytes, 1 << 16))
    try:
        # A pipe may hand over the first bytes singly: take 8 bytes, then put the bytes back in
        # front.
        head = buffered.read(8)
        _refuse_foreign(path, "is", head)
        joined = _Prefixed(head, buffered)
        stream: _Prefixed | gzip.GzipFile = joined
        if head.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=cast(BinaryIO, joined), mode="rb")
        piece = stream.read(max(block_bytes, _TAR[0].stop))
        _refuse_foreign(path, "is" if stream is joined else "unpacks to", piece)
        if piece.startswith(_BYTE_ORDER_MARK):
            piece = piece[len(_BYTE_ORDER_MARK) :]
        while piece:
            yield piece
            piece = stream.read(block_bytes)
    except EOFError as error:
        raise DataError(
            f"{path}: the gzip stream is truncated after {source.count} bytes"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: the gzip stream is damaged before byte {source.count}: {error}"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read past byte {source.count}: {error.strerror or error}"
        ) from error


def _refuse_foreign(path: str, verb: str, start: bytes) -> None:
    """Raise `DataError` if `start` begins like an archive or a file of a foreign format.

    `start` is the beginning of the file or of the unpacked gzip; text and gzip pass.
    """
    what = next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), None)
    if start[_TAR[0]] == _TAR[1]:
        what = "a tar archive: unpack it"
    if what:
        raise DataError(f"{path}: {verb} {what}; only plain text and gzip of it are read")


class _Prefixed:
    """Some bytes followed by the rest of a stream, with the `read` needed by the gzip module."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        head, self._head = self._head[:size], self._head[size:]
        return head + self._rest.read(size - len(head)) if len(head) < size else head
