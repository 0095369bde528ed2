"""Rows copied from input files to a prepared folder, block by block, with malformed rows judged."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from ecrm.base.console import Progress
from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.data import dataset_info
from ecrm.data.malformed import NAMED_MALFORMED, Malformed, Skipped, judge


class Block(Protocol):
    """Rows read from a file, with the malformed lines between the rows.

    `examples` describes every malformed line, and can be read once. `bytes_read` counts the bytes
    read from the file so far. `unit` is the noun of a numbered line, such as "line" or "row".
    """

    @property
    def malformed(self) -> int: ...

    @property
    def examples(self) -> Iterator[Malformed]: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def unit(self) -> str: ...


Rows = TypeVar("Rows", bound=Block)
Taken = TypeVar("Taken", bound=Block, contravariant=True)


class Writer(Protocol[Taken]):
    """The files of a prepared folder; `rows` counts the rows written so far."""

    rows: int

    def write(self, rows: Taken, /) -> None:
        """Append the rows of a block."""


Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Threads:
    """Threads at work on the pieces of files; `count` is by default the number of cores.

    To be used with `with`. Raises UsageError for no thread.
    """

    _AHEAD = 2
    """Pieces read ahead of the threads at work."""

    def __init__(self, count: int | None) -> None:
        if count is not None and count < 1:
            raise UsageError(f"--threads {count}: type at least 1")
        self.count = count or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.count)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def in_order(
        self,
        pieces: Iterator[Piece],
        work: Callable[[Piece], Result],
        one_by_one: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """Yield `work(piece)` of all pieces in their order; the work is done on the threads.

        While `one_by_one()` is true, a piece waits for the result of the piece before. An error of
        a piece is raised in the order of the pieces.
        """
        waiting: deque[Future[Result]] = deque()
        more = True
        try:
            while more or waiting:
                while more and len(waiting) < (1 if one_by_one() else self.count + self._AHEAD):
                    piece = next(pieces, None)
                    if piece is None:
                        more = False
                    else:
                        waiting.append(self._pool.submit(work, piece))
                if waiting:
                    yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def copy_rows(
    inputs: Sequence[str],
    input_bytes: Sequence[int | None],
    read: Callable[[str], Iterator[Rows]],
    writer: Writer[Rows],
    skipped: Skipped,
    progress: Progress | None,
    max_malformed: float,
) -> list[dict[str, Any]]:
    """Write all rows of all inputs and return the manifest's records of the inputs.

    `read(path)` yields the blocks of a file. `input_bytes` are the sizes of the files, None for a
    pipe. Raises DataError if more than the share `max_malformed` of a file is malformed.
    """
    known = [size for size in input_bytes if size is not None]
    total = sum(known) if len(known) == len(input_bytes) else None
    sources, done = [], 0
    for path in inputs:
        first_row, malformed, amount, lines, unit = writer.rows, 0, 0, 0, "line"
        first: list[Malformed] = []
        for rows in read(path):
            writer.write(rows)
            malformed += rows.malformed
            lines = writer.rows - first_row + malformed
            amount, unit, examples = rows.bytes_read, rows.unit, rows.examples
            more = list(islice(examples, NAMED_MALFORMED - len(first)))
            first += more
            skipped.add(rows.malformed, chain(more, examples))
            if lines >= dataset_info.JUDGED_LINES:
                judge(path, malformed, lines, first, max_malformed, unit, of="the first ")
            if progress:
                fraction = (done + amount) / total if total else None
                progress.update(writer.rows, f"{(done + amount) / 1e6:,.1f} MB", fraction)
        done += amount
        judge(path, malformed, lines, first, max_malformed, unit)
        if progress and malformed:
            progress.note(
                f"{path}: {counted(malformed, f'malformed {unit}')} skipped, "
                f"{writer.rows - first_row:,} rows read"
            )
        sources.append(
            {"name": path, "bytes": amount, "rows": writer.rows - first_row, "malformed": malformed}
        )
    return sources
