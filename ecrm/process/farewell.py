"""What Python does as a program ends, for a process that leaves by os._exit.

Handlers of atexit run, and files that a script has left open are written to their ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import Any

FAREWELL_SECONDS = 10.0
"""How long handlers and files of a script may take; the launch waits longer for its ranks."""


def take_leave(code: int, rank: int, seconds: float = FAREWELL_SECONDS) -> None:
    """Run handlers of atexit, and flush and close open files, as far as `seconds` allow.

    Where they take longer, the process ends here with exit code `code`, and says so. What a handler
    or a file raises is printed, as Python does, and changes nothing. Threads of the script are not
    waited for.
    """
    over = threading.Timer(seconds, _give_up, (code, rank, seconds))
    over.daemon = True
    over.start()
    atexit._run_exitfuncs()
    _close_files()
    over.cancel()


def _close_files() -> None:
    """Close each open file that may be written; the standard streams are flushed alone.

    Text goes into what it is wrapped around. Then come files of Python code, such as those of gzip,
    which write their ends into others, and then those.
    """
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    kept = {id(part) for stream in standard for part in (stream, getattr(stream, "buffer", None))}
    found = [each for each in gc.get_objects() if _is_written(each) and id(each) not in kept]
    for file in (*found, *standard):
        if isinstance(file, io.TextIOWrapper):
            _try(file, "flush")
    for file in sorted(found, key=_depth):
        _try(file, "close")


def _try(file: Any, what: str) -> None:
    """Flush or close a file, and say what comes of it where that fails."""
    try:
        if not file.closed:
            getattr(file, what)()
    except Exception as error:
        with contextlib.suppress(OSError, ValueError):
            name = getattr(file, "name", file)
            print(f"! {name} could not be written: {error}", file=sys.stderr, flush=True)


def _is_written(thing: Any) -> bool:
    try:
        return isinstance(thing, io.IOBase) and not thing.closed and thing.writable()
    except Exception:  # a script's own class, half made or half gone
        return False


def _depth(file: Any) -> int:
    """0 for a file of Python code, 1 for text, 2 for a buffer, 3 for what has none."""
    kinds = (io.TextIOWrapper, io.BufferedWriter | io.BufferedRandom, io.FileIO)
    return next((at for at, kind in enumerate(kinds, 1) if isinstance(file, kind)), 0)


def _give_up(code: int, rank: int, seconds: float) -> None:
    with contextlib.suppress(OSError):
        print(
            f"! rank {rank}: handlers of atexit, or open files, took more than {seconds:g} s, and "
            "were left",
            file=sys.stderr,
            flush=True,
        )
    os._exit(code)
