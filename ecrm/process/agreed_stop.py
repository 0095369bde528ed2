"""All ranks find out why one has asked to stop.

The reason is a signal, or a run folder that the rank cannot write.
"""

from __future__ import annotations

import os
import signal
import sys

from ecrm.engine.engine import Engine
from ecrm.errors import EcrmError
from ecrm.run.run_folder import RunFolder


def agree_on_stop(
    engine: Engine, mine: signal.Signals | None, folder: RunFolder
) -> signal.Signals | None:
    """Collective, after StopAgreed: the signal that some rank has got, the same on all ranks.

    None when no rank has got one. A reporter that cannot write while others can dies here, so that
    another takes over. Raises EcrmError on every rank when none can write, and StepAborted after a
    failure.
    """
    with engine.recovery.recovering():
        wanting = engine.state.transport.gather(folder.unwritten_bytes)
        # who cannot write that much must not take over
        folder.probe(max(wanting.values()))
        shared = engine.state.transport.gather([mine or 0, folder.trouble or ""])
        engine.state.transport.agree(True)  # nobody acts on what not all have heard
    engine.recovery.stopping = False
    reporter = engine.view.reporter
    troubles = {rank: trouble for rank, (_, trouble) in shared.items() if trouble}
    if len(troubles) == len(shared):
        error = EcrmError(
            f"no rank can write into the run folder, so the run ends: {troubles[reporter]}"
        )
        error.speaker = reporter
        raise error
    if reporter in troubles:
        if engine.rank == reporter:
            print(
                f"ecrm: error: rank {reporter} {troubles[reporter]}; it leaves the run",
                file=sys.stderr,
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    signals = [int(number) for number, _ in shared.values() if int(number)]
    return signal.Signals(signals[0]) if signals else None
