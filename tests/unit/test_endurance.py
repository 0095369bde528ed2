"""`make endurance` names every broken promise of the pieces of a run."""

from dataclasses import replace

import pytest

from support.benchmarking import program

endurance = program("endurance")
PIECES = [
    endurance.Piece(
        number=number,
        kills=6,
        failures=5,  # two kills at the same time are one failure
        steps=900,
        seconds=100.0,
        held_back_seconds=0.0,
        rank_bytes=50_000_000,
        rank_files=40,
        launch_files=90,
        processes_left=0,
        files_left=0,
    )
    for number in range(8)
]
MODEL = {"model_sha256": "a"}


def test_a_good_run_has_no_complaint():
    assert list(endurance.complaints(PIECES, MODEL, MODEL)) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"processes_left": 2}, "piece 7: 2 processes are left"),
        ({"files_left": 3}, "piece 7: 3 files are left"),
        ({"failures": 0}, "piece 7: 6 kills, 0 failures"),
        ({"failures": 7}, "piece 7: 6 kills, 7 failures"),
        ({"rank_bytes": 63_000_000}, "rank_bytes grew from 50000000 to 63000000"),
        ({"rank_files": 51}, "rank_files grew from 40 to 51"),
        ({"launch_files": 113}, "launch_files grew from 90 to 113"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_broken_promise_of_a_piece_is_named(changes, said):
    pieces = [*PIECES[:-1], replace(PIECES[-1], **changes)]
    assert list(endurance.complaints(pieces, MODEL, MODEL)) == [said]


def test_other_bits_and_a_run_without_kills_are_named():
    other = {"model_sha256": "b"}
    assert list(endurance.complaints(PIECES, MODEL, other)) == ["the models differ"]
    nobody = [replace(piece, kills=0, failures=0) for piece in PIECES]
    assert list(endurance.complaints(nobody, MODEL, MODEL)) == ["nobody was killed"]
