"""The errors that a user may see, and every exit code of the program.

The first line of an error's docstring is the error's line in docs/reference/exit-codes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, Self

STOPPED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141
ENDINGS = {
    0: "The command did what it was asked to do. After `ecrm launch`: the run is complete.",
    STOPPED_EXIT_CODE: "The command was stopped by SIGINT or SIGTERM, "
    "and `ecrm launch` by SIGHUP too. "
    "A run that could still stop in order left `stopped.json` in its folder.",
    BROKEN_PIPE_EXIT_CODE: "The reader of the output has gone, as in `ecrm config | head -1`.",
}
"""Exit codes of endings without an error, and their meaning."""


class EcrmError(Exception):
    """The command failed for a reason without an exit code of its own. The message is one line.

    The program ends with `exit_code`.
    """

    exit_code = 1
    told = False  # whether the user has been told already
    speaker: int | None = None
    """Set if all ranks end with this error: the rank that tells the user."""

    def on_all_ranks(self, speaker: int) -> Self:
        """This error, raised by all ranks; the rank `speaker` tells the user."""
        self.speaker = speaker
        return self

    @classmethod
    def of_rank(cls, rank: int, exit_code: int, message: str) -> Self:
        """The error of a rank, to be raised by all ranks."""
        error = cls(message)
        error.exit_code = exit_code
        return error.on_all_ranks(rank)


@dataclass(frozen=True)
class Problem:
    """A problem, in words as `wrong`, and the ways out: a {config key: value} per way.

    `otherwise` is a way out without a config key.
    """

    wrong: str
    ways_out: tuple[Mapping[str, Any], ...] = ()
    otherwise: str = ""

    def __str__(self) -> str:
        words = [
            " and ".join(_setting(key, value) for key, value in way.items())
            for way in self.ways_out
        ]
        advice = [f"set {' or '.join(words)}"] if words else []
        advice += [self.otherwise] if self.otherwise else []
        return f"{self.wrong}: {', or '.join(advice)}" if advice else self.wrong

    def keeping(self, kept: Mapping[str, Any], has: Mapping[str, Any]) -> Problem:
        """The same problem without the ways out that change nothing, once some keys are `kept`.

        `kept` are the keys that must stay, with their values; `has` are the values of the config.
        """
        ways = [{key: kept.get(key, value) for key, value in way.items()} for way in self.ways_out]
        return replace(
            self,
            ways_out=tuple(
                way for way in ways if any(has[key] != value for key, value in way.items())
            ),
        )


class UsageError(EcrmError):
    """Something typed or supplied by the user is wrong: an option, the config, a missing file.

    The message ends in the ways out, as in `Problem`.
    """

    exit_code = 2

    def __init__(self, wrong: str, *ways_out: Mapping[str, Any], otherwise: str = "") -> None:
        super().__init__(str(Problem(wrong, ways_out, otherwise)))
        self.ways_out = ways_out


class StrayRow(UsageError):
    """A training loop asked for a row outside all tables. The run ends on all ranks."""


class Unrecoverable(EcrmError):
    """More was lost than the protection can bring back. The message names ranks and loss."""

    exit_code = 3


class LostTouch(Unrecoverable):
    """Calls between ranks fail again and again, though no rank dies. The message says where."""


class ParityMismatch(Unrecoverable):
    """The last step is done, but the parity held does not match the rows. Do not use the model."""

    exit_code = 5


class NotFinite(Unrecoverable):
    """A loss, or a value for a checkpoint, is NaN or infinite. The message names its origin."""

    exit_code = 6


class NotKept(EcrmError):
    """The run ended, or stopped when asked to, but the checkpoint of its model was not written."""

    exit_code = 7


class ScriptFailed(EcrmError):
    """A script raised an error, killed its ranks, or did not train. Any traceback comes first."""

    exit_code = 8


class ReplicasDiffer(ScriptFailed):
    """The dense part differs between ranks. The message names step, ranks and entries."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"{difference}: the script changes it on some ranks alone; change parameters, learning "
            "rates and buffers in before_step or in the scheduler, which run alike on all ranks"
        )


class DataError(EcrmError):
    """A file exists, but its content is damaged or cut short.

    `rows` is the damaged range, from and to, if known.
    """

    exit_code = 4
    rows: tuple[int, int] = (0, 0)


class ChangedDataError(DataError):
    """A batch made again has different data. The message names step and slot."""


class StrayId(DataError, IndexError):
    """A batch has an id outside its table. The message names feature, table and id."""


def _setting(key: str, value: Any) -> str:
    """A config key with a value as typed behind --set; a list of texts is quoted for the shell."""
    words = f"{key}={_typed(value)}"
    return f"'{words}'" if '["' in words else words


def _typed(value: Any) -> str:
    """A config value in TOML."""
    if isinstance(value, list | tuple):
        inside = (
            dumps(one, ensure_ascii=False) if isinstance(one, str) else _typed(one) for one in value
        )
        return "[" + ",".join(inside) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
