"""Records gathered, scattered and XORed, by every backend and instruction set."""

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.records import gather_records, merge_records, record_bytes, scatter_records, xor_records

BACKENDS = ("reference", *native.supported_instruction_sets())


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "reference":
        yield "reference"
        return
    with native.forced(request.param):
        yield "cpu"


def random_table(height, dimension, dtype, widths, seed=0):
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(height, dimension, generator=random).to(dtype)
    return weights, [torch.randn(height, width, generator=random) for width in widths]


def expected_records(weights, state, rows):
    return torch.stack(
        [torch.cat([part[row].contiguous().view(torch.uint8) for part in (weights, *state)]) for row in rows.tolist()]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dimension, widths", [(1, ()), (3, (1,)), (64, (1,)), (100, (100,)), (17, (17, 17)), (1024, (1,)), (65, (16,))]
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
    assert torch.equal(other, before) and all(torch.equal(a, b) for a, b in zip(other_state, before_state))

    scatter_records(other, other_state, rows, records, backend=backend)
    before[rows] = weights[rows]
    for part, source in zip(before_state, state):
        part[rows] = source[rows]
    assert torch.equal(other, before) and all(torch.equal(a, b) for a, b in zip(other_state, before_state))


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


def test_many_rows(backend):
    weights, state = random_table(500, 16, torch.float32, (1,))
    rows = torch.randint(0, 500, (3000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        gather_records(weights, state, rows, backend=backend), expected_records(weights, state, rows)
    )


@pytest.mark.parametrize("width", [1, 4, 36, 64, 100, 520])
def test_a_log_of_merged_records_has_each_row_once_and_the_xor_of_its_deltas(backend, width):
    generator = torch.Generator().manual_seed(width)
    log_rows, log = torch.full((300,), -7), torch.full((300, width), 7, dtype=torch.uint8)
    places, count, expected = torch.zeros(90, dtype=torch.int32), 0, {}
    for size in (0, 20, 1, 60, 60):
        rows = torch.randperm(90, generator=generator)[:size]
        delta = torch.randint(0, 256, (size, width), dtype=torch.uint8, generator=generator)
        for row, change in zip(rows.tolist(), delta):
            expected[row] = expected.get(row, torch.zeros(width, dtype=torch.uint8)) ^ change
        count = merge_records(log_rows, log, count, places, rows, delta, backend=backend)
        assert log_rows[:count].tolist() == list(expected)
        assert torch.equal(log[:count], torch.stack(list(expected.values())) if expected else log[:0])
        assert places[log_rows[:count]].tolist() == list(range(1, count + 1)) and int(places.count_nonzero()) == count
        assert (log_rows[count:] == -7).all() and (log[count:] == 7).all()


def test_deltas_merged_into_a_log_may_be_strided_and_begin_anywhere(backend):
    wide = torch.randint(0, 256, (3, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    log_rows, log, places = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 21, dtype=torch.uint8), torch.zeros(9, dtype=torch.int32)
    count = merge_records(log_rows, log, 0, places, torch.tensor([5, 2]), wide[:2, 3:24], backend=backend)
    count = merge_records(log_rows, log, count, places, torch.tensor([2]), wide[2:, 7:28], backend=backend)
    assert log_rows[:count].tolist() == [5, 2]
    assert torch.equal(log[0], wide[0, 3:24]) and torch.equal(log[1], wide[1, 3:24] ^ wide[2, 7:28])


def test_a_log_without_room_is_refused_before_the_first_write(backend):
    log_rows, log, places = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.int32)
    delta = torch.ones(2, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a log of 1 rows has room for 2, needed: 3"):
        merge_records(log_rows, log, 1, places, torch.tensor([3, 4]), delta, backend=backend)
    with pytest.raises(ValueError, match=r"rows\[1\] is 9, outside 0..8"):
        merge_records(log_rows, log, 0, places, torch.tensor([3, 9]), delta, backend=backend)
    with pytest.raises(ValueError, match=r"places has shape \[3, 3\], needed: \[3\]"):
        merge_records(log_rows, log, 0, places.view(3, 3), torch.tensor([1, 2]), delta, backend=backend)
    with pytest.raises(TypeError, match="torch.int64"):
        merge_records(log_rows, log, 0, places.long(), torch.tensor([3, 4]), delta, backend=backend)
    assert not log.any() and not places.any()


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
        ({"records": torch.zeros(1, 35, dtype=torch.uint8)}, ValueError, r"records has shape \[1, 35\], needed: \[1,"),
        ({"records": torch.zeros(1, 36)}, TypeError, "records is torch.float32"),
        ({"state": [torch.zeros(3)]}, ValueError, r"state\[0\] has shape \[3, 1\], needed: \[4, 1\]"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    weights = torch.ones(4, 8)
    arguments = {
        "weights": weights, "state": [torch.ones(4)], "rows": torch.tensor([1]),
        "records": torch.zeros(1, 36, dtype=torch.uint8),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        scatter_records(**(arguments | change))
    assert (weights == 1).all()


def test_there_is_no_triton_kernel_to_ask_for():
    with pytest.raises(ValueError, match="gather_records: no Triton kernel"):
        gather_records(torch.ones(2, 2), [], torch.tensor([0]), backend="triton")
