"""What a config says of a prepared table before a rank starts: refusals, memory, going on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.base.errors import DataError, UsageError
from ecrm.checkpoint.compatibility import identity
from ecrm.checkpoint.folder import FOLDER, CheckpointFolder
from ecrm.checkpoint.manifest import Manifest
from ecrm.config import load_config
from ecrm.data.columns.prepare import prepare_table
from ecrm.data.columns.table import Table
from ecrm.data.described import describe
from ecrm.launch.memory_needs import Needs
from ecrm.run.plan import find_starting_point, plan
from support.columns import CSV, SMALL, prepared_small, schema_of
from support.commands import assert_one_line, dry_run

TOWERS = "model.architecture=two_tower"
SMALLEST = ("train.global_batch=2", "train.slots=2", "model.max_rows_per_table=0")


def config_of(data: Path, *sets: str):
    return load_config("tiny", [f"data.path={data}", *SMALLEST, *sets])


def test_a_table_is_described_by_its_manifest(tmp_path):
    found = describe(prepared_small(tmp_path), 0.1)
    assert (found.is_table, found.rows, found.train_rows) == (True, 4, 3)
    assert found.tables == {"t_movie": 50, "t_genres": 4, "t_tags": 20}
    assert found.features == {"movie": "t_movie", "genres": "t_genres", "tags": "t_tags"}
    assert found.dense == ("price",) and found.weighted and found.binary and not found.ordered
    assert found.lookups == {"t_movie": 1.0, "t_genres": 1.25, "t_tags": 1.0}


def test_criteo_rows_are_described_as_their_dataset_is(criteo_rows):
    found = describe(criteo_rows, 0.25)
    assert not found.is_table and found.ordered and found.binary and not found.layout
    assert found.train_rows == found.rows - found.rows // 4
    assert found.dense[0] == "int_0" and len(found.dense) == 13 and len(found.features) == 26


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["data.eval_fraction=0.2"],
            "is a prepared table with 1 held-out row of its own: set data.eval_fraction=0.1",
        ),
        (
            [TOWERS, 'model.user_columns=["price","mov"]'],
            r"has 'mov', no column of .*: set 'model.user_columns=..price.,.movie..'$",
        ),
        ([TOWERS, 'model.user_columns=["qqq"]'], "there are movie; genres; tags; price"),
        (
            [TOWERS, 'model.user_columns=["movie","genres","tags","price"]'],
            "and the item's tower none: set 'model.user_columns=..movie..' or model.architecture=d",
        ),
        (
            [TOWERS],
            "model.user_columns is empty, and the columns of .* are movie; genres; tags; price: "
            "set 'model.user_columns=..movie..' or model.architecture=dlrm",
        ),
        (["train.global_batch=4"], "has 3 training rows, fewer than train.global_batch, 4"),
    ],
)
def test_a_config_that_does_not_fit_the_table_is_refused(tmp_path, sets, said):
    data = prepared_small(tmp_path)
    plan(config_of(data, "train.steps=3"))
    with pytest.raises(UsageError, match=said):
        plan(config_of(data, *sets))


def test_the_advice_about_user_columns_names_a_user_s(tmp_path):
    schema = SMALL.replace("tags =", "user_tags =")
    data = prepared_small(tmp_path, CSV.replace("tags", "user_tags"), schema)
    with pytest.raises(UsageError, match=r"set 'model.user_columns=\[.user_tags.\]' or model.arch"):
        plan(config_of(data, TOWERS))


def test_columns_of_two_towers_are_texts(tmp_path):
    with pytest.raises(UsageError, match='must be a list of texts, such as ."user_id", "age"'):
        load_config("columns", [f"data.path={tmp_path}", TOWERS, "model.user_columns=[1]"])
    with pytest.raises(UsageError, match="dense_arch is native, but model.architecture is dcnv2"):
        sets = [f"data.path={tmp_path}", "model.architecture=dcnv2", "model.dense_arch=native"]
        load_config("columns", sets)


def test_labels_that_are_no_probabilities_are_refused(tmp_path):
    text = "clicked,price,movie,genres,tags,note\n" + "".join(
        f"{n % 5},1,m{n},a,b:1,x\n" for n in range(20)
    )
    data = prepared_small(tmp_path, text)
    assert not describe(data, 0.1).binary
    with pytest.raises(UsageError, match="some labels are neither 0 nor 1.*type above = NUMBER"):
        plan(config_of(data))
    above = SMALL.replace('"label"', '"label", above = 3')
    plan(config_of(prepared_small(tmp_path, text, above, force=True)))


def test_the_advice_about_held_out_rows_names_the_split_column(tmp_path):
    split = 'note = { kind = "split", train = ["first", "second"], held_out = ["a, b"] }'
    schema = SMALL.replace('note = { kind = "unused" }', split).replace("held_out = 0.25", "")
    data = prepared_small(tmp_path, schema=schema, max_malformed=1)
    with pytest.raises(UsageError, match="type values in held_out of the column note in the sch"):
        plan(config_of(data, "data.eval_fraction=0.2"))


def test_evaluations_need_held_out_rows_of_the_table(tmp_path):
    data = prepared_small(tmp_path, schema=SMALL.replace("0.25", "0"))
    plan(config_of(data))
    best = ("checkpoint.keep_best=auc", "train.eval_every_steps=2")
    with pytest.raises(UsageError, match="no held-out rows.*set checkpoint.keep_best=none"):
        plan(config_of(data, *best))


def test_a_table_named_with_a_dot_is_refused_with_the_line_to_type(tmp_path):
    schema = SMALL.replace("movie =", '"a.b" =')
    data = prepared_small(tmp_path, "clicked,price,a.b,genres,tags,note\n1,2,m,a,b:1,x\n", schema)
    with pytest.raises(UsageError, match='dot in its name: type table = "a_b" in the schema'):
        plan(config_of(data))


def test_a_table_damaged_or_gone_is_refused_before_the_start(tmp_path):
    data = prepared_small(tmp_path)
    (data / "labels.bin").write_bytes(b"")
    with pytest.raises(DataError, match="labels.bin: expected 16 bytes, found 0"):
        plan(config_of(data))
    done = dry_run(tmp_path / "gone")
    assert_one_line(done, "or `ecrm prepare table FILES --schema schema.toml --output")


def test_a_shuffled_table_takes_memory_for_its_order(tmp_path):
    shuffled = Needs(config_of(prepared_small(tmp_path)), 3).trainer
    timed = SMALL.replace('note = { kind = "unused" }', 'note = { kind = "time" }')
    text = "clicked,price,movie,genres,tags,note\n" + "1,2,m,a,b:1,5\n" * 8
    ordered = Needs(config_of(prepared_small(tmp_path, text, timed, force=True)), 3).trainer
    assert (shuffled.order, ordered.order) == (3 * 8 * 3, 0)


def resumed(folder: Path, before: Path, now: Path):
    said = identity(config_of(before, "train.steps=3"))
    CheckpointFolder(folder / FOLDER).publish(Manifest(2, said, None, 0, [], [], [], []))
    return find_starting_point(config_of(now, "train.steps=9"), None, folder)


def test_a_run_goes_on_with_another_day_of_the_same_vocabularies_alone(tmp_path):
    for name in ("one", "two", "other", "renamed"):
        (tmp_path / name).mkdir()
    text = "clicked,price,movie,genres,tags,note\n1,2,m1,b|a|c,t:1,x\n0,1,m1,b,t:1,x\n1,2,m,a,,\n"
    one = prepared_small(tmp_path / "one")
    (tmp_path / "two" / "rows.csv").write_text(text)
    words = [str(tmp_path / "two" / "rows.csv")], str(tmp_path / "two" / "out")
    prepare_table(*words, schema_of(tmp_path), vocabularies=one)
    begun = resumed(tmp_path / "run", one, tmp_path / "two" / "out")
    assert begun.data_began == 2 and "4 -> 3 rows" in begun.changed[-1]
    other = prepared_small(tmp_path / "other", text)
    assert Table(other).rows == Table(one).rows
    with pytest.raises(UsageError, match="other vocabularies than .*--vocabularies with its"):
        resumed(tmp_path / "run-2", one, other)
    schema = SMALL.replace("price =", "cost =")
    renamed = prepared_small(
        tmp_path / "renamed", text.replace("price", "cost"), schema, vocabularies=one
    )
    with pytest.raises(UsageError, match="other dense columns than those of data.path"):
        resumed(tmp_path / "run-3", one, renamed)


def test_an_architecture_is_kept_by_the_run_that_goes_on(tmp_path):
    data = prepared_small(tmp_path)
    said = identity(config_of(data, "train.steps=3"))
    CheckpointFolder(tmp_path / "run" / FOLDER).publish(Manifest(2, said, None, 0, [], [], [], []))
    with pytest.raises(UsageError, match="set model.architecture=dlrm and model.dense_arch=native"):
        find_starting_point(config_of(data, "model.architecture=dcnv2"), None, tmp_path / "run")
    config = config_of(data)
    assert replace(config.model, architecture="dcnv2").interaction == "torchrec"
