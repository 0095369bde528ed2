"""What a command waits for, in a line, where that takes longer than one waits without asking."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_SECONDS = 2.0
AGAIN = 5
"""A wait that lasts is told again after so many times the seconds of the last time."""


class Waiting:
    """`waiting("reading the data")` as that begins: if it takes long, `say` gets a line, on a thread.

    It ends as the next begins, or with `over()`.
    """

    def __init__(self, say: Callable[[str], None], after: float = PATIENCE_SECONDS) -> None:
        self._say, self._after = say, after
        self._over = threading.Event()

    def __call__(self, what: str) -> None:
        self.over()
        self._over = threading.Event()
        threading.Thread(target=self._tell, args=(what, self._over), daemon=True).start()

    def over(self) -> None:
        """Nothing is waited for."""
        self._over.set()

    def _tell(self, what: str, over: threading.Event) -> None:
        waited, until = 0.0, self._after
        while not over.wait(until - waited):
            self._say(so_far(what, until))
            waited, until = until, until * AGAIN


def so_far(what: str, seconds: float) -> str:
    """The line about a wait at the start of a run."""
    return f"waiting until {what}: {seconds:.0f} s so far"
