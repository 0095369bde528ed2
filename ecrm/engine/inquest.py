"""Questions of a recovery about the ends of ranks, to the code around the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ecrm.base.errors import EcrmError
from ecrm.engine.events import Event


@dataclass(frozen=True)
class Leaving:
    """Live ranks that are to leave the run. The same on all ranks.

    - `errors`: the error of each of the ranks, in words.
    - `again`: the reason against another try of the work, in words; "" for no reason.
    - `risky`: whether another try may end the trying rank, too.
    - `kind`: the class of the error, if the error ends the run.
    """

    errors: Mapping[int, str]
    again: str
    risky: bool
    kind: type[EcrmError]

    def ending(self, reason: str) -> EcrmError:
        """The error for all ranks, if the run ends for a `reason`."""
        speaker, error = next(iter(self.errors.items()))
        return self.kind(f"{error} ({reason})").on_all_ranks(speaker)


class Inquest:
    """The inquest into the ends of ranks, held in every recovery. The base class finds nothing.

    The engine carries the findings of a rank to all ranks, as a text that the engine never reads. A
    broken recovery asks again from `find` on.
    """

    def begin(self) -> None:
        """Begin a new recovery: findings of earlier recoveries count no more."""

    def find(self, dead: Mapping[int, Sequence[int]]) -> str:
        """The findings of this rank, as a text for all ranks. `dead`: the slots of dead ranks."""
        return ""

    def hear(
        self,
        findings: Iterable[str],
        step: int,
        phase: str,
        live: Sequence[int],
        newcomers: Collection[int] = (),
    ) -> Leaving | None:
        """Take the findings of all ranks on deaths noticed in a phase of a step.

        Findings on `newcomers` are about earlier processes of the ranks, and count no more.

        Returns the same on all `live` ranks. Raises an EcrmError with a `speaker` on all ranks, to
        end the run.
        """
        return None

    def in_words(self, dead: Iterable[int]) -> str:
        """The findings on `dead` ranks, to be appended to an error; "" without findings."""
        return ""

    def events(self, dead: Iterable[int]) -> Sequence[Event]:
        """The events about `dead` ranks, once the recovery is through."""
        return ()
