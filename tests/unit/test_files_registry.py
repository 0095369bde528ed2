"""ecrm/run/files.py describes every file; real runs are held to it in `support.drilling`."""

from __future__ import annotations

import pytest

from ecrm.data.dataset_info import FILES, MALFORMED, NAME
from ecrm.run.files import DATASET, STOPPED, check_summary, undescribed

WHOLE = (
    "events.jsonl",
    "ranks.json",
    "summary.json",
    "checkpoints/step-00000120/manifest.json",
    "checkpoints/step-00000120/rows-rank0001-1-0.bin",
    "checkpoints/step-00000120/dense.bin",
    "mapped/shard2-space0.journal1",
)


@pytest.fixture
def folder(tmp_path):
    for name in (*WHOLE, ".summary.json", "checkpoints/.step-00000140/dense.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_files_of_a_run_and_drafts_are_described(folder):
    assert undescribed(folder) == []


@pytest.mark.parametrize(
    "name", ["summary.jsonl", "mapped/shard2.rows", "checkpoints/manifest.json", "a/b"]
)
def test_another_file_is_told(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    assert undescribed(folder) == [name]


def test_the_files_of_a_dataset_are_those_that_prepare_writes():
    assert {file.name for file in DATASET} == {NAME, MALFORMED, *FILES}


def test_a_summary_without_its_fields_is_refused():
    with pytest.raises(ValueError, match=r"steps is missing.*speed is not described"):
        check_summary({"speed": 1}, STOPPED)
