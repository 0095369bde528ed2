"""`make endurance` names every broken promise of the pieces of a run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from support.benchmarking import program

endurance = program("endurance")
PIECES = [
    endurance.Piece(
        number=number,
        kills=6,
        link_faults=4,
        resets=3,
        noticed=6,
        others_lost=0,
        steps=900,
        seconds=100.0,
        training_steps=850,
        training_seconds=90.0,
        held_back_seconds=0.0,
        first_rank_bytes=49_000_000,
        rank_bytes=50_000_000,
        first_rank_files=40,
        rank_files=40,
        first_launch_bytes=30_000_000,
        launch_bytes=30_000_000,
        first_launch_files=90,
        launch_files=90,
        processes_left=0,
        files_left=0,
    )
    for number in range(8)
]
MODEL = {"model_sha256": "a"}


def test_a_good_run_has_no_complaint():
    assert list(endurance.complaints(PIECES, MODEL, MODEL, 8.0)) == []


def test_a_last_piece_of_few_kills_has_more_files_and_no_complaint():
    """A rank has a file for each connection, and connections to dead ranks are gone."""
    usual = [replace(piece, first_rank_files=38, rank_files=29) for piece in PIECES]
    cut_short = replace(usual[-1], kills=1, noticed=1, rank_files=38)
    assert list(endurance.complaints([*usual, cut_short], MODEL, MODEL, 8.0)) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"processes_left": 2}, "piece 7: 2 processes are left"),
        ({"files_left": 3}, "piece 7: 3 files are left"),
        ({"noticed": 5}, "piece 7: 6 kills, 5 noticed"),
        ({"others_lost": 1}, "piece 7: 1 ranks lost without a kill"),
        (
            {"rank_bytes": 63_000_000, "first_rank_bytes": 63_000_000},
            "rank_bytes grew from 50000000 to 63000000",
        ),
        ({"rank_files": 51, "first_rank_files": 51}, "rank_files grew from 40 to 51"),
        ({"launch_files": 113, "first_launch_files": 113}, "launch_files grew from 90 to 113"),
        ({"first_rank_bytes": 39_000_000}, "piece 7: rank_bytes grew from 39000000 to 50000000"),
        ({"first_rank_files": 31}, "piece 7: rank_files grew from 31 to 40"),
        ({"first_launch_files": 71}, "piece 7: launch_files grew from 71 to 90"),
        ({"first_launch_bytes": 1}, "piece 7: launch_bytes grew from 1 to 30000000"),
        ({"training_seconds": 700.0}, "a fault came every 16.6 s, not every 8 s"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else "",
)
def test_a_broken_promise_of_a_piece_is_named(changes, said):
    pieces = [*PIECES[:-1], replace(PIECES[-1], **changes)]
    assert list(endurance.complaints(pieces, MODEL, MODEL, 8.0)) == [said]


def test_other_bits_and_a_run_without_kills_are_named():
    other = {"model_sha256": "b"}
    assert list(endurance.complaints(PIECES, MODEL, other, 8.0)) == ["the models differ"]
    no_resets = [replace(piece, resets=0) for piece in PIECES]
    (said,) = endurance.complaints(no_resets, MODEL, MODEL, 8.0)
    assert "no connection was reset" in said
    nobody = [replace(piece, kills=0, noticed=0) for piece in PIECES]
    assert list(endurance.complaints(nobody, MODEL, MODEL, 8.0)) == ["nobody was killed"]


def test_a_later_call_reads_the_pieces_of_an_earlier_call(tmp_path):
    rows = [endurance.asdict(piece) for piece in PIECES]
    endurance.written(tmp_path / "pieces.csv", rows, endurance.fields(endurance.Piece))
    assert endurance.earlier(tmp_path) == list(PIECES)


@pytest.mark.parametrize(("hosts", "kinds"), [(None, {"kill"}), (object(), {"kill", "link"})])
def test_links_break_between_hosts_alone(hosts, kinds):
    rng = random.Random(0)
    assert {endurance.drawn(hosts, rng) for _ in range(40)} == kinds


def test_the_throughput_is_of_the_steps_that_the_reporter_knows(tmp_path):
    lines = [
        {"event": "progress", "time": 1.0, "step": 3, "finished": [[2, 10.0], [3, 11.0]]},
        {"event": "failure", "time": 2.0, "ranks": [1], "failures_left": 1},
        {
            "event": "progress",
            "time": 3.0,
            "step": 5,
            "finished": [[3, 12.5], [4, 13.0], [5, 14.0]],
        },
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watched = endurance.Watched(endurance.EventTail(path), endurance.Survivability())
    assert watched.training() == (0, 0.0)
    watched.look()
    assert watched.training() == (3, 4.0) and watched.state.dead == {1}


def test_the_family_of_a_launch_has_the_children_of_its_children():
    line = "import subprocess; subprocess.run(['sleep', '30'])"
    with subprocess.Popen([sys.executable, "-c", line]) as parent:
        deadline = time.monotonic() + 20
        while len(found := endurance.family(parent.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert len(found) == 2 and parent.pid in found
