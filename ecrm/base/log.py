"""Lines of a run as records of the logger "ecrm", each with a rank and a step.

`ecrm.base.console.say` makes a record of each line. `PRINTER` prints the record. Handlers of the
logger then get the record, with the attributes `rank` and `step`. Both are None outside of a rank,
and before the first step. An application may change the logger in any way, and lines are printed
all the same: `ECRM_LOG` alone decides on printing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ecrm.base.errors import UsageError

LOGGER = logging.getLogger("ecrm")
if LOGGER.level == logging.NOTSET:  # an application may have set a level before
    LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # a root logger that prints would print each line again
LOGGER.addHandler(logging.NullHandler())

VARIABLE = "ECRM_LOG"
"""Environment variable with the lowest level of printed lines, a name of LEVELS."""
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

OF_ERRORS = ("ecrm: error: ",)
OF_WARNINGS = ("! ", "ecrm: warning: ", "warning: ")
"""The first words of a line of a level; all other lines are of level INFO."""


@dataclass
class Speaker:
    """The rank of this process, and the step at work."""

    rank: int | None = None
    step: int | None = None


SPEAKER = Speaker()


class Printer(logging.Handler):
    """Prints the message of a record, without any addition.

    Records go to stdout, or to stderr with the attribute `on_stderr`. A lost terminal, and
    a letter unknown to the terminal, cost the line, not the run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if getattr(record, "on_stderr", False) else sys.stdout
        with contextlib.suppress(OSError, ValueError):
            print(record.getMessage(), file=stream, flush=True)


PRINTER = Printer(logging.INFO)


def print_from(environ: Mapping[str, str]) -> None:
    """Print lines from the level in VARIABLE on. Raises UsageError for an unknown level."""
    name = environ.get(VARIABLE) or "info"
    if name.lower() not in LEVELS:
        raise UsageError(
            f"{VARIABLE} is {name}, which is no level",
            otherwise=f"type {VARIABLE}= with one of {', '.join(LEVELS)}",
        )
    PRINTER.setLevel(LEVELS[name.lower()])


def level_of(text: str) -> int:
    """The level of a line, by the first words."""
    if text.startswith(OF_ERRORS):
        return logging.ERROR
    return logging.WARNING if text.startswith(OF_WARNINGS) else logging.INFO


def tell(text: str, step: int | None, on_stderr: bool) -> None:
    """Print a line, and hand the line to the logger's handlers; `step` None: the step at work."""
    level = level_of(text)
    step = SPEAKER.step if step is None else step
    more = {"rank": SPEAKER.rank, "step": step, "on_stderr": on_stderr}
    record = LOGGER.makeRecord(LOGGER.name, level, "", 0, text, (), None, extra=more)
    if level >= PRINTER.level:
        PRINTER.handle(record)
    if LOGGER.isEnabledFor(level):
        try:
            LOGGER.handle(record)
        except Exception:  # a line may come in the middle of a recovery, which must go on
            PRINTER.handleError(record)
