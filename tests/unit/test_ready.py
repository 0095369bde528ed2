"""What a spare loads before it is needed: nothing while it is far from being so."""

import subprocess
import sys

from ecrm.placement.view import View
from ecrm.process.ready import takes_over_soon

VIEW = View(
    0, live=tuple(range(9)), shards=(0, 1, 2), slots=(3, 4), dense=(3, 4), domains=tuple(range(9))
)


def test_the_next_m_spares_are_ready_beside_all_ranks_with_a_role():
    assert [rank for rank in VIEW.live if takes_over_soon(rank, VIEW, 2)] == [0, 1, 2, 3, 4, 5, 6]
    assert [rank for rank in VIEW.live if takes_over_soon(rank, VIEW, 0)] == [0, 1, 2, 3, 4]
    holder = View(0, VIEW.live, VIEW.shards, VIEW.slots, dense=(3, 8), domains=VIEW.domains)
    assert takes_over_soon(8, holder, 1) and not takes_over_soon(7, holder, 1)


PROGRAM = """
import sys, threading, torch
from ecrm.placement.view import View
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.process.ready import Loading

def view(*live):
    return View(0, live, (0, 1, 2), (3, 4), (3, 4), domains=tuple(range(9)))

import gc
loading = Loading(7, view(*range(9)), 1, "torchrec", "fbgemm", SparseOptimizer("sgd", 0.1))
alone = loading.make_store(1, 8, torch.empty_like)
print("fbgemm_gpu" in sys.modules, "torchrec" in sys.modules)
loading.heed(view(0, 1, 2, 3, 4, 6, 7, 8))
print(threading.active_count())
loading.heed(view(0, 1, 2, 3, 4, 7, 8))
for thread in threading.enumerate():
    if thread.name == "loading":
        thread.join()
print("fbgemm_gpu" in sys.modules, "torchrec" in sys.modules, gc.get_freeze_count() > 100_000)
store = loading.make_store(5, 8, torch.empty_like)
print(type(store).__name__, store.record_bytes == alone.record_bytes)
"""


def test_a_spare_loads_when_it_has_moved_up():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["False False", "1", "True True True", "FbgemmStore True"], (
        done.stdout + done.stderr
    )
