"""Where ranks outnumber cores, each keeps to one, and work of a kind is spread evenly."""

import subprocess
import sys
from dataclasses import replace

from ecrm.placement.view import View
from ecrm.train.cores import deal

VIEW = View(0, live=tuple(range(8)), shards=(0, 1, 2, 3, 4), slots=(5, 6, 5), dense=(5, 6), domains=tuple(range(8)))


def test_ranks_of_each_role_are_dealt_to_the_cores_in_turn():
    assert deal(VIEW, range(8), [0, 1]) == {5: 0, 6: 1, 0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 7: 1}
    taken_over = replace(VIEW, live=(0, 2, 3, 4, 5, 6, 7), shards=(0, 7, 2, 3, 4))
    assert deal(taken_over, range(8), [0, 1]) == {5: 0, 6: 1, 0: 0, 2: 1, 3: 0, 4: 1, 7: 0}
    assert deal(VIEW, [1, 4, 6, 7], [3, 9, 11]) == {6: 3, 1: 9, 4: 11, 7: 3}


def test_a_rank_keeps_to_its_core_as_long_as_ranks_outnumber_cores():
    program = """
import os
from ecrm.placement.view import View
from ecrm.train.cores import Cores
def view(*live):
    return View(0, live, (0, 1), (2,), (2,), domains=tuple(range(999)))
free = os.sched_getaffinity(0)
cores = Cores(1, range(999))
cores.heed(view(*range(999)))
print(os.sched_getaffinity(0) == {sorted(free)[2 % len(free)]})
cores.heed(view(*range(len(free) + 1)))
print(len(os.sched_getaffinity(0)))
cores.heed(view(*range(len(free))))
print(os.sched_getaffinity(0) == free)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "1", "True"], done.stdout + done.stderr
