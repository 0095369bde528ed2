"""The tables and the first step of a user's script, for `ecrm plan`.

The script runs in this process up to the training of its first session, and no further. Nothing is
trained, and no memory is taken for rows. Imports no torch before a script runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ecrm.base.errors import DataError, EcrmError, ScriptFailed, UsageError
from ecrm.base.wording import counted
from ecrm.config.script import Script

if TYPE_CHECKING:
    from ecrm.run.started import Started, Wanted


@dataclass(frozen=True)
class Survey:
    """What a script trains.

    - `tables`: the number of tables. `slots`: the number of batches in a step.
    - `dense_bytes`: bytes of all parameters but tables.
    - `rows`: for each width of rows, the number of rows, the bytes of a row with its optimizer
      state, and the number of distinct rows looked up by the first step.
    """

    tables: int
    slots: int
    dense_bytes: int
    rows: Sequence[tuple[int, int, int]]

    def in_words(self, script: str) -> str:
        """The survey in a line."""
        rows, looked_up = (sum(each[at] for each in self.rows) for at in (0, 2))
        return (
            f"{script}: {counted(self.tables, 'table')} of {counted(rows, 'row')}, and "
            f"{self.dense_bytes / 1e6:,.1f} MB of other parameters; the first step, of "
            f"{counted(self.slots, 'slot')}, looks up {counted(looked_up, 'row')}, and stands for "
            "all steps"
        )


class _Enough(BaseException):
    """Ends a script at the training of its first session."""


_asked: Callable[[Wanted], None] | None = None
"""Gets the request of a session under survey; `None` in a process without a survey."""


def alone_or_surveyed(alone: Callable[[Wanted], Started]) -> Callable[[Wanted], Started]:
    """The start of a session without ranks: `alone`, or the end of the script under a survey."""
    return alone if _asked is None else _ask


def _ask(wanted: Wanted) -> NoReturn:
    assert _asked is not None
    if wanted.steps:
        _asked(wanted)
    raise _Enough


def survey(script: Script) -> Survey:
    """Survey a script. Raises UsageError, DataError and ScriptFailed as `run_to_training`."""
    return run_to_training(script, _survey)


def _survey(wanted: Wanted) -> Survey:
    from ecrm.placement.tables import row_spaces
    from ecrm.run.memory_check import record_bytes

    rows = [
        (space.rows, record_bytes(space), looked_up)
        for space, looked_up in zip(row_spaces(wanted.tables), wanted.first_rows(), strict=True)
    ]
    return Survey(len(wanted.tables), wanted.slots, _dense_bytes(wanted), rows)


def _dense_bytes(wanted: Wanted) -> int:
    from ecrm.model.module_replica import ModuleReplica

    replica = wanted.make_dense()
    assert isinstance(replica, ModuleReplica)
    own = (each for each in replica.module.parameters() if not each.is_meta)
    return sum(each.numel() * each.element_size() for each in own)


Answer = TypeVar("Answer")


def run_to_training(script: Script, ask: Callable[[Wanted], Answer]) -> Answer:
    """Run a script up to its training, with its output on stderr; returns `ask(wanted)`.

    Raises UsageError if the script trains nothing. Raises DataError for damaged data, and
    ScriptFailed for any other error of the script, after printing the script's traceback.
    """
    from ecrm.process.fork_server import import_at_once

    import_at_once(["ecrm.run.run_script", "ecrm.session.session"])
    from ecrm.run.run_script import quiet_torch, run_as_main
    from ecrm.run.user_frames import own_line, own_traceback

    global _asked
    quiet_torch()
    path, found = str(script.path), list[Answer]()
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    _asked = lambda wanted: found.append(ask(wanted))  # noqa: E731
    sys.argv = [path, *script.arguments]
    sys.path.insert(0, str(script.path.absolute().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run_as_main(path)
    except (_Enough, SystemExit):
        pass
    except EcrmError as error:
        kind = DataError if isinstance(error, DataError) else ScriptFailed
        raise kind(f"{script.typed} failed ({own_line(error, path)}): {error}") from None
    except Exception as error:
        print(own_traceback(error, path), end="", file=sys.stderr, flush=True)
        raise ScriptFailed(f"{script.typed} failed before its training began") from None
    finally:
        _asked = None
        sys.argv, sys.path[:], sys.modules["__main__"] = kept
    if not found:
        raise UsageError(
            f"{script.typed} has ended without training: no session.steps() ran",
            otherwise=f"give the script its own arguments: ecrm plan {script.typed} ... -- WORDS",
        )
    return found[0]
