"""The model and data of a run, described for checkpoints: a config's, or a script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ecrm.checkpoint.folder import Checkpoint


class Trained(Protocol):
    """The training of a run, and whether the run may go on from the files of an earlier run.

    An identity is a dict of JSON types with everything that decides the bits of the model. It has
    `rows_seed`, the seed of rows not yet updated by a step; `init_from`, the checksum of the
    checkpoint whose weights the run began with, or None; `data_began`, the step at which the run's
    data began; and `told`, which decides no bits. A run stores its identity in its checkpoints and
    mapped files.
    """

    def steps(self, data_began: int = 0) -> int:
        """The number of steps to train. Raises UsageError or DataError if none can be trained."""

    def identity(
        self, data_began: int = 0, began_as: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The identity; `began_as` is the part returned by `begun_as`, None for a start."""

    def about(self) -> dict[str, Any]:
        """Values that make two starts the same run, for `--resume auto`."""

    def check_identity(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless this run can go on from `path`, with the identity `said`."""

    def check_data(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless the data match the run at `path`, with the identity `said`."""

    def check_init(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless this run can begin with the weights at `path`."""

    def began(self, checkpoint: Checkpoint) -> int:
        """The step at which the data began, for a run that goes on from a checkpoint."""

    def changes(self, said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
        """One line for each difference from the run to go on from."""
