"""What becomes of a run when a rank cannot read its training data: all look at the same rows."""

from __future__ import annotations

import torch

from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.errors import DataError
from ecrm.transport.message import tensors


class Readings:
    """One rank's part in finding out whether the data is bad or only this rank's view of it.

    The rank that meets a DataError interrupts the step, which brings every rank into a recovery
    with nobody dead; after such a recovery all `compare`. So nothing is added to a step in which
    all is well, or to a recovery from a death.
    """

    def __init__(self, engine: Engine, dataset: CriteoDataset) -> None:
        self._engine, self._dataset = engine, dataset
        self._mine: DataError | None = None

    def failed(self, error: DataError) -> None:
        """This rank has met an error: bring all ranks back to the commit.

        Raises Unrecoverable as recoveries do.
        """
        self._mine = error
        self._engine.recovery.doubts = True
        self._engine.recovery.recover("it cannot make sense of its data")

    def compare(self) -> None:
        """Collective, after a recovery that a rank with an error began: read its rows on all ranks.

        If they are bad everywhere, raises DataError with the `speaker` that is to say so, on all
        ranks; if not, raises DataError on those ranks alone that cannot read what others can.
        Raises StepAborted after a failure.
        """
        error = self._read(self._rows_in_doubt())
        bad = self._share(torch.tensor([int(error is not None)]))
        self._engine.recovery.doubts = False
        if error is None:
            return
        if all(int(answer) for answer in bad.values()):
            error.speaker = min(bad)
        raise error

    def _rows_in_doubt(self) -> tuple[int, int]:
        """The rows, from and to, that the lowest rank in trouble could not read."""
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
