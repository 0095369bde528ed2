"""What a run trains, as far as others must know it: the built-in model, or a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ecrm.checkpoint.folder import Checkpoint


class Trained(Protocol):
    """What a run trains, and whether it may go on from what another run has left.

    An identity is a dict that JSON has: all that the bits of the model depend on. It has
    `rows_seed`, the seed of rows that no step has updated; `init_from`, the checksum of the
    checkpoint whose weights the run began with, or None; `data_began`, the step at which its data
    began; and `told`, on which no bits depend. A run stores its identity with what it leaves.
    """

    def steps(self, data_began: int = 0) -> int:
        """How many steps are trained. Raises UsageError and DataError where none can be."""

    def identity(
        self, data_began: int = 0, began_as: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The identity; `began_as` is that part of it as `begun_as` gives it, None for a start."""

    def about(self) -> dict[str, Any]:
        """What makes two starts the same run, for `--resume auto`."""

    def check_identity(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless this can go on from `path`, whose identity is `said`."""

    def check_data(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless the data are those of the run at `path`."""

    def check_init(self, path: Path, said: dict[str, Any]) -> None:
        """Raise UsageError unless this can begin with the weights at `path`."""

    def began(self, checkpoint: Checkpoint) -> int:
        """The step at which the data began, for a run that goes on from a checkpoint."""

    def changes(self, said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
        """One line for each thing that differs from the run to go on from."""
