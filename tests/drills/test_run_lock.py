"""One owner per run folder, also while a real run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import pytest

from ecrm.base.errors import UsageError
from ecrm.run.run_lock import check_run_dir
from support.drilling import BASE, RUN_SECONDS, Mpirun, launch_words, mpirun_line


def test_of_two_runs_in_one_folder_one_is_refused_and_the_other_goes_on(tmp_path, criteo_rows):
    """Two launches at once; a third, and a command typed by hand, while the first runs.

    Then everything is killed, and the folder is free.
    """
    folder = tmp_path / "run"
    words = launch_words(folder, criteo_rows, {**BASE, "train.steps": 4000})
    launches = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    deadline = time.monotonic() + RUN_SECONDS
    while all(process.poll() is None for process in launches):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lost, won = sorted(launches, key=lambda process: process.poll() is None)
    said = lost.communicate()[0]
    assert lost.returncode == 2 and won.poll() is None, said
    (error,) = re.findall("ecrm: error: .*", said)
    assert f"{folder}: in use by a run that is alive, on host " in error and "since 2" in error
    while not (folder / "events.jsonl").exists():
        assert time.monotonic() < deadline and won.poll() is None
        time.sleep(0.05)
    third = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert (
        third.returncode == 2 and "in use by a run" in third.stderr and "mpirun" not in third.stdout
    )
    byhand = Mpirun(
        [
            word.replace(str(tmp_path / "other"), str(folder))
            for word in mpirun_line(tmp_path / "other", criteo_rows, BASE)
        ]
    )
    code, output = byhand.end(RUN_SECONDS)
    assert code == 2 and output.count("in use by a run") == 1, output
    assert won.poll() is None
    ranks = [rank["pid"] for rank in json.loads((folder / "ranks.json").read_text())["ranks"]]
    with pytest.raises(UsageError, match="in use"):
        check_run_dir(folder)
    for pid in (won.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    won.communicate()
    with pytest.raises(UsageError, match="not empty"):
        check_run_dir(folder)
