"""Work of all ranks together between two steps, despite deaths meanwhile."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ecrm.base.errors import ScriptFailed
from ecrm.base.wording import named
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopRequested
from ecrm.run.user_code import user_code_of
from ecrm.transport.base import PeerFailure

Result = TypeVar("Result")


def meet(engine: Engine, where: str) -> None:
    """Collective, between steps: check that every rank has come to `where`, in words.

    Raises ScriptFailed on every rank if two ranks have come to different places: the ranks would
    wait for ever. Raises StepAborted after a failure.
    """
    transport, at = engine.state.transport, defaultdict[str, list[int]](list)
    with engine.recovery.recovering():
        places = transport.gather(where)
    for rank, place in places.items():
        at[place].append(rank)
    if len(at) == 1:
        return
    with contextlib.suppress(PeerFailure):
        transport.barrier("others left")  # all ranks must know before the first rank leaves
    fewest_first = sorted(at.items(), key=lambda item: len(item[1]))
    words = [f"{named('rank', ranks)} at {place}" for place, ranks in fewest_first]
    raise ScriptFailed(
        f"the script has come to different places on different ranks: {'; '.join(words)}: call "
        "on every rank what ranks do together, not on the one with session.is_main alone"
    ).on_all_ranks(min(places))


def sealed(
    engine: Engine,
    where: str,
    work: Callable[[], Generator[Any, None, Result]],
    on_recovery: Callable[[], None],
    waits: bool = True,
) -> Generator[Any, None, Result]:
    """Collective: `meet`, commit, do `work` on every rank, and return this rank's result of `work`.

    Values yielded by `work` are passed on. `work` must not change rows, and begins without a
    missing row if it `waits`. After a failure all ranks begin again with `meet`, unless a survivor
    knows of the seal after `work`. `on_recovery` is called after every failure without undone
    steps, and may raise StepAborted. Raises StepAborted after undone steps, StopRequested if a rank
    asks to stop, and the errors of `meet`.
    """
    step, user_code = engine.step, user_code_of(engine)
    while True:
        done: list[Result] = []
        seals = user_code.seals
        try:
            meet(engine, where)
            engine.check_stop()
            engine.commit()
            if waits:
                engine.rebuild_all()
            done.append((yield from work()))
            user_code.seal(engine)
            return done[0]
        except StepAborted:
            # undone steps come first: the caller trains again, and comes back
            if engine.step != step:
                raise
            on_recovery()
            # the recovery has told all ranks of the wish to stop
            if engine.recovery.stopping:
                raise StopRequested from None
            # a survivor was through: no rank does the work again
            if user_code.seals > seals:
                return done[0]
