"""The place of an error in a user's own code."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

import ecrm

_ECRM = f"{Path(ecrm.__file__).parent}/"
_OTHERS = (_ECRM, *map(sysconfig.get_path, ("stdlib", "purelib")), "<")
_COLLATE = "/torch/utils/data/"
"""Part of the path of torch's default_collate, treated like a user's own collate."""


def _is_own(file: str, script: str) -> bool:
    return file == script or not file.startswith(_OTHERS)


def own_line(error: BaseException, script: str) -> str:
    """FILE:LINE of the innermost frame of the user's code in an error; "" without user code."""
    own = [
        f"{Path(frame.f_code.co_filename).name}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_own(frame.f_code.co_filename, script)
    ]
    return own[-1] if own else ""


def whole_numbers() -> dict[str, int]:
    """The whole numbers among the variables of the innermost running function of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_own(frame.f_code.co_filename, ""):
        frame = frame.f_back
    code = frame.f_code
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    variables = frame.f_locals
    return {name: variables[name] for name in names if type(variables.get(name)) is int}


def own_traceback(error: BaseException, script: str = "") -> str:
    """The traceback of an error in the user's code, from the script's first frame on.

    Frames of ecrm between frames of the user are left out. Frames called by the innermost frame of
    the user stay. If the error has a cause, all frames of ecrm are left out.
    """
    told = traceback.TracebackException.from_exception(error)
    files = [frame.filename for frame in told.stack]
    if script:
        del told.stack[: files.index(script) if script in files else len(files)]
    _leave_out(told, script)
    return "".join(told.format())


def _leave_out(told: traceback.TracebackException, script: str) -> None:
    own = [
        place
        for place, frame in enumerate(told.stack)
        if _is_own(frame.filename, script) or _COLLATE in frame.filename
    ]
    last = len(told.stack) if told.__cause__ else max(own, default=-1)
    told.stack[:] = [
        frame
        for place, frame in enumerate(told.stack)
        if place > last or not frame.filename.startswith(_ECRM)
    ]
    for before in (told.__cause__, told.__context__):
        if before is not None:
            _leave_out(before, script)
