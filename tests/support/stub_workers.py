"""Workers of a session that live in the process of its simulated ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class StubWorker:
    """As `ecrm.session.workers.Worker`, but it makes things when they are asked for.

    `made` counts what all of them have made.
    """

    made = 0

    def __init__(self, make: Callable[[Any], Any], name: str, others: Iterable[Any] = ()) -> None:
        self._make = make
        self._answers: deque[Any] = deque()

    def ask(self, task: Any) -> None:
        try:
            self._answers.append(self._make(task))
        except Exception as error:
            self._answers.append(error)
        StubWorker.made += 1

    def answer(self) -> Any:
        made = self._answers.popleft()
        if isinstance(made, Exception):
            raise made
        return made

    def close(self) -> None: ...
