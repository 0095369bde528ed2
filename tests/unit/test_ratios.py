"""Ratios of the same round, by hand-computed cases."""

import pytest

from support.benchmarking import program


def rows_of_a_step(rates):
    return [
        {"regime": "dense-heavy", "round": number, "contender": name, "samples_per_second": rate}
        for number, mine in enumerate(rates)
        for name, rate in mine.items()
    ]


def test_ratios_are_of_one_round_and_the_peer_is_the_fastest_plan_of_that_round():
    rows = rows_of_a_step(
        [
            {"erasure": 90, "none": 100, "torchrec-planner": 60, "torchrec-column_wise": 45},
            {"erasure": 45, "none": 60, "torchrec-planner": 30, "torchrec-column_wise": 50},
        ]
    )
    ratios = program("lib.ratios")
    assert ratios.step_ratios(rows, "dense-heavy", "erasure", "none") == pytest.approx([0.9, 0.75])
    assert ratios.step_ratios(rows, "dense-heavy", "erasure", "torchrec") == pytest.approx(
        [1.5, 0.9]
    )
    assert ratios.step_ratios(rows, "embedding-heavy", "erasure", "none") == []


def test_of_contenders_that_took_turns_the_ratio_is_that_of_the_turns():
    rows = rows_of_a_step(
        [{"erasure": 90, "none": 100, "torchrec-planner": 60}, {"erasure": 45, "none": 60}]
    )
    rows[0]["over_none_in_turns"], rows[1]["over_none_in_turns"] = "0.97", ""
    ratios = program("lib.ratios")
    assert ratios.step_ratios(rows, "dense-heavy", "erasure", "none") == pytest.approx([0.97, 0.75])
    assert ratios.step_ratios(rows, "dense-heavy", "erasure", "torchrec") == pytest.approx([1.5])


def test_a_round_without_one_of_the_two_gives_no_ratio():
    rows = rows_of_a_step([{"erasure": 90}, {"erasure": 45, "none": 60}])
    assert program("lib.ratios").step_ratios(
        rows, "dense-heavy", "erasure", "none"
    ) == pytest.approx([0.75])


def test_a_series_is_held_against_its_first_value_in_the_same_round():
    rows = [
        {"series": series, "value": value, "round": number, "step_ms": ms}
        for series, value, number, ms in (
            ("k", 2, 0, 10),
            ("k", 4, 0, 15),
            ("m", 1, 0, 7),
            ("k", 2, 1, 20),
            ("k", 4, 1, 20),
        )
    ]
    assert program("lib.ratios").scaling_ratios(rows, "k") == {2: [1.0, 1.0], 4: [1.5, 1.0]}
