"""Under mpirun: pyeclib encodes and decodes stripes of a running job, before and after a kill.

Arguments: K M SERVERS FILE. Writes to FILE one line per check: step, stripes, "same" or what
differs.
"""

import itertools
import os
import signal
import sys

import torch
from pyeclib.ec_iface import ECDriver

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.transport.message import in_groups
from ecrm.transport.mpi import MpiTransport

HEADER = 80
ALIGNMENT = 1024

torch.set_num_threads(1)
k, m, servers, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
transport = MpiTransport()
workload = Workload(servers=servers, k=k, m=m, spares=1, steps=8, rebuild_rows_per_step=100_000)
driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_vand" if m <= 3 else "isa_l_rs_cauchy")


def units_of(engine: Engine) -> dict[int, list[bytes]] | None:
    """On the reporter: the bytes of every unit by row space and residue, stripes in order."""
    shape = engine.state.protection.shape
    outgoing = []
    for (shard, space), hosted in engine.state.hosted.items():
        layout = engine.state.layouts[space]
        periods = torch.arange(layout.periods)
        for unit in range(shape.width):
            residue = shape.residue_of_unit(shard, unit)
            if unit < k:
                records = hosted.store.read(periods * k + unit)
            else:
                records = engine.state.protection.parity[shard, space].records[
                    periods * m + unit - k
                ]
            outgoing += [(space, residue, unit), records]
    received = transport.exchange({engine.view.reporter: outgoing} if outgoing else {})
    if engine.rank != engine.view.reporter:
        return None
    found = {h: r.numpy().tobytes() for t in received.values() for h, r in in_groups(t, 2)}
    spaces = range(len(engine.state.spaces))
    return {
        (space, residue): [found[space, residue, unit] for unit in range(shape.width)]
        for space, residue in itertools.product(spaces, range(shape.shards))
    }


def check(units: list[bytes]) -> str:
    """pyeclib computes the same parity, and rebuilds the data from any k of our units."""
    padded = [unit + bytes(-len(unit) % ALIGNMENT) for unit in units]
    fragments = driver.encode(b"".join(padded[:k]))
    if [f[HEADER : HEADER + len(u)] for f, u in zip(fragments, units, strict=True)] != units:
        return "parity differs from pyeclib's"
    ours = [f[:HEADER] + unit for f, unit in zip(fragments, padded, strict=True)]
    for lost in itertools.combinations(range(k + m), m):
        kept = [fragment for number, fragment in enumerate(ours) if number not in lost]
        if driver.decode(kept) != b"".join(padded[:k]):
            return f"pyeclib decodes other data without units {lost}"
    return "same"


def after_step(engine: Engine) -> None:
    if engine.view.rebuilding or engine.step % 2:
        return
    with engine.recovery.recovering():
        units = units_of(engine)
    if units is not None:
        results = {check(group) for group in units.values()}
        with open(path, "a") as file:
            file.write(
                f"{engine.step} {len(engine.state.failures.failures)} {' '.join(sorted(results))}\n"
            )


def phase(step: int, name: str) -> None:
    if transport.rank == 1 and (step, name) == (3, "parity"):
        os.kill(os.getpid(), signal.SIGKILL)


run_workload(workload, transport, Hooks(phase=phase), after_step=after_step)
transport.close()
os._exit(0)
