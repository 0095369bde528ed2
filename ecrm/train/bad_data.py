"""The check after a rank cannot read its training data: all ranks read the same rows."""

from __future__ import annotations

import torch

from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.errors import DataError
from ecrm.transport.message import tensors


class Readings:
    """One rank's part in finding out whether the data is bad everywhere or only on the rank.

    A rank with a DataError interrupts the step, and every rank enters a recovery without a dead
    rank. After such a recovery all ranks `compare`. So steps without errors, and recoveries from a
    death, need no extra work.
    """

    def __init__(self, engine: Engine, dataset: CriteoDataset) -> None:
        self._engine, self._dataset = engine, dataset
        self._mine: DataError | None = None

    def failed(self, error: DataError) -> None:
        """After an error on the present rank: bring all ranks back to the commit.

        Raises Unrecoverable as recoveries do.
        """
        self._mine = error
        self._engine.recovery.doubts = True
        self._engine.recovery.recover("it cannot make sense of its data")

    def compare(self) -> None:
        """Collective, after a recovery begun for an error: read the failed rows on all ranks.

        If the rows are bad on all ranks, raises DataError on all ranks, with the `speaker` to
        report the error. Otherwise raises DataError only on ranks unable to read the rows. Raises
        StepAborted after a failure.
        """
        error = self._read(self._rows_in_doubt())
        bad = self._share(torch.tensor([int(error is not None)]))
        self._engine.recovery.doubts = False
        if error is None:
            return
        if all(int(answer) for answer in bad.values()):
            raise error.on_all_ranks(min(bad))
        raise error

    def _rows_in_doubt(self) -> tuple[int, int]:
        """The rows, from and to, unreadable on the lowest rank in trouble."""
        mine = () if self._mine is None else self._mine.rows
        asked = [
            answer
            for _, answer in sorted(self._share(torch.tensor(mine, dtype=torch.int64)).items())
            if answer.numel()
        ]
        return tuple(asked[0].tolist())

    def _read(self, rows: tuple[int, int]) -> DataError | None:
        try:
            self._dataset.check_rows(*rows)
        except DataError as error:
            return error
        return self._mine

    def _share(self, mine: torch.Tensor) -> dict[int, torch.Tensor]:
        with self._engine.recovery.recovering():
            shared = self._engine.state.transport.share([mine])
            self._engine.state.transport.agree(True)
            return {rank: tensors(parts)[0] for rank, parts in shared.items()}
