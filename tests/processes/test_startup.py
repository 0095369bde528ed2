"""Ranks that are slow to start count as there, whatever program stands before their guards."""

from __future__ import annotations

import subprocess
import sys

import pytest

LAUNCHER = """
import os, subprocess, sys
variables = {name: text for name, text in os.environ.items() if not name.startswith("PMIX_")}
children = [
    subprocess.Popen(
        [*sys.argv[2:], sys.executable, "-c", sys.argv[1]],
        env={**variables, "PMIX_NAMESPACE": "a job", "PMIX_RANK": rank},
        stdout=subprocess.PIPE if rank == "0" else subprocess.DEVNULL,
        stderr=None if rank == "0" else subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    for rank in ("1", "0")
]
print(children[1].communicate()[0], end="")
os.killpg(children[0].pid, 9)
"""
GUARD = """
import os, time
from ecrm.process.startup import _ranks_running
if os.environ["PMIX_RANK"] == "1":
    time.sleep(60)
deadline = time.monotonic() + 20
while len(found := _ranks_running("a job")) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
print(sorted(found))
"""
WRAPPER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@pytest.mark.parametrize("before", [(), (sys.executable, "-c", WRAPPER)], ids=["none", "wrapper"])
def test_a_rank_is_found_behind_a_program_that_starts_its_guard(before):
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, GUARD, *before],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[0, 1]\n"
