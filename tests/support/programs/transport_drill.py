"""Steps in which ranks kill themselves at random instants; survivors stay in step.

On MPI, or on links as `support.link_ranks` starts it.

    mpirun --with-ft ulfm --oversubscribe -n RANKS python transport_drill.py RESULT_FOLDER
    poll|sleep SEED KILLS STEPS

Each step ends with agree(True). After a failure the ranks compare how far they are: never more than
one step apart, and the larger number is right. What a rank that waits does is the second word. All
received data is checked, word by word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ecrm.transport.base import PeerFailure, Transport
from support.link_ranks import figures_of, transport_here

SECONDS = 150


def drill(transport: Transport, seed: int, kills: int, steps: int) -> dict[str, object]:
    draw = Random(seed)
    doomed = {rank: draw.randrange(1, steps) for rank in draw.sample(transport.live, kills)}
    delay = Random(seed * 100 + transport.rank).random() * 0.003
    step = shrinks = 0
    while step < steps:
        try:
            if doomed.get(transport.rank) == step:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                doomed.clear()
            if make_step(transport, step):
                step += 1
        except PeerFailure:
            step, turns = recover(transport, step)
            shrinks += turns
    return {"live": list(transport.live), "steps": step, "shrinks": shrinks}


def make_step(transport: Transport, step: int) -> bool:
    for words in (3, 900, 60_000):
        mine = torch.full((words,), 100 * step + transport.rank)
        received = transport.exchange({to: [mine] for to in transport.live})
        for collected in (received, transport.share([mine])):
            assert list(collected) == list(transport.live)
            for sender, (tensor,) in collected.items():
                assert len(tensor) == words and (tensor == 100 * step + sender).all(), (
                    sender,
                    step,
                    tensor,
                )
    return transport.agree(True)


def recover(transport: Transport, step: int) -> tuple[int, int]:
    """The step to go on with, the same on all, and the number of shrinks that it took."""
    for turns in range(1, 100):
        transport.shrink()
        try:
            steps = [int(tensor) for (tensor,) in transport.share([torch.tensor(step)]).values()]
            assert max(steps) - min(steps) <= 1, steps
            if transport.agree(True):
                return max(steps), turns
        except PeerFailure:
            pass
    raise AssertionError("no end of failures")


def main() -> None:
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    folder, waits, seed, kills, steps = *sys.argv[1:3], *map(int, sys.argv[3:])
    transport = transport_here()
    transport.sleeps = waits == "sleep"
    try:
        result = drill(transport, seed, kills, steps)
        result |= figures_of(transport)
        transport.close()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, f"{transport.rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
