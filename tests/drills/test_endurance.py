"""A short run of `make endurance`: ranks killed again and again, in pieces, and the calm model."""

import csv
import subprocess
import sys

from support.paths import ROOT


def test_ranks_killed_in_pieces_train_the_calm_model_and_leave_nothing(tmp_path):
    words = ["--seconds", "100", "--every", "10", "--piece", "3", "--output", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "endurance.py"), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with (tmp_path / "out" / "result.csv").open() as file:
        (result,) = csv.DictReader(file)
    assert int(result["kills"]) >= 4 and int(result["pieces"]) >= 2 and result["wrong"] == ""
