"""A session's model as one file, tables gathered in windows: no rank ever holds a whole table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ecrm.base.atomic_files import staged_file
from ecrm.base.errors import EcrmError, NotFinite, UsageError
from ecrm.base.version_set import name_of, version_set
from ecrm.checkpoint.model_file import ModelFile, Shape, as_array
from ecrm.engine.engine import Engine
from ecrm.engine.table_digest import CHUNK_ROWS, gather_rows
from ecrm.model.nested_state import packed, unpacked
from ecrm.run.sealed import sealed
from ecrm.storage.base import Store
from ecrm.transport.message import tensors

Result = TypeVar("Result")
FORMATS = {".safetensors": "safetensors", ".pt": "torchrec", ".pth": "torchrec"}


def format_of(path: Path) -> str:
    """The format asked for by a file's name. Raises UsageError for an unknown suffix."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: end the name with one of {', '.join(FORMATS)}")
    return FORMATS[path.suffix]


def undisturbed(
    engine: Engine, where: str, work: Callable[[], Result], on_recovery: Callable[[], None]
) -> Generator[Any, None, Result]:
    """Collective: the result of `work`, even if ranks die meanwhile; yields nothing.

    Raises the errors of `sealed`, and of `work`.
    """

    def recovering() -> Generator[Any, None, Result]:
        with engine.recovery.recovering():
            done = work()
        yield from ()
        return done

    return (yield from sealed(engine, where, recovering, on_recovery))


def state_dict(
    engine: Engine, dense: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> dict[str, Tensor]:
    """Collective, no row missing: tables and `dense` tensors by name, on every rank.

    Only the reporter needs `dense`. A table with several names is one tensor. Raises PeerFailure as
    transport calls do.
    """
    engine.enter("save")
    found = {name: torch.empty(shape) for name, (_, shape) in _tables(engine).items()}
    for to in engine.view.live:
        for name, first, rows in _gathered(engine, to):
            if rows is not None:
                found[name][first : first + len(rows)] = rows
    found |= {f"{name}.weight": found[f"{of}.weight"] for name, of in aliases.items()}
    transport, reporter = engine.state.transport, engine.view.reporter
    shared = transport.share([packed(dense if engine.rank == reporter else {})])
    transport.barrier("a model was gathered")
    (said,) = tensors(shared[reporter])
    return found | {name: t for name, t in unpacked(said).items() if t is not None}


def save(
    engine: Engine,
    path: Path,
    dense: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    finite: Collection[str] | None = None,
    before: Callable[[Path], None] = lambda path: None,
) -> None:
    """Collective, no row missing: write tables and `dense` tensors to a file, by name.

    The reporter writes the file; only the reporter needs `dense`. `aliases` are {further name of a
    table: name}: the file has such a table under both names. The file appears once complete, and
    replaces an older file. With `finite`, names of parameters, all rows and the named parameters
    must be finite. `before(path)` is called on the reporter. Raises EcrmError on every rank if the
    file cannot be written, with the exit code of NotFinite for nonfinite values, and PeerFailure as
    transport calls do.
    """
    engine.enter("save")
    form, writes = format_of(path), engine.rank == engine.view.reporter
    trouble: EcrmError | None = None
    with ExitStack() as opened:
        file: ModelFile | None = None
        try:
            if writes:
                before(path)
                output = opened.enter_context(staged_file(path))
                shapes = _tables(engine)
                shapes |= {f"{n}.weight": shapes[f"{of}.weight"] for n, of in aliases.items()}
                shapes |= {name: _shape(tensor) for name, tensor in dense.items()}
                about = {"version_set": name_of(version_set())}
                file = opened.enter_context(
                    closing(ModelFile(form, output, path.parent, shapes, about))
                )
        except (EcrmError, OSError) as error:
            trouble = _told(path, error)
        _share_trouble(engine, trouble)
        for name, first, rows in _gathered(engine, engine.view.reporter):
            if file is not None and rows is not None:
                file.arrays[name][first : first + len(rows)] = rows.numpy()
                if finite is not None and trouble is None:
                    trouble = _not_finite(path, f"row of {name}", rows)
        if writes and finite is not None:
            for name in sorted(dense.keys() & finite):
                trouble = trouble or _not_finite(path, name, dense[name])
        _share_trouble(engine, trouble)
        try:
            if file is not None:
                for name, of in aliases.items():
                    file.arrays[f"{name}.weight"][...] = file.arrays[f"{of}.weight"]
                for name, tensor in dense.items():
                    file.arrays[name][...] = as_array(tensor)
                file.finish()
            opened.close()
        except (EcrmError, OSError) as error:
            trouble = _told(path, error)
        _share_trouble(engine, trouble)


def _not_finite(path: Path, name: str, values: Tensor) -> NotFinite | None:
    """The error for nonfinite values, left unwritten; `None` for finite values."""
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return None
    return NotFinite(
        f"{path} is not written: {'a ' if name.startswith('row of ') else ''}{name} is not finite; "
        "lower the learning rates, or write it with --set train.on_nonfinite=warn"
    )


def _tables(engine: Engine) -> dict[str, Shape]:
    return {
        f"{table.name}.weight": (np.dtype(np.float32), (table.rows, table.dim))
        for space in engine.state.spaces
        for table in space.tables
    }


def _shape(tensor: Tensor) -> Shape:
    return as_array(tensor[:0] if tensor.dim() else tensor).dtype, tuple(tensor.shape)


def _gathered(engine: Engine, to: int) -> Iterator[tuple[str, int, Tensor | None]]:
    """Collective: (name, first row, rows) of all windows of all tables; rows on rank `to`."""
    for space, row_space in enumerate(engine.state.spaces):
        for table, offset in zip(row_space.tables, row_space.offsets, strict=True):
            for first in range(0, table.rows, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, table.rows)
                rows = torch.arange(offset + first, offset + last)
                values = gather_rows(engine, space, rows, Store.lookup, to)
                yield f"{table.name}.weight", first, values


def _told(path: Path, error: EcrmError | OSError) -> EcrmError:
    if isinstance(error, EcrmError):
        return error
    return EcrmError(f"{path}: cannot be written: {error.strerror or error}")


def _share_trouble(engine: Engine, trouble: EcrmError | None) -> None:
    """Collective: raise the reporter's trouble on every rank."""
    mine = None if trouble is None else [trouble.exit_code, str(trouble)]
    for rank, said in engine.state.transport.gather(mine, "a model was saved").items():
        if said is not None:
            raise EcrmError.of_rank(rank, *said)
