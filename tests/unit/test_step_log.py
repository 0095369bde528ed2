"""Notes of slots on steps: kept once per step and slot, undone, forgotten and handed on."""

from __future__ import annotations

import torch

from ecrm.engine.step_log import StepLog
from ecrm.protection.mapped_files.dense_file import DenseFile


def note(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def said(log: StepLog, steps: int) -> list[dict[int, list[int]]]:
    return [{slot: note.tolist() for slot, note in log.of(step).items()} for step in range(steps)]


def test_a_step_that_is_done_again_is_there_once():
    log = StepLog()
    log.add(0, {1: note(1), 0: note()})
    log.add(1, {0: note(2, 3)})
    log.undo(1)
    assert said(log, 2) == [{0: [], 1: [1]}, {}]
    log.add(1, {0: note(4)})
    log.add(1, {0: note(4), 1: note(5)})
    assert said(log, 2) == [{0: [], 1: [1]}, {0: [4], 1: [5]}]
    log.forget(1)
    assert said(log, 2) == [{}, {0: [4], 1: [5]}]


def test_another_holder_gets_what_is_committed_as_it_comes_out_of_a_message():
    log, whole = StepLog(), note(9, 8, 7, 6)
    log.add(3, {0: whole[1:3], 2: note()})
    log.add(4, {0: note(1)})
    whole.zero_()  # the buffer that it came in
    assert log.export(3) == []
    assert said(StepLog([tensor.reshape(-1) for tensor in log.export(4)]), 5) == [
        {},
        {},
        {},
        {0: [8, 7], 2: []},
        {},
    ]
    assert said(StepLog(log.export(5)), 5)[3:] == [{0: [8, 7], 2: []}, {0: [1]}]


def test_a_dense_file_keeps_states_of_different_numbers_of_tensors(tmp_path):
    file = DenseFile(tmp_path, "rank0", durable=False)
    file.keep(1, [torch.ones(3)], committed=0)
    file.keep(2, [torch.ones(3), torch.zeros(2)], committed=1)
    again = DenseFile(tmp_path, "rank0", durable=False)
    assert [len(again.state(step)) for step in (1, 2)] == [1, 2]
    # one number for both, as earlier versions had it
    again._words["tensors"], again._words["tensors0"] = 1, 0
    assert [len(DenseFile(tmp_path, "rank0", durable=False).state(step)) for step in (1, 2)] == [
        1,
        2,
    ]
