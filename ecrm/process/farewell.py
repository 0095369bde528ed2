"""What Python does as a program ends, for a process that leaves by os._exit.

Threads of the script are waited for, handlers of atexit run, the script's variables are dropped, so
that objects with a `__del__` end, and files that are still open are written to their ends.
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
    """Do what a program's end does, in Python's order, as far as `seconds` allow.

    Where it takes longer, the process ends here with exit code `code`, and says so. What a handler
    or a file raises is printed, as Python does, and changes nothing. Daemon threads are not waited
    for.
    """
    over = threading.Timer(seconds, _give_up, (code, rank, seconds))
    over.daemon = True
    over.start()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _drop_variables()
    _close_files()
    over.cancel()


def _drop_variables() -> None:
    """Drop the main module's variables, as Python does: what nobody refers to any more ends."""
    threading.excepthook = lambda *_: None  # daemon threads may still use them
    vars(sys.modules["__main__"]).clear()
    gc.unfreeze()  # the session has frozen all that was there before it
    gc.collect()


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
        is_file = issubclass(type(thing), io.IOBase)  # isinstance would ask the object itself
        return is_file and not thing.closed and thing.writable()
    except Exception:  # a script's own class, half made or half gone
        return False


def _depth(file: Any) -> int:
    """0 for a file of Python code, 1 for text, 2 for a buffer, 3 for what has none."""
    kinds = (io.TextIOWrapper, io.BufferedWriter | io.BufferedRandom, io.FileIO)
    return next((at for at, kind in enumerate(kinds, 1) if isinstance(file, kind)), 0)


def _give_up(code: int, rank: int, seconds: float) -> None:
    with contextlib.suppress(OSError):
        print(
            f"! rank {rank}: threads, handlers of atexit, or open files, took more than "
            f"{seconds:g} s, and were left",
            file=sys.stderr,
            flush=True,
        )
    os._exit(code)
