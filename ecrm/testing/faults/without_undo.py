"""An engine without undo: a fault for showing the need for the undo log."""

from __future__ import annotations

from ecrm.engine.engine import Engine


def leave_updates_in_place(engine: Engine) -> None:
    """Let recoveries keep uncommitted updates from now on, so the model becomes wrong."""
    state = engine.state

    def keep() -> None:
        committed, commits, state.reshape = state.committed, state.commits, None
        state.accept_commit()
        state.committed, state.commits = committed, commits

    state.undo = keep  # type: ignore[method-assign]
