"""Equal bits are promised for one set of versions: another set is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from ecrm.base import version_set
from ecrm.base.errors import UsageError
from ecrm.base.version_set import name_of
from ecrm.checkpoint import compatibility
from ecrm.checkpoint.compatibility import VERSIONS, check_versions, identity, versions_changed
from ecrm.checkpoint.folder import FOLDER, CheckpointFolder
from ecrm.checkpoint.manifest import Manifest
from ecrm.checkpoint.mapped_folder import make_folder
from ecrm.config import load_config
from ecrm.run.auto_resume import about, check_same
from ecrm.run.plan import find_starting_point
from support.advice import dataset

OLD = {"cpu": "avx2", "torch": "1.0", "numpy": "1.0"}


@pytest.fixture
def sets(tmp_path):
    return [f"data.path={dataset(tmp_path / 'data')}"]


def of_another_set(monkeypatch):
    monkeypatch.setattr(compatibility.version_set, "version_set", lambda: OLD)


def test_the_set_has_the_versions_in_use_and_a_name_that_depends_on_each():
    found = version_set.version_set()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"cpu", "numpy", "torchrec"} <= set(found)
    names = {name_of(found), *(name_of({**found, part: "x"}) for part in found)}
    assert len(names) == len(found) + 1 and all(len(name) == 8 for name in names)
    assert name_of(dict(reversed(found.items()))) == name_of(found)


def test_a_checkpoint_of_another_set_is_refused_unless_told(tmp_path, sets, monkeypatch):
    config = load_config("tiny", sets)
    run = tmp_path / "run"
    CheckpointFolder(run / FOLDER).publish(Manifest(2, identity(config), None, 0, [], [], [], []))
    assert not find_starting_point(config, None, run).changed
    now = version_set.version_set()
    of_another_set(monkeypatch)
    names = f"versions {name_of(now)} -> {name_of(OLD)}"
    with pytest.raises(UsageError, match=names) as refused:
        find_starting_point(config, None, run)
    assert f"torch {now['torch']} -> 1.0" in str(refused.value)
    assert "set train.other_versions=true, or install the versions" in str(refused.value)
    told = load_config("tiny", [*sets, "train.other_versions=true"])
    (line,) = find_starting_point(told, None, run).changed
    assert line.startswith(names)


def test_mapped_files_of_another_set_are_refused_unless_told(tmp_path, sets, monkeypatch):
    sets += ["protection.name=mapped"]
    config = load_config("tiny", sets)
    make_folder(tmp_path / "mapped", config.cluster.servers, identity(config), first=True)
    of_another_set(monkeypatch)
    with pytest.raises(UsageError, match="set train.other_versions=true"):
        find_starting_point(config, None, tmp_path / "mapped")
    told = load_config("tiny", [*sets, "train.other_versions=true"])
    assert find_starting_point(told, None, tmp_path / "mapped").changed


def test_resume_auto_knows_its_run_whatever_the_versions(tmp_path, sets, monkeypatch):
    config = load_config("tiny", sets)
    event = {"time": 1.0, "event": "start", "run": about(config)}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    of_another_set(monkeypatch)
    check_same(tmp_path, about(config))


def test_a_checkpoint_without_a_set_is_not_refused(tmp_path):
    mine = {VERSIONS: version_set.version_set()}
    assert versions_changed({}, mine) == [] and versions_changed(mine, mine) == []
    check_versions(tmp_path, {}, mine, allowed=False)
