"""Records gathered, scattered and XORed, by every backend and instruction set."""

import pytest
import torch

from ecrm.kernels.records import (
    RecordLog,
    gather_records,
    merge_records,
    record_bytes,
    scatter_records,
    xor_records,
)


def random_table(height, dimension, dtype, widths, seed=0):
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(height, dimension, generator=random).to(dtype)
    return weights, [torch.randn(height, width, generator=random) for width in widths]


def expected_records(weights, state, rows):
    return torch.stack(
        [
            torch.cat([part[row].contiguous().view(torch.uint8) for part in (weights, *state)])
            for row in rows.tolist()
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dimension, widths",
    [(1, ()), (3, (1,)), (64, (1,)), (100, (100,)), (17, (17, 17)), (1024, (1,)), (65, (16,))],
)
def test_gather_scatter_and_xor(backend, dtype, dimension, widths):
    weights, state = random_table(30, dimension, dtype, widths)
    rows = torch.tensor([5, 29, 0, 7, 11])
    records = gather_records(weights, state, rows, backend=backend)
    assert records.shape == (5, record_bytes(weights, state))
    assert torch.equal(records, expected_records(weights, state, rows))

    other, other_state = random_table(30, dimension, dtype, widths, seed=1)
    before, before_state = other.clone(), [part.clone() for part in other_state]
    delta = records ^ expected_records(other, other_state, rows)
    xor_records(other, other_state, rows, delta, backend=backend)
    assert torch.equal(expected_records(other, other_state, rows), records)
    xor_records(other, other_state, rows, delta, backend=backend)
    assert torch.equal(other, before) and all(
        torch.equal(a, b) for a, b in zip(other_state, before_state)
    )

    scatter_records(other, other_state, rows, records, backend=backend)
    before[rows] = weights[rows]
    for part, source in zip(before_state, state):
        part[rows] = source[rows]
    assert torch.equal(other, before) and all(
        torch.equal(a, b) for a, b in zip(other_state, before_state)
    )


def test_state_may_be_a_vector_and_everything_strided(backend):
    storage = torch.randn(10, 9)
    weights, state = storage[:, 1:6], [storage[:, 7]]
    rows = torch.tensor([3, 3, 9])
    expected = expected_records(weights, [storage[:, 7:8]], rows)
    wide = torch.zeros(3, 40, dtype=torch.uint8)
    wide[:, 5:29] = gather_records(weights, state, rows, backend=backend)
    assert torch.equal(wide[:, 5:29], expected)
    storage.zero_()
    scatter_records(weights, state, rows[1:], wide[1:, 5:29], backend=backend)
    assert torch.equal(expected_records(weights, [storage[:, 7:8]], rows), expected)
    assert storage[:, [0, 6, 8]].abs().sum() == 0


def test_scattered_records_are_picked(backend):
    weights, state = random_table(30, 17, torch.float32, (1,))
    rows, picked = torch.tensor([5, 29, 0, 7]), torch.tensor([39, 2, 2, 0])
    wide = torch.randint(
        0, 256, (40, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    before = expected_records(weights, state, torch.arange(30))
    scatter_records(weights, state, rows, wide[:, 3:75], backend=backend, picked=picked)
    before[rows] = wide[:, 3:75][picked]
    assert torch.equal(expected_records(weights, state, torch.arange(30)), before)
    for wrong, message in (
        (torch.tensor([0, 1, 2, 40]), r"picked\[3\] is 40, outside 0..39"),
        (picked[1:], r"picked has shape \[3\], needed: \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            scatter_records(weights, state, rows, wide[:, 3:75], backend=backend, picked=wrong)
    with pytest.raises(ValueError, match=r"records has shape \[40, 71\], needed: \[40, 72\]"):
        scatter_records(weights, state, rows, wide[:, :71], backend=backend, picked=picked)
    assert torch.equal(expected_records(weights, state, torch.arange(30)), before)


def test_many_rows(backend):
    weights, state = random_table(500, 16, torch.float32, (1,))
    rows = torch.randint(0, 500, (3000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        gather_records(weights, state, rows, backend=backend),
        expected_records(weights, state, rows),
    )


def _log(room: int, width: int, rows: int) -> RecordLog:
    return RecordLog(
        torch.full((room,), -7),
        torch.full((room, width), 7, dtype=torch.uint8),
        torch.zeros(rows, dtype=torch.int32),
    )


@pytest.mark.parametrize("width", [1, 4, 36, 64, 100, 520])
def test_a_log_of_merged_records_has_each_row_once_and_the_xor_of_its_deltas(backend, width):
    generator = torch.Generator().manual_seed(width)
    log, expected = _log(300, width, 90), {}
    for size in (0, 20, 1, 60, 60):
        rows = torch.randperm(90, generator=generator)[:size]
        delta = torch.randint(0, 256, (size, width), dtype=torch.uint8, generator=generator)
        for row, change in zip(rows.tolist(), delta):
            expected[row] = expected.get(row, torch.zeros(width, dtype=torch.uint8)) ^ change
        merge_records(log, rows, delta, backend=backend)
        assert log.rows[: log.count].tolist() == list(expected)
        assert torch.equal(
            log.records[: log.count],
            torch.stack(list(expected.values())) if expected else log.records[:0],
        )
        assert (
            log.places[log.rows[: log.count]].tolist() == list(range(1, log.count + 1))
            and int(log.places.count_nonzero()) == log.count
        )
        assert (log.rows[log.count :] == -7).all() and (log.records[log.count :] == 7).all()


def test_deltas_merged_into_a_log_may_be_strided_and_begin_anywhere(backend):
    wide = torch.randint(
        0, 256, (3, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    log = _log(4, 21, 9)
    merge_records(log, torch.tensor([5, 2]), wide[:2, 3:24], backend=backend)
    merge_records(log, torch.tensor([2]), wide[2:, 7:28], backend=backend)
    assert log.rows[: log.count].tolist() == [5, 2]
    assert torch.equal(log.records[0], wide[0, 3:24]) and torch.equal(
        log.records[1], wide[1, 3:24] ^ wide[2, 7:28]
    )


def test_a_log_without_room_is_refused_before_the_first_write(backend):
    log, delta = _log(2, 8, 9), torch.ones(2, 8, dtype=torch.uint8)
    log.count = 1
    with pytest.raises(ValueError, match="a log of 1 rows has room for 2, needed: 3"):
        merge_records(log, torch.tensor([3, 4]), delta, backend=backend)
    log.count = 0
    with pytest.raises(ValueError, match=r"rows\[1\] is 9, outside 0..8"):
        merge_records(log, torch.tensor([3, 9]), delta, backend=backend)
    with pytest.raises(ValueError, match=r"places has shape \[3, 3\], needed: \[3\]"):
        merge_records(
            RecordLog(log.rows, log.records, log.places.view(3, 3)),
            torch.tensor([1, 2]),
            delta,
            backend=backend,
        )
    with pytest.raises(TypeError, match="torch.int64"):
        merge_records(
            RecordLog(log.rows, log.records, log.places.long()),
            torch.tensor([3, 4]),
            delta,
            backend=backend,
        )
    assert (log.records == 7).all() and not log.places.any()


def test_nothing_to_do(backend):
    weights, state = random_table(4, 8, torch.float32, (1,))
    none = torch.zeros(0, dtype=torch.int64)
    assert gather_records(weights, state, none, backend=backend).shape == (0, 36)
    scatter_records(weights, state, none, torch.zeros(0, 36, dtype=torch.uint8), backend=backend)
    xor_records(weights, state, none, torch.zeros(0, 36, dtype=torch.uint8), backend=backend)
    assert gather_records(torch.zeros(4, 0), [], torch.arange(3), backend=backend).shape == (3, 0)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rows": torch.tensor([4])}, ValueError, r"rows\[0\] is 4, outside 0..3"),
        (
            {"records": torch.zeros(1, 35, dtype=torch.uint8)},
            ValueError,
            r"records has shape \[1, 35\], needed: \[1,",
        ),
        ({"records": torch.zeros(1, 36)}, TypeError, "records is torch.float32"),
        (
            {"state": [torch.zeros(3)]},
            ValueError,
            r"state\[0\] has shape \[3, 1\], needed: \[4, 1\]",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    weights = torch.ones(4, 8)
    arguments = {
        "weights": weights,
        "state": [torch.ones(4)],
        "rows": torch.tensor([1]),
        "records": torch.zeros(1, 36, dtype=torch.uint8),
    }
    with pytest.raises(error, match=message):
        scatter_records(**(arguments | change))
    assert (weights == 1).all()
