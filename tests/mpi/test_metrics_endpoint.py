"""The metrics of a real run, over HTTP, through the death of the rank that serves them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

from support.drilling import LONG, RUN_SECONDS, launch_words


def until(port: int, wanted) -> str:
    """The metrics as soon as `wanted` of them is true."""
    deadline, text = time.monotonic() + RUN_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            time.sleep(0.1)
            continue
        if wanted(text):
            return text
        time.sleep(0.1)
    raise AssertionError(text)


def test_metrics_go_on_when_the_reporter_dies_and_the_hook_runs(tmp_path, criteo_rows):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "run"
    sets = {
        **LONG,
        "train.steps": 100_000,
        "train.log_every_steps": 10,
        "metrics.port": port,
        "hooks.on_failure": '"echo seen $ECRM_EVENT"',
    }
    words = launch_words(folder, criteo_rows, sets)
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        text = until(port, lambda text: "\necrm_step " in text and "\necrm_step 0.0" not in text)
        assert "\necrm_failures_total 0.0" in text and '\necrm_logged{name="loss"}' in text
        ranks = json.loads((folder / "ranks.json").read_text())["ranks"]
        reporter = next(rank for rank in ranks if rank["dense"])
        os.kill(reporter["pid"], signal.SIGKILL)
        until(port, lambda text: "\necrm_failures_total 1.0" in text)
        run.send_signal(signal.SIGTERM)
        assert run.wait(RUN_SECONDS) == 130
    finally:
        run.kill()
        run.wait()
    log = (folder / "hooks.log").read_text()
    assert log.count("seen {") == 1 and f'"ranks": [{reporter["rank"]}]' in log
