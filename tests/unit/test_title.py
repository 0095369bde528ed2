"""Names of processes in `ps`: the rank and its role."""

from __future__ import annotations

from support.commands import forked

PROGRAM = """
import os, sys
os.environ["PMIX_RANK"] = "3"
from pathlib import Path
from ecrm.placement.view import View
from ecrm.process.title import name_by_role, name_guard
view = View(epoch=0, live=(0, 1, 2, 4094, 4095), shards=(0, 2), slots=(1, 2), dense=(1, 4094))
for name in (name_guard, *(lambda rank=rank: name_by_role(view, rank) for rank in view.live)):
    name()
    print(Path("/proc/self/comm").read_text(), end="")
"""


def test_a_process_is_named_after_rank_and_role():
    done = forked(["-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [  # whole: the system keeps 15 letters
        "ecrm 3 guard",
        "ecrm 0 server",
        "ecrm 1 trainer",
        "ecrm 2 both",
        "ecrm 4094 dense",
        "ecrm 4095 spare",
    ]
