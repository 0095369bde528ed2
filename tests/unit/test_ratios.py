"""Ratios of the same round, by hand-computed cases."""

from functools import partial

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


def test_a_session_is_held_against_the_fastest_peer_of_each_round():
    rows = [
        {
            "regime": "dense-heavy",
            "ids_per_bag": bag,
            "round": number,
            "session": "session",
            "contender": name,
            "session_over_this": ratio,
            "session_over_this_p20": ratio - 0.1,
            "session_over_this_p80": ratio + 0.1,
        }
        for number, bag, name, ratio in (
            (0, "1", "session", 1.0),
            (0, "1", "trainer-0.2.0", 0.98),
            (0, "1", "torchrec-planner", 1.4),
            (0, "1", "torchrec-column_wise", 1.6),
            (1, "1", "torchrec-planner", 1.5),
            (1, "1", "torchrec-column_wise", 1.3),
            (0, "20", "torchrec-planner", 0.9),
        )
    ]
    found = partial(program("lib.ratios").session_ratios, rows)
    between = [pytest.approx((ratio - 0.1, ratio, ratio + 0.1)) for ratio in (1.4, 1.3)]
    assert found("dense-heavy", 1, "session", "torchrec") == between
    assert [ratio for _, ratio, _ in found("dense-heavy", 20, "session", "torchrec")] == [0.9]
    assert [ratio for _, ratio, _ in found("dense-heavy", 1, "session", "trainer-0.2.0")] == [0.98]
    assert found("dense-heavy", 1, "session-dot", "torchrec") == []
    assert found("embedding-heavy", 1, "session", "torchrec") == []


def test_steps_are_told_line_by_line_and_losses_are_of_all_processes(tmp_path):
    told = program("lib.told_steps").ToldSteps
    assert told(tmp_path).finished() == []
    for process, losses in enumerate(((1.0, 2.0, 9.0), (3.0, 4.0))):
        for at, loss in enumerate(losses):
            told(tmp_path, process).append(10.0 + at, loss)
    (tmp_path / "0.jsonl").open("a").write("[13.0, 1")  # not whole yet
    assert told(tmp_path).finished() == [(1, 10.0), (2, 11.0), (3, 12.0)]
    assert told(tmp_path).first_loss(2) == 2.5


def test_turns_are_as_long_as_so_many_of_the_last_steps():
    seconds = program("lib.interleaved").several_steps(10)
    slow_first = [(1, 0.0), (2, 5.0), (3, 10.0), (5, 10.4), (6, 10.6)]
    assert seconds(slow_first) == pytest.approx(2.0)
    assert seconds([(1, 0.0), (2, 0.01), (3, 0.02)]) == 0.5
