"""`--profile`: the table adds up, and the trace is one that a viewer opens."""

from __future__ import annotations

import json
import subprocess

import torch

from ecrm.run.profile import Profile, ProfiledTransport, chrome_trace, table
from ecrm.transport.base import Transport
from ecrm.transport.wire import packed_bytes
from support.drilling import RUN_SECONDS, launch_words


class Alone(Transport):
    rank, live = 0, (0, 1)

    def exchange(self, outgoing):
        self.sent_bytes += sum(
            packed_bytes(tensors) for rank, tensors in outgoing.items() if rank != self.rank
        )
        return {}

    def share(self, tensors):
        return {}

    def agree_alike(self, flag, word):
        return flag, True

    def shrink(self, admit=0):
        pass

    def close(self):
        pass


def test_time_and_bytes_go_to_the_phase_they_were_spent_in(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ecrm.run.profile.time.perf_counter", lambda: now[0])
    profile = Profile(0)
    transport = ProfiledTransport(Alone(), profile)

    def takes(seconds, action):
        def agree_alike(self, flag, word):
            now[0] += seconds
            return flag, True

        monkeypatch.setattr(Alone, "agree_alike", agree_alike)
        return action()

    for step in range(2):
        profile.phase(step, "lookup")
        now[0] += 0.5
        transport.exchange({0: [torch.zeros(8)], 1: [torch.zeros(4)]})  # to itself nothing is sent
        profile.phase(step, "commit")
        takes(0.25, lambda: transport.agree(True))
        profile.step_finished()
        now[0] += 100
    sums = profile.sums
    assert (sums["lookup"].count, sums["lookup"].seconds, sums["lookup"].waiting) == (2, 1.0, 0.0)
    assert sums["lookup"].sent == 2 * (3 * 8 + 16)
    assert (sums["commit"].seconds, sums["commit"].waiting) == (0.5, 0.5)
    text = table({0: json.loads(json.dumps(profile.to_json()))}, steps=2)
    lines = [line.split() for line in text.splitlines()]
    assert ["lookup", "500.000", "500.000", "(rank", "0)", "0.000", "0.0"] in lines
    assert ["all", "750.000", "250.000", "0.0"] in lines


def test_a_profiled_run_prints_the_table_and_leaves_a_trace_of_all_ranks(tmp_path, criteo_rows):
    words = [*launch_words(tmp_path / "run", criteo_rows, {"train.steps": 4}), "--profile"]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0 and "slowest rank" in done.stdout, done.stdout
    trace = tmp_path / "run" / "trace.json"
    assert f"trace of the last steps in {trace}, for chrome://tracing" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(6))
    named = {event["name"] for event in events if event["ph"] == "X"}
    assert {
        "input",
        "lookup",
        "forward",
        "backward",
        "update",
        "parity",
        "dense",
        "commit",
        "transport.exchange",
    } <= named


def test_spans_become_trace_events():
    trace = chrome_trace(
        {3: {"sums": {}, "spans": [("lookup", 10.0, 0.5, 7), ("transport.agree", 10.25, 0.25, 7)]}}
    )
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["cat"], s["pid"], s["ts"], s["dur"]) for s in spans] == [
        ("lookup", "phase", 3, 0.0, 5e5),
        ("transport.agree", "transport", 3, 2.5e5, 2.5e5),
    ]
