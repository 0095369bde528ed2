"""The run settled by a launch reaches its ranks whole, and no other run is taken for the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.config.script import Script
from ecrm.run.auto_resume import AUTO_RESUME
from ecrm.run.spec import VARIABLE, RunSpec, handed_over, settle


@pytest.fixture
def spec(criteo_rows, tmp_path) -> RunSpec:
    sets = [f"data.path={criteo_rows}", "train.sparse_lr=0.1", "data.eval_fraction=0.3"]
    return settle("tiny", sets, tmp_path / "a b", ["1@7:parity"], AUTO_RESUME).spec


def test_a_spec_reads_back_as_written(spec, tmp_path):
    script = Script(tmp_path / "train.py", None, ("--name", "a b"))
    for each in (spec, settle(script, ["cluster.servers=5"], tmp_path, init_from=tmp_path).spec):
        again = RunSpec.of_text(each.text)
        assert again == each and again.digest == each.digest


def test_a_rank_takes_the_spec_of_its_launch_alone(spec):
    assert handed_over(spec.digest, {VARIABLE: spec.text}) == spec
    for environ in ({}, {VARIABLE: spec.text.replace("0.3", "0.2")}):
        with pytest.raises(UsageError, match="has handed over no such run: leave the option out"):
            handed_over(spec.digest, environ)


def test_specs_of_different_runs_have_different_digests(spec, tmp_path):
    other = settle("tiny", [f"data.path={spec.config.data.path}"], tmp_path / "c").spec
    assert other.digest != spec.digest and other.run_dir == Path(tmp_path / "c")
