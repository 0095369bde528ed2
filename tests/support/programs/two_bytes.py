"""Training with bfloat16 on the wire, on ranks of two hosts that lend memory within a host.

    two_bytes.py RESULT_FOLDER rows|tables KILLED MANY

On links, as `support.link_ranks` starts it; a rank's host is its number modulo 2. The rank KILLED
dies in the update of step 3. MANY ranks and more have their messages as arrays, a smaller number as
objects. The result of a rank has the digests of tables, and the dtypes that came from its own host
and from the other host, by the kind of their groups.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ecrm.engine.hooks import Hooks
from ecrm.protection import routing
from ecrm.transport import outbox
from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.message import Picked
from support.link_ranks import transport_here
from support.sessions import left_on_rank, starter
from support.two_bytes import LAYOUT, script

KINDS = (routing.ROWS, routing.SUMS, routing.GRADIENTS, routing.BAG_GRADIENTS)


class Arrived(WrappedTransport):
    """Notes the dtypes of all rows, sums and gradients that came, by host and kind."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.dtypes: dict[tuple[str, int], set[str]] = {}

    def exchange(self, outgoing):
        came = self.inner.exchange(outgoing)
        for sender, parts in came.items():
            for head, part in zip(parts, parts[1:]):
                if not isinstance(head, tuple) or isinstance(part, tuple) or len(head) < 4:
                    continue
                tensor = part.source if isinstance(part, Picked) else part
                if head[0] in KINDS and tensor.is_floating_point():
                    host = "near" if (sender - self.rank) % 2 == 0 else "far"
                    self.dtypes.setdefault((host, head[0]), set()).add(str(tensor.dtype))
        return came


def lend(transport: Transport) -> None:
    """Collective: have the ranks of this host read each other's memory."""
    memory, host = transport.shared_memory, f"host {transport.rank % 2}"
    said = transport.share([torch.tensor(list(json.dumps(memory.offer(host)).encode()))])
    offers = {rank: json.loads(bytes(words.tolist())) for rank, (words,) in said.items()}
    offers.pop(transport.rank)
    read = memory.accept(host, offers)
    assert read == [rank for rank in offers if (rank - transport.rank) % 2 == 0]
    memory.share_with(read)


def train(transport: Transport, placement: str, killed: int) -> SimpleNamespace:
    def phase(step: int, name: str) -> None:
        if (transport.rank, step, name) == (killed, 3, "update"):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    lend(transport)
    arrived = Arrived(transport)
    layout = replace(LAYOUT, whole_tables=placement == "tables", wrap=lambda inner: arrived)
    tables, _, mismatches, deaths, *_ = left_on_rank(
        script()(starter(transport, Hooks(phase=phase), layout))
    )
    kinds = {f"{host} {kind}": sorted(each) for (host, kind), each in arrived.dtypes.items()}
    return SimpleNamespace(tables=tables, mismatches=mismatches, deaths=deaths, kinds=kinds)


def main() -> None:
    folder, placement, killed, many = sys.argv[1:]
    outbox.MANY = int(many)
    transport = transport_here()
    try:
        result = vars(train(transport, placement, int(killed)))
        Path(folder, f"{transport.rank}.json").write_text(json.dumps(result))
        transport.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
