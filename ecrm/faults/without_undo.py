"""An engine that takes nothing back: the fault that shows what undoing is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecrm.engine.engine import Engine


def leave_updates_in_place(engine: Engine) -> None:
    """From now on a recovery keeps what was not committed, so that the model becomes wrong."""
    state = engine.state

    def keep() -> None:
        committed, commits, state.reshape = state.committed, state.commits, None
        state.accept_commit()
        state.committed, state.commits = committed, commits

    state.undo = keep  # type: ignore[method-assign]
