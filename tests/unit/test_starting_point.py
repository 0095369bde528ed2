"""What may differ between a run and the one that it continues, and how that is reported.

No test starts a run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.checkpoint.compatibility import check_identity, check_init, identity
from ecrm.checkpoint.exported_model import exported_model
from ecrm.checkpoint.folder import FOLDER, CheckpointFolder
from ecrm.checkpoint.manifest import Manifest
from ecrm.checkpoint.mapped_folder import make_folder
from ecrm.cli.commands import main
from ecrm.config import load_config
from ecrm.run.auto_resume import complete_in_words
from ecrm.run.plan import Start, find_starting_point, kept_by
from support.advice import dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return dataset(tmp_path / "one")


def run(folder: Path, data: Path, *overrides: str, step: int = 12, data_began: int = 0) -> Path:
    config = load_config("tiny", [f"data.path={data}", *overrides])
    CheckpointFolder(folder / FOLDER).publish(
        Manifest(step, identity(config, data_began), None, 0, [], [], [], [])
    )
    return folder


def start(data: Path, given: Path, *overrides: str) -> Start:
    config = load_config("tiny", [f"data.path={data}", *overrides], kept_by(given))
    return find_starting_point(config, None, given)


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was(tmp_path, data):
    begun = start(data, run(tmp_path / "run", data))
    assert (begun.changed, begun.data_began, begun.steps) == ([], 0, 20)


def test_a_line_is_said_for_each_change(tmp_path, data):
    begun = start(
        data,
        run(tmp_path / "run", data),
        "train.sparse_lr=0.01",
        "train.dense_lr=0.5",
        "train.steps=40",
        "train.eval_every_steps=5",
    )
    assert begun.changed == [
        "train.sparse_lr 0.05 -> 0.01",
        "train.dense_lr 0.01 -> 0.5",
        "train.steps 20 -> 40",
        "train.eval_every_steps 0 -> 5",
    ]
    assert begun.data_began == 0 and begun.steps == 40


def test_other_data_begin_at_the_checkpoint_and_epochs_count_from_there(tmp_path, data):
    other = dataset(tmp_path / "two", 2000, text="b")
    given = run(tmp_path / "run", data)
    begun = start(other, given, "train.epochs=1", "data.eval_fraction=0.2")
    assert begun.data_began == 12 and begun.steps == 12 + 1600 // 64
    assert begun.changed[0] == "data.eval_fraction 0.1 -> 0.2"
    assert (
        begun.changed[-1]
        == f"data.path {data} -> {other}: 1,000 -> 2,000 rows, from the first of them"
    )
    assert start(other, given, "train.steps=30").steps == 30
    # the same run, further on with its new data
    run(tmp_path / "run", other, step=15, data_began=12)
    assert start(other, given).data_began == 12 and not start(other, given).changed
    back = start(data, given)
    assert back.data_began == 15, "data that come again begin again"


def test_where_something_changed_no_older_checkpoint_is_gone_back_to(tmp_path, data):
    given = run(tmp_path / "run", data)
    run(given, data, step=9)
    assert [found.step for found in start(data, given).checkpoints] == [12, 9]
    assert [found.step for found in start(data, given, "train.steps=99").checkpoints] == [12, 9]
    assert [found.step for found in start(data, given, "train.sparse_lr=1").checkpoints] == [12]
    run(given, data, "train.sparse_lr=1", step=15)
    assert [found.step for found in start(data, given, "train.sparse_lr=1").checkpoints] == [15]


@pytest.mark.parametrize("path", ["checkpoint", "mapped"])
def test_what_is_held_out_changes_only_with_the_data(tmp_path, data, path):
    if path == "mapped":
        given = tmp_path / "files"
        config = load_config("tiny", [f"data.path={data}", "protection.name=mapped"])
        make_folder(given, config.cluster.servers, identity(config), first=True)
    else:
        given = run(tmp_path / "run", data)
    with pytest.raises(
        UsageError,
        match="data.eval_fraction=0.2: set data.eval_fraction=0.1, or start without --resume",
    ):
        start(
            data,
            given,
            "data.eval_fraction=0.2",
            f"protection.name={'mapped' if path == 'mapped' else 'none'}",
        )


def test_other_tables_are_named_one_by_one(tmp_path, data):
    given = run(tmp_path / "run", data)
    with pytest.raises(UsageError) as caught:
        start(dataset(tmp_path / "two", table_rows=51, text="b"), given)
    assert "t_cat_0 has 50 rows there, 51 here, t_cat_1 has 51 rows there, 52 here" in str(
        caught.value
    )


def test_mapped_files_go_on_with_another_rate_and_not_with_other_data(tmp_path, data):
    overrides = [f"data.path={data}", "protection.name=mapped"]
    made = load_config("tiny", overrides)
    make_folder(tmp_path / "files", made.cluster.servers, identity(made), first=True)
    begun = start(data, tmp_path / "files", "protection.name=mapped", "train.sparse_lr=1")
    assert begun.changed == ["train.sparse_lr 0.05 -> 1.0"]
    with pytest.raises(
        UsageError, match="mapped files go on with their own: set data.path as it was"
    ):
        start(dataset(tmp_path / "two", text="b"), tmp_path / "files", "protection.name=mapped")


def begin(data: Path, given: Path, *overrides: str) -> Start:
    return find_starting_point(
        load_config("tiny", [f"data.path={data}", *overrides]), None, None, init_from=given
    )


def test_a_run_begins_with_another_s_weights_whatever_else_it_has(tmp_path, data):
    other = dataset(tmp_path / "two", 2000, text="b")
    begun = begin(
        other,
        run(tmp_path / "run", data),
        "train.seed=9",
        "train.sparse_optimizer=adagrad",
        "train.dense_optimizer=adam",
        "train.global_batch=128",
        "train.slots=4",
        "cluster.trainers=4",
        "train.sparse_lr=1",
        "data.eval_fraction=0.2",
    )
    assert (
        begun.begins_with.step == 12
        and begun.steps == 20
        and not begun.checkpoints
        and not begun.changed
    )
    assert begun.identity["rows_seed"] == 7, (
        "rows that were never updated are those of the other run"
    )
    CheckpointFolder(tmp_path / "next" / FOLDER).publish(
        Manifest(3, begun.identity, None, 0, [], [], [], [])
    )
    again = begin(data, tmp_path / "next", "train.seed=11")
    assert (
        again.identity["rows_seed"] == 7
        and again.identity["init_from"] != begun.identity["init_from"]
    )
    on = find_starting_point(
        load_config(
            "tiny",
            [
                f"data.path={other}",
                "train.seed=9",
                "train.sparse_optimizer=adagrad",
                "train.dense_optimizer=adam",
                "train.global_batch=128",
                "train.slots=4",
                "train.sparse_lr=1",
                "data.eval_fraction=0.2",
            ],
        ),
        None,
        tmp_path / "next",
        init_from=tmp_path / "nowhere",
    )
    assert (
        on.begins_with is None and on.identity["rows_seed"] == 7 and on.identity == begun.identity
    )


def test_weights_that_do_not_fit_are_refused_table_by_table(tmp_path, data):
    given = run(tmp_path / "run", data)
    with pytest.raises(
        UsageError,
        match="--init-from .*t_cat_0 has 50 rows there, 40 here, t_cat_1 has 51 rows there, 40 "
        "here, .*set model.max_rows",
    ):
        begin(data, given, "model.max_rows_per_table=40")
    with pytest.raises(
        UsageError,
        match=r"of another model than this config's, which has model.top_mlp=\[8, 1\]: set "
        r"model.top_mlp=\[16,1\]",
    ):
        begin(data, given, "model.top_mlp=[8,1]")
    with pytest.raises(UsageError, match="there is no such folder"):
        begin(data, tmp_path / "nowhere")


def test_a_run_goes_on_with_its_dtype_on_the_wire(tmp_path, data):
    config = load_config("tiny", [f"data.path={data}"])
    rounded = load_config("tiny", [f"data.path={data}", "train.wire_dtype=bfloat16"])
    said = identity(config)
    check_identity(tmp_path, said, config)
    check_identity(tmp_path, identity(rounded), rounded)
    check_init(tmp_path, said, rounded)
    for one, other, wanted in ((rounded, said, "float32"), (config, identity(rounded), "bfloat16")):
        with pytest.raises(UsageError, match=f"set train.wire_dtype={wanted}, or start without"):
            check_identity(tmp_path, other, one)


def test_a_checkpoint_with_the_dense_part_of_earlier_versions_is_refused_by_name(tmp_path, data):
    said = identity(load_config("tiny", [f"data.path={data}"]))
    del said["dense"]
    folder = tmp_path / "old"
    CheckpointFolder(folder / FOLDER).publish(Manifest(12, said, None, 0, [], [], [], []))
    with pytest.raises(UsageError, match=r"0\.2\.0 or before, .*: go on with ecrm 0\.2\.0, or sta"):
        start(data, folder)
    with pytest.raises(UsageError, match=r"written by ecrm 0\.2\.0 or before"):
        find_starting_point(load_config("tiny", [f"data.path={data}"]), None, None, (), folder)
    with pytest.raises(UsageError, match=r"export the checkpoint with ecrm 0\.2\.0"):
        exported_model(said)


def completed(folder: Path, data: Path, **fields: object) -> Path:
    """A complete run as far as `--resume auto` looks at it."""
    run(folder, data, "train.steps=12")
    (folder / "events.jsonl").write_text('{"time": 1.0, "event": "start"}\n')
    summary = {"completed": True, "steps": 12, "sessions": 1, "ended_early": None, **fields}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_complete_run_names_its_steps_and_the_options_that_train_more(tmp_path, data, capsys):
    folder, new = completed(tmp_path / "run", data), str(tmp_path / "new")
    words = ["launch", "tiny", "--set", f"data.path={data}", "--set", "train.steps=12"]
    assert main([*words, "--run-dir", str(folder), "--resume", "auto"]) == 0
    assert capsys.readouterr().out == (
        f"{folder} holds the complete run of 12 steps: nothing is left to do; to train more "
        f"steps, type --resume {folder} --run-dir NEW\n"
    )
    more = [*words[:-1], "train.steps=40", "--resume", str(folder), "--run-dir", new, "--dry-run"]
    assert main(more) == 0 and "train.steps 12 -> 40" in capsys.readouterr().out


def test_more_steps_are_offered_only_where_they_can_be_trained(tmp_path, data):
    early = {"step": 9, "steps_wanted": 12, "best_step": None, "why": "session.stop() was called"}
    said = complete_in_words(completed(tmp_path / "early", data, steps=9, ended_early=early))
    assert said.endswith("training ended before step 12: session.stop() was called")
    assert "run of 2 sessions: " in complete_in_words(completed(tmp_path / "two", data, sessions=2))
    shutil.rmtree(completed(tmp_path / "bare", data) / FOLDER)
    assert complete_in_words(tmp_path / "bare").endswith("of 12 steps: nothing is left to do")
