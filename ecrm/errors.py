"""The errors that a user may see, each with the exit code it ends the program with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


class EcrmError(Exception):
    """An error whose message is one clear line for the user; ends the program with `exit_code`."""

    exit_code = 1
    told = False  # whether the user has been told already


@dataclass(frozen=True)
class Problem:
    """What is `wrong`, and the ways out of it: {config key: value} each. `otherwise` is one that is not a config key."""

    wrong: str
    ways_out: tuple[Mapping[str, Any], ...] = ()
    otherwise: str = ""

    def __str__(self) -> str:
        words = [
            " and ".join(f"{key}={_typed(value)}" for key, value in way.items())
            for way in self.ways_out
        ]
        advice = [f"set {' or '.join(words)}"] if words else []
        advice += [self.otherwise] if self.otherwise else []
        return f"{self.wrong}: {', or '.join(advice)}" if advice else self.wrong

    def keeping(self, kept: Mapping[str, Any], has: Mapping[str, Any]) -> Problem:
        """The same where these keys must be `kept` as given, and a config `has` these values: no way out is to change one that is."""
        ways = [{key: kept.get(key, value) for key, value in way.items()} for way in self.ways_out]
        return replace(
            self,
            ways_out=tuple(
                way for way in ways if any(has[key] != value for key, value in way.items())
            ),
        )


class UsageError(EcrmError):
    """Something the user typed or supplied is wrong: config, data, rank count, missing file.

    The message ends in the ways out, as `Problem` has them.
    """

    exit_code = 2

    def __init__(self, wrong: str, *ways_out: Mapping[str, Any], otherwise: str = "") -> None:
        super().__init__(str(Problem(wrong, ways_out, otherwise)))
        self.ways_out = ways_out


class Unrecoverable(EcrmError):
    """More was lost than the protection in use can bring back; names the ranks and what was lost."""

    exit_code = 3


class LostTouch(Unrecoverable):
    """Calls between ranks fail again and again though no rank dies; says where and how."""


class ParityMismatch(Unrecoverable):
    """The run came to its end, but the check of parity found stripes whose rows and parity do not belong together."""

    exit_code = 5


class NotFinite(Unrecoverable):
    """A loss, or what a checkpoint was to hold, is NaN or infinite; says where that began."""

    exit_code = 6


class NotKept(EcrmError):
    """The run came to its end, or has stopped when asked to, but the checkpoint that was to keep its model could not be written."""

    exit_code = 7


class DataError(EcrmError):
    """A file exists but its content is damaged or truncated; `rows`, from and to, says where, if that is known."""

    exit_code = 4
    rows: tuple[int, int] = (0, 0)


def _typed(value: Any) -> str:
    """A config value the way it is typed behind --set."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_typed, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
