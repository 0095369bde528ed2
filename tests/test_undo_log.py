"""The log of what changed since a commit: one update as it came, several merged unit by unit."""

from __future__ import annotations

import pytest
import torch

from ecrm.kernels.records import merge_records
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.storage.undo import UndoLog

ROWS, BYTES = 40, 20


def _update(log: UndoLog, expected: dict[int, torch.Tensor], seed: int, units: int, size: int = 15) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, _ = unique_by_unit(torch.randperm(ROWS, generator=generator)[:size], units)
    delta = torch.randint(0, 256, (size, BYTES), dtype=torch.uint8, generator=generator)
    for row, change in zip(rows.tolist(), delta):
        expected[row] = expected.get(row, torch.zeros(BYTES, dtype=torch.uint8)) ^ change
    merging = log.expect(rows)
    for some, into in merging:
        merge_records(into, rows[some], delta[some])
    if not merging:
        log.keep(rows, delta)


def _held(log: UndoLog) -> dict[int, list[int]]:
    return {row: change.tolist() for rows, delta in log.deltas() for row, change in zip(rows.tolist(), delta, strict=True)}


@pytest.mark.parametrize("units", [1, 3, 4])
def test_it_holds_the_xor_of_all_updates_since_it_was_cleared(units):
    log = UndoLog(ROWS, BYTES, units)
    for interval in range(3):
        expected: dict[int, torch.Tensor] = {}
        for update in range(4):
            _update(log, expected, 10 * interval + update, units)
            assert _held(log) == {row: change.tolist() for row, change in expected.items()}
            assert len(log.deltas()) == (1 if update == 0 else units)
        assert all((rows % units == unit).all() for unit, (rows, _) in enumerate(log.deltas()))
        log.clear()
        assert _held(log) == {}


def test_one_update_is_kept_as_it_came():
    log, rows, delta = UndoLog(ROWS, BYTES, 2), torch.tensor([2, 0, 1, 5]), torch.ones(4, BYTES, dtype=torch.uint8)
    assert not log.merges and log.expect(rows) == []
    log.keep(rows, delta)
    ((held_rows, held_delta),) = log.deltas()
    assert held_rows is rows and held_delta is delta and log.nbytes == rows.nbytes + delta.nbytes


def test_memory_of_an_interval_serves_the_next_and_is_counted():
    log = UndoLog(ROWS, BYTES)
    for update in range(5):
        _update(log, {}, update, 1)
    first = log.nbytes
    assert ROWS * 4 + ROWS * (8 + BYTES) * 0.9 <= first <= ROWS * 4 + (ROWS + 15) * 5 // 4 * (8 + BYTES)
    log.clear()
    _update(log, {}, 0, 1)
    _update(log, {}, 1, 1)
    assert log.nbytes == first


def test_rows_that_do_not_lie_unit_by_unit_are_refused_before_they_are_updated():
    log = UndoLog(ROWS, BYTES, 2)
    with pytest.raises(ValueError, match="do not lie unit by unit"):
        log.expect(torch.tensor([1, 0]))
    assert _held(log) == {}


def test_what_fails_to_find_room_leaves_what_there_was(monkeypatch):
    log, expected = UndoLog(ROWS, BYTES, 2), {}
    _update(log, expected, 0, 2)
    _update(log, expected, 1, 2)

    def no_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(MemoryError):
        log.expect(torch.cat([torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2)]))
    assert _held(log) == {row: change.tolist() for row, change in expected.items()}
