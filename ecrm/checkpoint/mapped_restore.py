"""The way back to the last commit in the mapped files, with `protection.name = "mapped"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ecrm.base.errors import DataError, EcrmError
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View
from ecrm.protection.base import Protection
from ecrm.protection.mapped import MappedProtection
from ecrm.protection.mapped_files.dense_file import DenseFile
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport


def last_commit(committed: Sequence[int], prepared: Sequence[int]) -> int:
    """The commit to restore, from the last `committed` step of each file.

    `prepared` has the last step complete in each file's rows. If all files have reached the newest
    commit of any file, the result is the newest commit: all ranks had agreed on it. Else the result
    is the commit before: every file has seen this commit, or can go back to it.
    """
    newest = max(committed)
    # all ranks had agreed, but some died before noting the commit
    if all(step >= newest for step in prepared):
        return newest
    return min(committed)


class Reopened:
    """Brings the files of the shards hosted on this rank to the last commit; nothing is loaded.

    Implements `engine.rollback.Durable`.
    """

    def restore(
        self,
        transport: Transport,
        layouts: Sequence[RowLayout],
        hosted: dict[ShardSpace, HostedShard],
        protection: Protection,
        view: View,
    ) -> tuple[int, list[Tensor] | None]:
        """As `Durable.restore`."""
        assert isinstance(protection, MappedProtection)
        files = protection.files
        marks = _share(transport, [[file.committed, file.prepared] for file in files.values()])
        every = [mark for said in marks.values() for mark in said]
        step = last_commit([mark[0] for mark in every], [mark[1] for mark in every])

        def go() -> list[Tensor] | None:
            for key, file in files.items():
                file.go_to(step, hosted[key].store)
            protection.stands_at(step)
            return _dense_of(protection, step) if step and transport.rank in view.dense else None

        return step, _on_all(transport, go)


def _dense_of(protection: MappedProtection, step: int) -> list[Tensor]:
    """The dense state of a step, from the first rank's file with the step."""
    for path in sorted(Path(protection.folder).glob("rank*.words")):
        file = DenseFile(protection.folder, path.stem, protection.durable)
        if step in file.steps:
            return file.state(step)
    raise DataError(f"{protection.folder}: no file holds the dense state of step {step}")


def _on_all(transport: Transport, action: Callable[[], Any]) -> Any:
    """Run `action`; return its result if all ranks succeed.

    If `action` raises an EcrmError or OSError on some ranks, every rank raises DataError with the
    text of the lowest of these ranks.
    """
    result, problem = None, ""
    try:
        result = action()
    except EcrmError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    for rank, text in _share(transport, problem).items():
        # all ranks have the same reports, so all raise the same error
        if text:
            raise DataError(text).on_all_ranks(rank)
    return result


def _share(transport: Transport, mine: Any) -> dict[int, Any]:
    """The `mine` of every live rank, sent as JSON, by rank."""
    return transport.gather(mine, "files were reopened")
