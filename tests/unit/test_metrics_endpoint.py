"""Numbers of a run for Prometheus: their text, and that one rank serves them at a time."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from ecrm.engine import events
from ecrm.run.metrics_endpoint import METRICS, MetricsEndpoint, Numbers
from ecrm.run.reporter import Reporter
from ecrm.run.run_folder import RunFolder
from support.telling import an

START = an(events.Start, world_size=7, config={"train": {"steps": 100}}, failures_left=1)
FAILURE = an(events.Failure, ranks=[1], shards={1: 6})


def progress(step: int, **more) -> events.Progress:
    return an(events.Progress, step=step, rebuilt=1.0, steps_per_second=9.5, **more)


def read(text: str) -> dict[str, float]:
    """The samples of a text in Prometheus' format; every line must be of the format."""
    samples = {}
    for line in text.splitlines():
        comment = re.fullmatch(r"# (HELP|TYPE) (\w+) (.+)", line)
        sample = re.fullmatch(r'(\w+(?:\{name="(?:[^"\\]|\\.)*"\})?) (\S+)', line)
        assert comment or sample, line
        if sample:
            samples[sample[1]] = float(sample[2])
    return samples


@pytest.mark.parametrize(
    "over",
    [
        an(events.Rebuilt, shards=[1]),
        an(events.Restored, shards=[{"shard": 1}]),
        an(events.RolledBack),
        an(events.Reshaped),
    ],
)
def test_rows_are_missing_until_the_lost_shards_are_whole(over):
    numbers = Numbers()
    for told, ratio in (
        (START, 1),
        (an(events.Failure, ranks=[5]), 1),
        (FAILURE, 0),
        (over, 1),
    ):
        numbers.take(told, 5.0)
        assert read(numbers.text())["ecrm_rebuilt_ratio"] == ratio, told


def test_the_text_tells_what_events_told():
    numbers = Numbers()
    assert read(numbers.text()) == {}
    for told in (
        START,
        progress(20, samples_per_second=950.0, logged={'a "name"\\': 0.5, "nothing": None}),
        FAILURE,
        an(events.View, live=[0, 2, 3]),
        an(events.Checkpoint, step=20, seconds=1.5),
        an(events.Evaluation, values={"auc": 0.75}),
    ):
        numbers.take(told, 5.0)
    assert read(numbers.text()) == {
        "ecrm_step": 20,
        "ecrm_steps_wanted": 100,
        "ecrm_steps_per_second": 9.5,
        "ecrm_samples_per_second": 950,
        "ecrm_failures_total": 1,
        "ecrm_failures_left": 0,
        "ecrm_rebuilt_ratio": 0,
        "ecrm_ranks_live": 3,
        "ecrm_rollbacks_total": 0,
        "ecrm_checkpoint_failures_total": 0,
        "ecrm_checkpoint_step": 20,
        "ecrm_checkpoint_seconds": 1.5,
        "ecrm_last_event_seconds": 5,
        'ecrm_logged{name="a \\"name\\"\\\\"}': 0.5,
        'ecrm_evaluation{name="auc"}': 0.75,
    }
    assert {name.partition("{")[0] for name in read(numbers.text())} == set(METRICS)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return read(answer.read().decode())


def rank(number: int, folder: RunFolder, cluster: SimpleNamespace, port: int) -> Reporter:
    reporter = Reporter(folder, {}, events.Terms(), metrics=MetricsEndpoint(port, "127.0.0.1"))
    state = SimpleNamespace(commits=0)
    reporter.watch(SimpleNamespace(rank=number, view=cluster, step=0, committed=0, state=state))
    return reporter


def test_the_metrics_follow_the_reporter_and_counters_go_on(tmp_path, port):
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster, port), rank(1, folder, cluster, port)
    for told in (START, FAILURE):
        for each in (first, second):
            each.event(told)
    assert scraped(port)["ecrm_failures_total"] == 1
    cluster.reporter = 1
    first.progress(10, lambda: (progress(10), ""))  # lets go of the port
    with pytest.raises(urllib.error.URLError):
        scraped(port)
    second.progress(10, lambda: (progress(10), ""))
    found = scraped(port)
    assert (found["ecrm_failures_total"], found["ecrm_step"]) == (1, 10)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/secrets", timeout=5)
    second._metrics.end()


def test_a_port_in_use_costs_a_line_and_is_tried_again(port, capsys):
    endpoint = MetricsEndpoint(port, "127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        endpoint.tell(START, 1.0)
        endpoint.tell(progress(1), 2.0)
    said = capsys.readouterr().out
    assert said.startswith(f"! metrics.port {port}: ") and said.count("\n") == 1
    endpoint.tell(progress(2), 3.0)
    assert scraped(port)["ecrm_step"] == 2
    endpoint.end()


def test_a_second_session_takes_the_port(port):
    first, second = (MetricsEndpoint(port, "127.0.0.1") for _ in range(2))
    first.tell(START, 1.0)
    second.tell(START, 2.0)
    assert scraped(port)["ecrm_last_event_seconds"] == 2
    second.end()


def test_without_a_port_nothing_listens():
    endpoint = MetricsEndpoint()
    endpoint.tell(START, 1.0)
    assert endpoint._server is None
    endpoint.end()
