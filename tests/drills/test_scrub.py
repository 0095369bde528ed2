"""Scrubbing under real mpirun: a bit flipped in a rank's memory is found while training goes on."""

from __future__ import annotations

import pytest

from support.drilling import drill, launch

BASE = {"train.steps": 20, "model.dense_arch": "native", "cluster.servers": 4, "cluster.spares": 0}
M2 = {**BASE, "protection.k": 2, "protection.m": 2}
EVERYTHING = 100_000
"""Rows per step that are more than there are: what is found is found in the step of the flip."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, criteo_rows):
    run = drill(tmp_path_factory.mktemp("undisturbed") / "run", criteo_rows, M2)
    assert run.summary["scrub"] is None
    return run.model


@pytest.mark.parametrize("kind", ["row", "state", "parity"])
def test_a_flipped_bit_is_found_and_put_right(tmp_path, criteo_rows, undisturbed, kind):
    sets = {**M2, "testing.flip": f"1@9:{kind}", "protection.scrub_rows_per_step": EVERYTHING}
    run = drill(tmp_path / "run", criteo_rows, sets)
    [event] = run.events_of("corruption")
    assert event["kind"] == {"row": "data"}.get(kind, kind) and event["shard"] == 1
    assert event["repaired"] and event["step"] == 10
    assert "! corruption in " in run.output and "found in step 10; repaired" in run.output
    scrub = run.summary["scrub"]
    assert (scrub["corruptions"], scrub["repaired"]) == (1, 1) and scrub["passes"] == 21
    assert run.model == undisturbed


def test_with_m_1_a_flipped_bit_is_reported_only(tmp_path, criteo_rows, undisturbed):
    sets = {
        **BASE,
        "protection.k": 2,
        "testing.flip": "1@9:row",
        "protection.scrub_rows_per_step": 3000,
    }
    sets["protection.verify_parity_at_end"] = False  # which would rightly reject the model
    run = launch(tmp_path / "run", criteo_rows, sets)
    assert run.code == 0, run.output
    [event] = run.events_of("corruption")
    assert (event["kind"], event["repaired"], event["exact"]) == ("unknown", False, False)
    assert "not repaired: which unit is wrong cannot be told" in run.output
    scrub = run.summary["scrub"]
    assert (scrub["corruptions"], scrub["repaired"], scrub["exact"]) == (1, 0, 0)
    assert run.model != undisturbed


def test_a_rank_killed_while_another_one_holds_a_wrong_unit_that_is_found(
    tmp_path, criteo_rows, undisturbed
):
    sets = {**M2, "testing.flip": "1@9:row", "protection.scrub_rows_per_step": EVERYTHING}
    run = drill(tmp_path / "run", criteo_rows, sets, ("2@10:scrub",))
    assert len(run.events_of("corruption")) == 1
    assert run.model == undisturbed
