"""Loading a checkpoint: each rank reads some files, and sends each record to its host.

Each rank sends one frame at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.checkpoint.compatibility import same_bits
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find
from ecrm.checkpoint.manifest import DENSE, Manifest
from ecrm.checkpoint.row_file import read_rows
from ecrm.engine.record_delivery import Message, address, by_shard, place
from ecrm.errors import DataError, EcrmError
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View
from ecrm.protection.base import Protection
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport
from ecrm.transport.piggyback import exchange_rounds


class Restorer:
    """Restores a run from its own checkpoints or, until there is one, those it was resumed from.

    It is an `engine.rollback.Durable`. Without either it is the undisturbed start, unless the run
    was resumed: step 0, with the weights of `begins_with`, if given. `say` gets a line for each
    checkpoint that is refused, on one rank. Of those in its folder the run's own have its
    `identity`, if that is given. The same folders must be seen by all ranks. `loaded` is the last
    one loaded.
    """

    def __init__(
        self,
        own: CheckpointFolder | None,
        resumed: Sequence[Checkpoint] = (),
        say: Callable[[str], None] = lambda line: None,
        identity: dict[str, Any] | None = None,
        begins_with: Checkpoint | None = None,
    ) -> None:
        self._own, self._resumed, self._say = own, [checkpoint.path for checkpoint in resumed], say
        self._identity, self._begins_with = identity, begins_with
        self.loaded: Checkpoint | None = None

    def restore(
        self,
        transport: Transport,
        layouts: Sequence[RowLayout],
        hosted: dict[ShardSpace, HostedShard],
        protection: Protection,
        view: View,
    ) -> tuple[int, list[Tensor] | None]:
        """Collective: load the newest checkpoint in which every file has the right content.

        All ranks check the files together. Returns what `Durable.restore` does: the steps that are
        in it and the dense state.
        """
        first = transport.rank == transport.live[0]
        whole, refused = find(self._own.path) if first and self._own is not None else ([], [])
        if self._identity is not None:
            whole = [
                checkpoint
                for checkpoint in whole
                if same_bits(checkpoint.manifest.identity, self._identity)
            ]
        offered = [
            str(path) for path in (*(checkpoint.path for checkpoint in whole), *self._resumed)
        ]
        for path in _from_first(transport, offered):
            checkpoint, problem = _checked(transport, Path(path), layouts, hosted)
            if checkpoint is not None:
                if first:
                    self._tidy(refused, checkpoint.step)
                _load(checkpoint, transport, layouts, hosted, protection, view)
                self.loaded = checkpoint
                return checkpoint.step, read_dense(checkpoint)
            refused.append(f"checkpoint {path} is not used: {problem}")
        if self._resumed:
            raise _on_all(
                transport,
                f"no checkpoint is left to go on from: {refused[-1]}"
                if refused
                else "no checkpoint is left",
            )
        if first:
            self._tidy(refused, 0)
        if self._begins_with is None:
            return 0, None
        checkpoint, problem = _checked(transport, self._begins_with.path, layouts, {})
        if checkpoint is None:
            raise _on_all(transport, f"the weights to begin with cannot be read: {problem}")
        _load(checkpoint, transport, layouts, hosted, protection, view, begins=True)
        return 0, read_dense(checkpoint)[:1]

    def _tidy(self, refused: list[str], step: int) -> None:
        """Say which checkpoints were refused, and remove this run's own ones after `step`.

        Those steps are done again.
        """
        for line in refused:
            self._say(line)
        with contextlib.suppress(OSError):
            if self._own is not None:
                self._own.discard_after(step)


def _on_all(transport: Transport, text: str) -> DataError:
    """An error that all ranks have, and the lowest is to say."""
    error = DataError(text)
    error.speaker = transport.live[0]
    return error


def _from_first(transport: Transport, paths: list[str]) -> list[str]:
    """What the lowest live rank says, on all ranks."""
    said: list[str] = transport.gather(paths, "a checkpoint was looked for")[transport.live[0]]
    return said


def _checked(
    transport: Transport,
    path: Path,
    layouts: Sequence[RowLayout],
    hosted: dict[ShardSpace, HostedShard],
) -> tuple[Checkpoint | None, str]:
    """Collective: a checkpoint, or the lowest rank's reason to refuse it.

    Each rank checks some of the files. The row spaces must be those of `layouts`, and records as
    wide as those of `hosted`: tables of other widths or optimizers are laid out otherwise.
    """
    checkpoint, problem = None, ""
    try:
        checkpoint = Checkpoint.open(path)
        files = [(link, entry) for link in checkpoint.chain for entry in link.manifest.files]
        for link, entry in _share_of(transport, files):
            link.check(entry)
        problem = _other_spaces(checkpoint.manifest, layouts, hosted)
    except EcrmError as error:
        problem = str(error)
    said = [problem, checkpoint.manifest.checksum if checkpoint else 0]
    verdicts = list(transport.gather(said, "a checkpoint was checked").values())
    problems = [f"{text}" for text, _ in verdicts if text]
    if not problems and len({checksum for _, checksum in verdicts}) > 1:
        problems = [
            "ranks see different files under this name: "
            "it must be on storage that all of them share"
        ]
    return (None, problems[0]) if problems else (checkpoint, "")


def _other_spaces(
    manifest: Manifest,
    layouts: Sequence[RowLayout],
    hosted: dict[ShardSpace, HostedShard],
) -> str:
    """How a checkpoint's row spaces differ from those of this run, or nothing."""
    rows = [layout.rows for layout in layouts]
    if manifest.space_rows != rows:
        return f"its row spaces have {manifest.space_rows} rows, those of these tables {rows}"
    for (_, space), here in sorted(hosted.items()):
        said, wide = manifest.record_bytes[space], here.store.kept_bytes
        if said != wide:
            return f"its records of row space {space} have {said} bytes, with this optimizer {wide}"
    return ""


def _share_of(transport: Transport, items: list[Any], rank: int | None = None) -> list[Any]:
    """The items that fall to a live rank, by default this one."""
    return items[
        transport.live.index(transport.rank if rank is None else rank) :: len(transport.live)
    ]


def _load(
    checkpoint: Checkpoint,
    transport: Transport,
    layouts: Sequence[RowLayout],
    hosted: dict[ShardSpace, HostedShard],
    protection: Protection,
    view: View,
    begins: bool = False,
) -> None:
    """Collective: place the rows of a checkpoint and of those it adds to, the oldest first.

    So each row ends with its newest record. Where a run `begins` with them, only the values are
    taken.
    """
    for link in checkpoint.chain:
        files = link.manifest.row_files
        frames = _frames(link, _share_of(transport, files))
        rounds = max(
            sum(entry["frames"] for entry in _share_of(transport, files, rank))
            for rank in transport.live
        )
        for _ in range(rounds):
            outgoing: Message = {}
            for space, numbers, records in islice(frames, 1):
                for shard, here, local in by_shard(layouts[space], numbers):
                    address(outgoing, view, shard, space, local, records[here])
            deltas = place(transport.exchange(outgoing), hosted, begins)
            exchange_rounds(transport, protection.protect(deltas, view))
            protection.committed()


def _frames(link: Checkpoint, files: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(space, row numbers, records) of every frame of some files."""
    for entry in files:
        space = entry["space"]
        manifest = link.manifest
        for numbers, records in read_rows(
            link.path / entry["name"], manifest.record_bytes[space], manifest.space_rows[space]
        ):
            yield space, torch.from_numpy(numbers), torch.from_numpy(records)


def read_dense(checkpoint: Checkpoint) -> list[Tensor]:
    """The dense state of a checkpoint, as it was exported."""
    data = (checkpoint.path / DENSE).read_bytes()
    tensors, at = [], 0
    for entry in checkpoint.manifest.dense:
        dtype = np.dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        part = np.frombuffer(data, dtype, count, at).reshape(entry["shape"]).copy()
        tensors.append(torch.from_numpy(part))
        at += part.nbytes
    return tensors
