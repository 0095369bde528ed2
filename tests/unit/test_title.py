"""Names of processes in `ps`: the rank and its role."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
os.environ["PMIX_RANK"] = "3"
from pathlib import Path
from ecrm.placement.view import View
from ecrm.process.title import name_by_role, name_guard
view = View(epoch=0, live=(0, 1, 2, 4094, 4095), shards=(0, 2), slots=(1, 2), dense=(1, 4094))
name_guard() if sys.argv[1] == "guard" else name_by_role(view, int(sys.argv[1]))
print(Path("/proc/self/comm").read_text(), end="")
"""


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        ("0", "ecrm 0 server"),
        ("1", "ecrm 1 trainer"),
        ("2", "ecrm 2 both"),
        ("4094", "ecrm 4094 dense"),
        ("4095", "ecrm 4095 spare"),
        ("guard", "ecrm 3 guard"),
    ],
)
def test_a_process_is_named_after_rank_and_role(rank, name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, rank], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{name}\n", "whole: the system keeps 15 letters"
