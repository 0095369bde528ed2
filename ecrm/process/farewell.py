"""The work of Python at a program's end, for a process that leaves by os._exit.

Threads of the script are waited for, handlers of atexit run, the script's variables are dropped, to
end objects with a `__del__`, and files still open are written to the end.

Objects that `freeze` has taken out of collections stay out if no object of theirs needs a
collection to end: a collection would copy the pages that the ranks of a host share, 90 MB a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

FAREWELL_SECONDS = 10.0
"""Time limit for a script's threads, handlers and files; the launch waits longer for its ranks."""

LAST_WORDS_SECONDS = 5.0
"""Time for which a rank ending by an error waits for the others before killing itself."""

OTHERS_SECONDS = LAST_WORDS_SECONDS + FAREWELL_SECONDS
"""Time of the other ranks to end, after the exit of a rank with an error."""

_noted: list[Callable[[], Any]] = []
"""Calls that return a frozen file, or a frozen object with a `__del__`; None once it has ended."""
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""Ending one runs its `finally`."""


def freeze() -> None:
    """Take all present objects out of collections of garbage, after a last collection.

    A collection among all objects of torch would stop a rank for 0.1 to 0.4 s, and copy the pages
    that it shares with the process it was forked from.
    """
    gc.collect()
    _noted.extend(_notes(gc.get_objects()))
    gc.freeze()


def _notes(things: list[Any]) -> Iterator[Callable[[], Any]]:
    """Notes of all things that do work when they end."""
    known: dict[int, bool] = {}  # by type; a type's own class may lack a hash
    for thing in things:
        kind = type(thing)
        if id(kind) not in known:
            known[id(kind)] = _ends_with_work(kind)
        if known[id(kind)]:
            try:
                yield weakref.ref(thing)
            except TypeError:  # no weak reference is possible
                yield lambda: True


def _ends_with_work(kind: type) -> bool:
    try:
        return hasattr(kind, "__del__") or issubclass(kind, _GENERATORS)
    except Exception:  # a script's own class
        return True


def take_leave(code: int, rank: int, seconds: float = FAREWELL_SECONDS) -> None:
    """Do the work of a program's end, in Python's order, within `seconds`.

    After `seconds` the process ends here with exit code `code`, and says so. An error of a handler
    or a file is printed, as Python does, and changes nothing. Daemon threads are not waited for.
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
    """Drop the main module's variables, as Python does, to end unreferenced objects."""
    threading.excepthook = lambda *_: None  # daemon threads may still use the variables
    vars(sys.modules["__main__"]).clear()
    # files are written in any case; a cycle of all else that is left may need a collection
    if not all(issubclass(type(note()), io.IOBase | None) for note in _noted):
        gc.unfreeze()
    gc.collect()


def _close_files() -> None:
    """Close each open writable file; only flush the standard streams.

    Text streams are flushed first. Then files of Python code are closed, such as gzip files, which
    write their ends into other files; then text files, buffers and raw files.
    """
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    kept = {id(part) for stream in standard for part in (stream, getattr(stream, "buffer", None))}
    there = {id(each): each for each in (*gc.get_objects(), *(note() for note in _noted))}
    found = [each for at, each in there.items() if at not in kept and _is_written(each)]
    for file in (*found, *standard):
        if isinstance(file, io.TextIOWrapper):
            _try(file, "flush")
    for file in sorted(found, key=_depth):
        _try(file, "close")


def _try(file: Any, what: str) -> None:
    """Flush or close a file; print an error."""
    try:
        if not file.closed:
            getattr(file, what)()
    except Exception as error:
        with contextlib.suppress(OSError, ValueError):
            name = getattr(file, "name", file)
            print(f"! {name} could not be written: {error}", file=sys.stderr, flush=True)


def _is_written(thing: Any) -> bool:
    try:
        is_file = issubclass(type(thing), io.IOBase)  # isinstance would run the object's code
        return is_file and not thing.closed and thing.writable()
    except Exception:  # a script's own class, half made or half gone
        return False


def _depth(file: Any) -> int:
    """0 for a file of Python code, 1 for text, 2 for a buffer, 3 for a raw file."""
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
