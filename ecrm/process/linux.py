"""What Linux is to do with this process when its parent ends: prctl(2), looked up at import, so that a child just forked may call it."""

from __future__ import annotations

import ctypes

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def when_parent_ends(number: int) -> None:
    """Get that signal as soon as the thread that started this process has ended; 0 for none. Of this thread alone."""
    _prctl(_PR_SET_PDEATHSIG, number)
