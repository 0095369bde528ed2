"""The page of a run, `ecrm report`: its charts, at the width of a phone and in the dark."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ecrm.cli.commands import main
from ecrm.config import make_config
from ecrm.drill.charts import curves
from ecrm.drill.roles import stays
from ecrm.drill.run_page import of_lives, report, without_pauses
from ecrm.drill.svg import Chart, Line, Mark, drawn, standalone, ticks
from support.commands import assert_one_line, forked_ecrm
from support.pages import charts, measured

T = 1_000_000.0
CONFIG = make_config(
    {
        "data": {"path": "absent"},
        "cluster": {"servers": 4, "trainers": 2, "spares": 1},
        "train": {"steps": 100},
    },
    "test",
).to_dict()


def start(at: float, **more) -> dict:
    fields = {"world_size": 7, "config": CONFIG, "version": "1", "failures_left": 1}
    return {"time": T + at, "event": "start", **fields, **more}


def progress(at: float, first: int, last: int) -> dict:
    """A step each tenth of a second up to `at`."""
    finished = [[step, T + at - (last - step) / 10] for step in range(first, last + 1)]
    more = {"samples": 1000 * last, "rebuilt": 1.0, "failures_left": 1}
    logged = {"loss": 0.7 - last / 200}
    return {
        "time": T + at,
        "event": "progress",
        "step": last,
        "finished": finished,
        "logged": logged,
        **more,
    }


def evaluation(at: float, step: int, auc: float) -> dict:
    return {"time": T + at, "event": "evaluation", "step": step, "values": {"auc": auc}}


def checkpoint(at: float, step: int) -> dict:
    more = {"kind": "full", "rows": 5, "bytes": 12_345, "seconds": 0.2, "stall_seconds": 0.2}
    return {"time": T + at, "event": "checkpoint", "step": step, **more}


def failure(at: float, ranks: list[int], shards: dict, slots: dict) -> dict:
    more = {"phase": "parity", "redone_steps": 1, "recovery_seconds": 0.05, "moved": {}}
    return {
        "time": T + at,
        "event": "failure",
        "ranks": ranks,
        "step": 20,
        "shards": shards,
        "slots": slots,
        **more,
    }


EVENTS = [
    start(0),
    progress(2.0, 1, 20),
    evaluation(2.5, 20, 0.6),
    failure(3.0, [1], {"1": 6}, {}),
    {
        "time": T + 4.0,
        "event": "rebuilt",
        "ranks": [1],
        "shards": [1],
        "rebuild_seconds": 1.0,
        "rebuilt_bytes": 777,
        "on_demand_rows": 3,
    },
    progress(5.0, 21, 40),
    checkpoint(5.3, 40),
    failure(5.9, [4], {}, {"0": 5}),
    progress(7.0, 41, 50),
    evaluation(7.5, 50, 0.7),
]


@pytest.fixture
def folder(tmp_path):
    text = "".join(json.dumps(event) + "\n" for event in EVENTS)
    (tmp_path / "events.jsonl").write_text(text)
    (tmp_path / "summary.json").write_text(
        json.dumps(
            {
                "completed": True,
                "steps": 50,
                "training_seconds": 7.0,
                "model_sha256": "abc",
                "failures": [],
                "traffic_bytes_per_rank": [{"rank": 0, "sent": {"lookup": 2_000_000}}],
            }
        )
    )
    trace = [
        {"ph": "X", "cat": "phase", "name": "lookup", "pid": 0, "dur": 1500, "args": {"step": 1}}
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": trace}))
    return tmp_path


def test_the_page_has_every_part_and_needs_nothing_else(folder):
    done = forked_ecrm("report", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report in {folder / 'report.html'}\n"
    html = (folder / "report.html").read_text()
    for heading in ("Curves", "Throughput", "Ranks and roles", "Failures", "Checkpoints", "Phases"):
        assert f"<h2>{heading}</h2>" in html
    assert "complete, 50 steps, 2 failures survived" in html and "12,345" in html
    assert "1.500" in html and "2.0" in html, "milliseconds and megabytes of a phase"
    assert not re.search(r"://|@import|url\(|<script|src=", html)
    assert len(charts(html)) == 4, "loss, AUC, throughput, roles"
    elsewhere = folder / "own.html"
    assert forked_ecrm("report", str(folder), "--output", str(elsewhere)).returncode == 0
    assert "<svg" in elsewhere.read_text()


def test_a_folder_without_a_run_or_without_an_event_is_refused(tmp_path):
    assert_one_line(forked_ecrm("report", str(tmp_path)), "holds no run")
    (tmp_path / "failure.json").write_text('{"message": "no", "exit_code": 3}')
    assert_one_line(forked_ecrm("report", str(tmp_path)), "holds no event yet", code=4)


def test_labels_lie_in_the_picture_and_strokes_keep_their_width(folder):
    forked_ecrm("report", str(folder))
    for chart in charts((folder / "report.html").read_text()):
        shares = [float(text.get("x").rstrip("%")) for text in chart.findall("text")]
        assert shares and all(0 <= share <= 100 for share in shares)
        assert chart.get("width") == "100%" and "viewBox" not in chart.attrib, (
            "letters are not scaled with the picture"
        )
    rule = re.search(
        r"\.chart path, \.chart line \{([^}]*)\}", (folder / "report.html").read_text()
    )
    assert "non-scaling-stroke" in rule[1]


@pytest.mark.parametrize("width", [380, 1280])
def test_a_browser_shows_letters_to_read_without_overlap(folder, width):
    forked_ecrm("report", str(folder))
    said = measured(folder / "report.html", width)
    content, window = said["page"]
    assert content <= window, "nothing to scroll sideways"
    assert said["texts"] and min(size for *_, size in said["texts"]) >= 12
    assert all(left >= 0 and right <= window for _, left, _, right, _, _ in said["texts"])
    boxes = said["texts"]
    for number, (one, *a, _) in enumerate(boxes):
        for other, *b, _ in boxes[number + 1 :]:
            across = min(a[2], b[2]) - max(a[0], b[0])
            down = min(a[3], b[3]) - max(a[1], b[1])
            assert across <= 1 or down <= 3, f"{one!r} lies on {other!r}"


def test_the_dark_page_is_dark(folder):
    forked_ecrm("report", str(folder))
    assert measured(folder / "report.html", 380)["paper"] == "rgb(255, 255, 255)"
    assert measured(folder / "report.html", 380, dark=True)["paper"] == "rgb(22, 27, 34)"


def test_roles_move_with_deaths():
    found = [
        (s.rank, s.role, round(s.begin - T, 3), round(s.end - T, 3), s.dies) for s in stays(EVENTS)
    ]
    assert found == [
        (0, "server", 0.0, 7.5, False),
        (1, "server", 0.0, 3.0, True),
        (2, "server", 0.0, 7.5, False),
        (3, "server", 0.0, 7.5, False),
        (4, "trainer", 0.0, 5.9, True),
        (5, "trainer", 0.0, 7.5, False),
        (6, "spare", 0.0, 3.0, False),
        (6, "server", 3.0, 7.5, False),
    ]


def test_a_rank_that_joins_stays_from_then_on():
    joined = {"time": T + 6.0, "event": "joined", "ranks": [4], "slots": {"0": 4}}
    found = [stay for stay in stays([*EVENTS, joined, progress(9.0, 51, 60)]) if stay.rank == 4]
    assert [(s.role, round(s.begin - T, 3), round(s.end - T, 3), s.dies) for s in found] == [
        ("trainer", 0.0, 5.9, True),
        ("trainer", 6.0, 9.0, False),
    ]


def test_the_night_between_two_starts_is_left_out_and_ranks_die_in_each():
    night = 40_000.0
    again = [
        {**start(night), "resumed": {"step": 20}},
        progress(night + 4, 21, 40),
        failure(night + 4.5, [1], {"1": 6}, {}),
    ]
    events, starts = without_pauses([*EVENTS[:4], *again])
    assert starts == 2
    assert [event["time"] - T for event in events[4:]] == [3.0, 7.0, 7.5]
    record = of_lives(events, {})
    assert [failure.ranks for failure in record.failures] == [(1,), (1,)]
    assert record.finished[-1] == (40, T + 7.0) and record.started_at == T
    assert [stay.rank for stay in stays(events) if stay.dies] == [1, 1]


def test_the_time_of_training_is_that_of_the_last_start(folder):
    page = report(folder).read_text()
    assert "<dt>training</dt>" in page and "last start" not in page
    again = [{**start(100.0), "resumed": {"step": 50}}, progress(102.0, 51, 60)]
    with open(folder / "events.jsonl", "a") as events:
        events.writelines(json.dumps(event) + "\n" for event in again)
    page = report(folder).read_text()
    assert "<dt>training, last start</dt>" in page and "<dt>training</dt>" not in page


def test_page_and_values_are_those_of_the_newest_session_or_of_a_named_one(folder, capsys):
    first = Path(shutil.copytree(folder, folder / "run"))
    second = first / "session-2"
    second.mkdir()
    values = {"time": T, "event": "evaluation", "step": 10, "values": {"other": 0.5}}
    lines = [start(0), progress(1.0, 1, 10), values]
    (second / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (first / "session-3").mkdir()  # about to begin

    def told(*words: str) -> tuple[str, str]:
        assert main(["report", str(first), "--values", *words]) == 0
        values = capsys.readouterr().out
        assert main(["report", str(first), *words]) == 0
        return values, (first / "report.html").read_text()

    for words in ((), ("--session", "2")):
        values, page = told(*words)
        assert "evaluation/other" in values and "evaluation/auc" not in values
        assert "10 steps, 0 failures" in page
    values, page = told("--session", "1")
    assert '<p class="verdict"><strong>Complete.</strong></p>' in page, "not the run's own verdict"
    assert "evaluation/auc" in values and "evaluation/other" not in values
    assert "50 steps, 2 failures" in page
    for wrong in ("0", "4"):
        assert main(["report", str(first), "--session", wrong]) == 2
        assert f"--session {wrong}: {first} has 3 sessions; type --session 3" in (
            capsys.readouterr().err
        )


def test_values_told_again_after_a_rollback_are_drawn_once():
    events = [*EVENTS, {**evaluation(9, 20, 0.65)}]
    (chart,) = [c for c in curves(of_lives(events, {})) if c.y == "evaluation: auc"]
    assert list(chart.lines[0].points) == [(20.0, 0.65), (50.0, 0.7)]


def test_ticks_are_round_and_inside():
    assert ticks(0, 8.3, 6) == [0, 2, 4, 6, 8]
    assert ticks(0.612, 0.681, 4) == pytest.approx([0.62, 0.64, 0.66, 0.68])
    assert ticks(3, 3, 4) == [3]


def test_a_picture_of_its_own_has_title_and_legend():
    line = Line("speed & more", [(0, 1.0), (5, None), (6, 2.0)], "run", stairs=True)
    chart = Chart("about", "s", "rate", 10, [line], marks=[Mark("death", 4, "rank 3")])
    picture = standalone(chart, "A <title>")
    title, axis = (re.search(rf'y="([0-9.]+)"[^>]*>{text}', picture) for text in ("A", "rate"))
    assert float(axis[1]) - float(title[1]) >= 12, "the name of the axis lies below the title"
    assert "A &lt;title&gt;" in picture and "speed &amp; more" in picture and "rank 3" in picture
    assert charts(drawn(chart)), "well-formed"
