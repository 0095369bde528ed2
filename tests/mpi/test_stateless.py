"""Stateless servers under real kills: training and evaluation go on while a shard is away."""

from __future__ import annotations

from support.drilling import STATELESS, drill


def test_a_killed_server_is_restored_while_the_others_train(tmp_path, criteo_rows):
    run = drill(tmp_path / "run", criteo_rows, STATELESS, ("1@13:parity",))
    (account,) = run.summary["restored"]
    assert (
        account["shard"],
        account["checkpoint_step"],
        account["lost_at_step"],
        account["lost_steps"],
    ) == (1, 10, 13, 3)
    assert (
        account["steps_away"] > 1
        and account["kept_rows"] > 0
        and account["last_seen_rows"] > 0
        and account["lost_slot_steps"] == 0
    )
    assert (
        run.summary["steps"] == 40
        and run.summary["failures"][0]["rebuild_seconds"] > 0
        and not run.events_of("rolled_back")
    )
    assert (
        0 < run.summary["eval_auc"] < 1
        and run.summary["failures_left"] == 1
        and not run.summary["protection"]["exact"]
    )
    assert "! shard 1 restored from step 10: the updates of 3 steps are lost" in run.output
    assert "can survive 1 more at once, and any ranks that hold no dense replica" in run.output


def test_an_evaluation_goes_on_while_a_shard_is_away(tmp_path, criteo_rows):
    sets = {**STATELESS, "train.eval_every_steps": 14, "protection.rebuild_rows_per_step": 20}
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@13:update",))
    (account,) = run.summary["restored"]
    assert account["lost_at_step"] == 13 and account["steps_away"] > 2
    evaluations = run.events_of("evaluation")
    assert [event["step"] for event in evaluations] == [14, 28, 40]
    assert [event["shards_away"] for event in evaluations][::2] == [[1], []] and all(
        0 < event["values"]["auc"] < 1 for event in evaluations
    )
    assert "evaluation at step 14 without shard 1: auc" in run.output
    kinds = [event["event"] for event in run.events]
    assert kinds.index("evaluation") < kinds.index("restored"), "it did not wait"
