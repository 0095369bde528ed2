"""Tell all ranks the reason of a requested stop.

The reason is a signal, or a run folder that a rank cannot write.
"""

from __future__ import annotations

import os
import signal

from ecrm.base.console import say
from ecrm.base.errors import EcrmError
from ecrm.engine.engine import Engine
from ecrm.run.run_folder import RunFolder


def agree_on_stop(
    engine: Engine, mine: signal.Signals | None, folder: RunFolder
) -> signal.Signals | None:
    """Collective, after StopRequested: return one received signal, the same on all ranks.

    `None` if no rank has received a signal, or if the reporter leaves: a reporter unable to write
    while other ranks can write dies here, to let another rank take over. Raises EcrmError on every
    rank when no rank can write, and StepAborted after a failure.
    """
    with engine.recovery.recovering():
        wanting = engine.state.transport.gather(folder.unwritten_bytes)
        # a rank unable to write so much must not take over
        folder.probe(max(wanting.values()))
        # ranks act only on data heard by all
        shared = engine.state.transport.gather(
            [mine or 0, folder.trouble or ""], "others told of a stop"
        )
    engine.recovery.stopping = False
    reporter = engine.view.reporter
    troubles = {rank: trouble for rank, (_, trouble) in shared.items() if trouble}
    if len(troubles) == len(shared):
        raise EcrmError(
            f"no rank can write into the run folder, so the run ends: {troubles[reporter]}"
        ).on_all_ranks(reporter)
    if reporter in troubles:
        if engine.rank == reporter:
            say(
                f"ecrm: error: rank {reporter} {troubles[reporter]}; it leaves the run",
                on_stderr=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    signals = [int(number) for number, _ in shared.values() if int(number)]
    return signal.Signals(signals[0]) if signals else None
