"""The log of what changed since a commit: one update as it came, several merged unit by unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecrm.base.allocate import lazy_zeros
from ecrm.kernels import dispatch
from ecrm.kernels.records import merge_records
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.storage.undo import UndoLog
from ecrm.testing.imitated_gpu import imitated_gpu
from support.gpu_waits import waits_for_gpu

ROWS, BYTES = 40, 20


def _update(
    log: UndoLog, expected: dict[int, torch.Tensor], seed: int, units: int, size: int = 15
) -> None:
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
    return {
        row: change.tolist()
        for rows, delta in log.deltas()
        for row, change in zip(rows.tolist(), delta, strict=True)
    }


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
    log, rows = UndoLog(ROWS, BYTES, 2), torch.tensor([2, 0, 1, 5])
    delta = log.space(4).view(torch.uint8)
    assert delta.shape == (4, BYTES)
    delta += 1
    assert not log.merges and log.expect(rows) == []
    log.keep(rows, delta)
    ((held_rows, held_delta),) = log.deltas()
    assert held_rows is rows and held_delta is delta and log.nbytes == rows.nbytes + delta.nbytes


def test_deltas_lie_in_the_memory_that_they_are_sent_from():
    places = []

    def allocate(*shape, dtype=np.float32):
        places.append(lazy_zeros(*shape, dtype=dtype))
        return places[-1]

    def lie_in(part, memory):
        return (
            memory.data_ptr() <= part.data_ptr()
            and part.data_ptr() + part.nbytes <= memory.data_ptr() + memory.nbytes
        )

    log, first = UndoLog(ROWS, BYTES, 2, allocate), torch.arange(0, ROWS, 2)
    space = log.space(ROWS // 2).view(torch.uint8)
    log.keep(first, space)
    assert len(places) == 1 and lie_in(log.deltas()[0][1], places[0])
    for _ in range(3):
        _update(log, {}, 1, 2, ROWS)
    assert len(places) == 3 and all(
        lie_in(delta, memory) for (_, delta), memory in zip(log.deltas(), places[1:], strict=True)
    )
    log.clear()
    assert log.space(3).data_ptr() == space.data_ptr()


def test_memory_of_an_interval_serves_the_next_and_is_counted():
    log, expected = UndoLog(ROWS, BYTES), {}
    for update in range(5):
        _update(log, expected, update, 1)
    most = log.nbytes
    assert most == ROWS * 4 + len(expected) * (8 + BYTES)
    log.clear()
    _update(log, {}, 0, 1)
    _update(log, {}, 1, 1)
    assert log.nbytes == most


def test_rows_that_do_not_lie_unit_by_unit_are_refused_before_they_are_updated():
    log = UndoLog(ROWS, BYTES, 2)
    with pytest.raises(ValueError, match="do not lie unit by unit"):
        log.expect(torch.tensor([1, 0]))
    assert _held(log) == {}


def test_on_a_gpu_deltas_wait_once_and_a_commit_no_more():
    dispatch.use_on_gpu("auto")
    with imitated_gpu() as device:

        def allocate(*shape, dtype=np.float32):
            return torch.from_numpy(np.zeros(shape, dtype)).to(device)

        log = UndoLog(ROWS, 8, 2, allocate, device)
        # updates; waits of an update that finds a log full; rows and their deltas, unit by unit
        intervals = [
            ([[0, 2, 1], [2, 4, 1], [2, 3]], ["undo _settle"], {0: 8, 2: 4, 4: 8, 1: 0, 3: 4}),
            ([[2, 1], [2, 4], [2, 3]], [], {2: 4, 4: 4, 1: 4, 3: 4}),
        ]
        for updates, full, expected in intervals:
            with waits_for_gpu() as waits:
                for rows in updates:
                    numbers = torch.tensor(rows)
                    delta = log.space(len(rows)).view(torch.uint8)
                    delta.copy_(torch.full(delta.shape, 1 << len(rows), device=device))
                    merging = log.expect(numbers)
                    for some, into in merging:
                        merge_records(into, numbers[some].to(device), delta[some])
                    if not merging:
                        log.keep(numbers, delta)
                assert waits == full
                parts = log.deltas()
                held = [(row.tolist(), records.clone()) for row, records in parts]
                log.clear()
                assert waits == [*full, "undo _settle"]
            found = {
                row: set(change)
                for rows, records in held
                for row, change in zip(rows, records.cpu().tolist(), strict=True)
            }
            assert list(found) == list(expected)
            assert found == {row: {change} for row, change in expected.items()}
            assert not log._merged[0].places.cpu().any()
            assert not log.merges and not log._counters.cpu().any()
