"""Stateless servers under real kills: all servers at once, a trainer, the dense replicas."""

from __future__ import annotations

from support.drilling import STATELESS, drill


def test_all_servers_are_killed_at_once_and_one_again(tmp_path, criteo_rows):
    kills = ("0@13:update", "1@13:update", "2@13:update", "5@15:dense")
    run = drill(tmp_path / "run", criteo_rows, STATELESS, kills)
    assert {account["shard"] for account in run.summary["restored"]} == {0, 1, 2}
    assert {account["lost_at_step"] for account in run.summary["restored"]} == {
        13
    } and 0 < run.summary["eval_auc"] < 1


def test_a_trainer_s_death_loses_no_more_than_what_it_kept(tmp_path, criteo_rows, undisturbed):
    run = drill(tmp_path / "run", criteo_rows, STATELESS, ("1@13:parity", "3@15:update"))
    assert run.summary["restored"][0]["lost_slot_steps"] > 0
    run = drill(tmp_path / "other", criteo_rows, STATELESS, ("3@15:update",))
    assert run.model == undisturbed, "no shard was lost"


def test_without_a_dense_replica_all_go_back_to_the_checkpoint(tmp_path, criteo_rows, undisturbed):
    run = drill(tmp_path / "run", criteo_rows, STATELESS, ("3@13:parity", "4@13:parity"))
    assert run.events_of("rolled_back") and run.model == undisturbed
