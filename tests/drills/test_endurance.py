"""A short run of `make endurance`: ranks killed again and again, in pieces, and the calm model."""

import csv
import subprocess
import sys

import pytest

from support.imitated_hosts import why_not
from support.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "endurance.py"
WHY_NOT = why_not()


def test_ranks_killed_in_pieces_train_the_calm_model_and_leave_nothing(tmp_path):
    result = endured(tmp_path, "--faults", "5", "--every", "8", "--piece", "3")
    assert (result["kills"], result["pieces"], result["wrong"]) == ("5", "2", "")


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_links_broken_between_hosts_cost_no_rank_beside_kills(tmp_path):
    result = endured(tmp_path, "--faults", "14", "--every", "4", "--piece", "4", "--hosts", "3")
    assert int(result["kills"]) >= 4 and int(result["link_faults"]) >= 4 and result["wrong"] == ""


def endured(folder, *words):
    """The line of the program's CSV file."""
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), *words, "--output", str(folder / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with (folder / "out" / "result.csv").open() as file:
        (result,) = csv.DictReader(file)
    return result
