"""What all ranks do together between two steps, however many of them die meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopAgreed

Result = TypeVar("Result")


def sealed(
    engine: Engine,
    work: Callable[[], Generator[Any, None, Result]],
    went_back: Callable[[], None],
) -> Generator[Any, None, Result]:
    """Collective: commit, do `work` on every rank, and return what it gave on this one.

    What `work` yields is passed on. It must not change rows. No row is missing when it begins.
    After a failure all ranks do it again from its start, unless one knows by then that all have
    done it. `went_back` is called after each failure. Raises StepAborted where a failure has undone
    steps, StopAgreed where a rank asks to stop.
    """
    step = engine.step
    while True:
        done: list[Result] = []
        commits = -1
        try:
            engine.heed_stop()
            engine.commit()
            engine.rebuild_all()
            done.append((yield from work()))
            commits = engine.state.commits
            engine.seal()
            return done[0]
        except StepAborted:
            if engine.step != step:
                raise
            went_back()
            if engine.recovery.stopping:
                raise StopAgreed from None
            if done and engine.state.commits > commits:
                return done[0]
