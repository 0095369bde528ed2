"""Loading a checkpoint: each rank reads some files, and sends each record to its host.

Each rank sends a single piece of a file at a time (`row_file.READ_BYTES`).
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

from ecrm.base.errors import DataError, EcrmError
from ecrm.checkpoint.compatibility import same_bits
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find
from ecrm.checkpoint.manifest import DENSE, Manifest
from ecrm.checkpoint.row_file import most_pieces, read_rows
from ecrm.engine.record_delivery import Message, address, by_shard, place
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View
from ecrm.protection.base import Protection
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport
from ecrm.transport.piggyback import exchange_rounds


class Restorer:
    """Restores a run from its own checkpoints, else from the checkpoints it was resumed from.

    Implements `engine.rollback.Durable`. Without any checkpoint the result is the undisturbed
    start, step 0, with the weights of `begins_with`, if given; a resumed run fails instead. `say`
    gets a line for each refused checkpoint, on the lowest live rank. With `identity`, checkpoints
    in the run's own folder count only if of the same identity. All ranks must see the same folders.
    `loaded` is the last checkpoint loaded.
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

        All ranks check the files together. Returns as `Durable.restore` the number of steps in the
        checkpoint, and the dense state.
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
        # ranks may see different folders: all try the lowest rank's checkpoints
        for path in _from_first(transport, offered):
            checkpoint, problem = _checked(transport, Path(path), layouts, hosted)
            # all ranks get the same verdict, so all load the same checkpoint
            if checkpoint is not None:
                if first:
                    self._tidy(refused, checkpoint.step)
                _load(checkpoint, transport, layouts, hosted, protection, view)
                self.loaded = checkpoint
                return checkpoint.step, read_dense(checkpoint)
            refused.append(f"checkpoint {path} is not used: {problem}")
        # a resumed run has no start of its own to go back to
        if self._resumed:
            raise _on_all(
                transport,
                f"no checkpoint is left to go on from: {refused[-1]}"
                if refused
                else "no checkpoint is left",
            )
        # the run begins anew: the steps of checkpoints left in the folder are done again
        if first:
            self._tidy(refused, 0)
        # rows still hold their initial values
        if self._begins_with is None:
            return 0, None
        checkpoint, problem = _checked(transport, self._begins_with.path, layouts, {})
        if checkpoint is None:
            raise _on_all(transport, f"the weights to begin with cannot be read: {problem}")
        _load(checkpoint, transport, layouts, hosted, protection, view, begins=True)
        return 0, read_dense(checkpoint)[:1]

    def _tidy(self, refused: list[str], step: int) -> None:
        """Say which checkpoints were refused, and remove this run's own checkpoints after `step`.

        The removed steps are done again.
        """
        for line in refused:
            self._say(line)
        with contextlib.suppress(OSError):
            if self._own is not None:
                self._own.discard_after(step)


def _on_all(transport: Transport, text: str) -> DataError:
    """An error raised on all ranks, and told by the lowest live rank."""
    return DataError(text).on_all_ranks(transport.live[0])


def _from_first(transport: Transport, paths: list[str]) -> list[str]:
    """The paths of the lowest live rank, on all ranks."""
    said: list[str] = transport.gather(paths, "a checkpoint was looked for")[transport.live[0]]
    return said


def _checked(
    transport: Transport,
    path: Path,
    layouts: Sequence[RowLayout],
    hosted: dict[ShardSpace, HostedShard],
) -> tuple[Checkpoint | None, str]:
    """Collective: a checkpoint, or the lowest rank's reason to refuse the checkpoint.

    Each rank checks some of the files. The row spaces must match `layouts`, and the record widths
    `hosted`: tables of other widths or optimizers are laid out differently.
    """
    checkpoint, problem = None, ""
    try:
        checkpoint = Checkpoint.open(path)
        files = [(link, entry) for link in checkpoint.chain for entry in link.manifest.files]
        for link, entry in _share_of(transport, files):
            link.check(entry)
        problem = _other_spaces(checkpoint.manifest, layouts, hosted)
    # not raised: the rank must stay in the collective calls, and all refuse together
    except EcrmError as error:
        problem = str(error)
    said = [problem, checkpoint.manifest.checksum if checkpoint else 0]
    verdicts = list(transport.gather(said, "a checkpoint was checked").values())
    problems = [f"{text}" for text, _ in verdicts if text]
    # each rank checked only its share, so the shares must be of the same checkpoint
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
    """The difference between a checkpoint's row spaces and this run's, or "" without any."""
    rows = [layout.rows for layout in layouts]
    if manifest.space_rows != rows:
        return f"its row spaces have {manifest.space_rows} rows, those of these tables {rows}"
    for (_, space), here in sorted(hosted.items()):
        said, wide = manifest.record_bytes[space], here.store.kept_bytes
        if said != wide:
            return f"its records of row space {space} have {said} bytes, with this optimizer {wide}"
    return ""


def _share_of(transport: Transport, items: list[Any], rank: int | None = None) -> list[Any]:
    """The items for one live rank to handle, by default for this rank."""
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
    """Collective: place the rows of a checkpoint's chain, the oldest checkpoint first.

    So each row ends with its newest record. If a run `begins` with the rows, only the values are
    taken.
    """
    for link in checkpoint.chain:
        files, widths = link.manifest.row_files, link.manifest.record_bytes
        pieces = _pieces(link, _share_of(transport, files))
        rounds = max(
            sum(
                most_pieces(entry, widths[entry["space"]])
                for entry in _share_of(transport, files, rank)
            )
            for rank in transport.live
        )
        for _ in range(rounds):
            outgoing: Message = {}
            for space, numbers, records in islice(pieces, 1):
                for shard, here, local in by_shard(layouts[space], numbers):
                    address(outgoing, view, shard, space, local, records.index_select(0, here))
            received = transport.exchange(outgoing)
            deltas = place(received, hosted, begins, protection.keeps_deltas)
            exchange_rounds(transport, protection.protect(deltas, view))
            protection.committed()


def _pieces(link: Checkpoint, files: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(space, row numbers, records) of every piece of some files."""
    for entry in files:
        space = entry["space"]
        manifest = link.manifest
        for numbers, records in read_rows(
            link.path / entry["name"], manifest.record_bytes[space], manifest.space_rows[space]
        ):
            yield space, torch.from_numpy(numbers), torch.from_numpy(records)


def read_dense(checkpoint: Checkpoint) -> list[Tensor]:
    """The dense state of a checkpoint, as exported."""
    data = (checkpoint.path / DENSE).read_bytes()
    tensors, at = [], 0
    for entry in checkpoint.manifest.dense:
        dtype = np.dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        part = np.frombuffer(data, dtype, count, at).reshape(entry["shape"]).copy()
        tensors.append(torch.from_numpy(part))
        at += part.nbytes
    return tensors
