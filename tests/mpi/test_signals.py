"""A signal to a real run: all ranks stop after the same step, and nothing is left of them."""

from __future__ import annotations

import re
import signal
import time

import pytest

from support.drilling import RUN_SECONDS
from support.signalling import (
    begun,
    check_codes,
    check_gone,
    launch_line,
    stopped_json,
)


@pytest.mark.parametrize(
    ("number", "sets"),
    [
        (signal.SIGINT, ("protection.commit_interval=1000",)),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.drill),
    ],
)
def test_a_signal_to_the_launch_stops_all_ranks_after_the_same_step(
    tmp_path, criteo_rows, number, sets
):
    folder = tmp_path / "run"
    process = begun(folder, launch_line(folder, criteo_rows, *sets))
    process.send_signal(number)
    asked = time.monotonic()
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert time.monotonic() - asked < 9, "mpirun was not left to be killed"
    stopped = stopped_json(folder)
    assert stopped["signal"] == number.name
    assert stopped["samples"] == stopped["steps"] * 64 and 5 <= stopped["steps"] < 5000
    line = (
        rf"stopped by {number.name} after step {stopped['steps']} of 5000; "
        rf".* in {re.escape(str(folder))}/stopped.json"
    )
    assert len(re.findall(line, output)) == 1 and "error" not in output, output
    check_gone(folder)
    check_codes(folder)
