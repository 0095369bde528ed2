"""The Triton kernels against the references: compiled on a GPU, otherwise interpreted."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from ecrm.kernels import dispatch  # noqa: E402
from ecrm.kernels.decode import decode  # noqa: E402
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward  # noqa: E402
from ecrm.kernels.hash_uniform import begin_rows, hash_uniform  # noqa: E402
from ecrm.kernels.parity_apply import parity_apply  # noqa: E402
from ecrm.kernels.records import (  # noqa: E402
    RecordLog,
    gather_records,
    merge_records,
    record_bytes,
    scatter_records,
    xor_records,
)
from ecrm.kernels.scatter_add import scatter_add  # noqa: E402
from ecrm.kernels.sparse_update import OPTIMIZERS, sparse_update, state_widths  # noqa: E402
from ecrm.kernels.unit_order import unique_by_unit  # noqa: E402
from ecrm.kernels.warm_up import Shapes, warm_up  # noqa: E402
from ecrm.model.determinism import prepared_torch  # noqa: E402
from ecrm.protection.coding import ReedSolomon  # noqa: E402
from support.gpu_waits import waits_for_gpu  # noqa: E402
from support.kernel_calls import calls  # noqa: E402


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)


@pytest.mark.parametrize(
    "height, n, width, offset",
    [(5, 24, 8, 0), (5, 24, 7, 0), (3, 9, 260, 4), (4, 6, 33, 1), (1, 1, 1, 0)],
)
def test_parity_apply(height, n, width, offset):
    storage, delta = random_bytes(height, width + 8), random_bytes(n, width, seed=1)
    rows = torch.randint(0, height, (n,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    coefficients = random_bytes(n, seed=3)
    coefficients[: min(n, 2)] = 1
    expected = storage.clone()
    parity_apply(
        expected[:, offset : offset + width], rows, coefficients, delta, backend="reference"
    )
    parity_apply(storage[:, offset : offset + width], rows, coefficients, delta, backend="triton")
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("width, stride", [(32, 32), (20, 24), (8, 16), (33, 35)])
@pytest.mark.parametrize("coefficient", [0, 1, 29])
@pytest.mark.parametrize("unique", [True, False])
def test_parity_apply_with_one_coefficient(width, stride, coefficient, unique):
    parity, delta = random_bytes(9, stride)[:, :width], random_bytes(7, stride, seed=1)[:, :width]
    rows = torch.tensor([8, 0, 3, 1, 7, 2, 5] if unique else [8, 0, 8, 8, 0, 2, 5]).to(DEVICE)
    expected = parity.clone()
    parity_apply(expected, rows, coefficient, delta, backend="reference")
    parity_apply(parity, rows, coefficient, delta, backend="triton", unique=unique)
    assert torch.equal(parity, expected)


def test_parity_apply_knows_all_65536_products():
    every_byte = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous().to(DEVICE)
    found, expected = (torch.zeros(256, 256, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    arguments = (
        torch.arange(256, device=DEVICE),
        torch.arange(256, dtype=torch.uint8, device=DEVICE),
        every_byte,
    )
    parity_apply(found, *arguments, backend="triton")
    parity_apply(expected, *arguments, backend="reference")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "k, m, n, width", [(4, 2, 3, 68), (3, 1, 2, 5), (4, 4, 1, 16), (2, 6, 2, 16)]
)
def test_decode(k, m, n, width):
    code = ReedSolomon(k, m)
    data = random_bytes(k, n, width)
    parity = decode(data, torch.from_numpy(code.coefficients.copy()), backend="triton")
    expected = code.encode(data.cpu().numpy().reshape(k, -1)).reshape(m, n, width)
    assert torch.equal(parity.cpu(), torch.from_numpy(expected))
    units = torch.cat([data, parity])
    present = tuple(range(m, k + m))
    matrix = torch.from_numpy(code.decode_matrix(present, range(m)).copy())
    assert torch.equal(decode([units[u] for u in present], matrix, backend="triton"), units[:m])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dimension, n, with_delta, offset, decay",
    [
        (16, 19, True, 0, {}),
        (13, 5, True, 1, {}),
        (64, 3, False, 0, {}),
        (1, 4, True, 0, {}),
        (520, 2, True, 3, {}),
        (16, 0, True, 0, {}),
        (13, 5, True, 1, {"weight_decay": 0.1}),
        (13, 5, True, 1, {"weight_decay": 0.1, "decoupled": True}),
    ],
)
def test_sparse_update(optimizer, dtype, dimension, n, with_delta, offset, decay):
    def table():
        random = torch.Generator().manual_seed(dimension)
        weights = (
            torch.randn(30, offset + dimension, generator=random).to(dtype).to(DEVICE)[:, offset:]
        )
        state = [
            torch.rand(30, w, generator=random).to(DEVICE)
            for w in state_widths(optimizer, dimension)
        ]
        rows = torch.randperm(30, generator=random)[:n].to(DEVICE)
        gradients = torch.randn(n, dimension, generator=random).to(DEVICE)
        delta = random_bytes(n, record_bytes(weights, state)) if with_delta else None
        return weights, state, rows, gradients, delta

    results = []
    for backend in ("reference", "triton"):
        weights, state, rows, gradients, delta = table()
        for step in (1, 2):
            sparse_update(
                weights,
                state,
                rows,
                gradients,
                optimizer,
                lr=0.05,
                step=step,
                **decay,
                delta=delta,
                backend=backend,
            )
        results.append([weights, *state] + ([delta] if with_delta else []))
    for expected, found in zip(*results):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_the_deltas_of_sparse_update_may_go_to_a_log():
    logs = []
    for backend in ("reference", "triton"):
        random = torch.Generator().manual_seed(1)
        weights, state = (
            torch.randn(30, 13, generator=random).to(DEVICE),
            [torch.rand(30, 1, generator=random).to(DEVICE)],
        )
        gradients = torch.randn(2, 19, 13, generator=random).to(DEVICE)
        log = RecordLog(
            torch.zeros(38, dtype=torch.int64).to(DEVICE),
            random_bytes(38, 60),
            torch.zeros(30, dtype=torch.int32).to(DEVICE),
        )
        log.records.zero_()
        log.counter = torch.zeros(1, dtype=torch.int64).to(DEVICE) if backend == "triton" else None
        for first, some in enumerate(gradients):
            rows = torch.arange(first, first + 19).to(DEVICE)
            sparse_update(
                weights, state, rows, some, "rowwise_adagrad", lr=0.05, log=log, backend=backend
            )
        logs.append([log.rows, log.records, log.places])
        log.settle()
        assert log.count == 20
    for expected, found in zip(*logs):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_delta_of_sparse_update_may_take_the_place_of_the_gradients(optimizer):
    results = []
    for backend in ("reference", "triton"):
        random = torch.Generator().manual_seed(1)
        weights = torch.randn(30, 13, generator=random).to(DEVICE)
        state = [
            torch.rand(30, w, generator=random).to(DEVICE) for w in state_widths(optimizer, 13)
        ]
        space = torch.randn(19, record_bytes(weights, state) // 4, generator=random).to(DEVICE)
        gradients, delta = space[:, :13], space.view(torch.uint8)
        if backend == "reference":
            gradients = gradients.clone()
        sparse_update(
            weights,
            state,
            torch.arange(19).to(DEVICE),
            gradients,
            optimizer,
            lr=0.05,
            delta=delta,
            backend=backend,
        )
        results.append([weights, *state, delta])
    for expected, found in zip(*results):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wanted", ["delta", "log", "padded delta", "padded log", None])
def test_deltas_of_rows_that_begin_are_their_records(optimizer, dtype, wanted):
    """`marks` tell which begin, and are the last four bytes of a record, with padding before."""
    padding = 12 if wanted is not None and "padded" in wanted else 0
    results = []
    for backend in ("reference", "cpu", "triton"):
        if backend == "cpu" and DEVICE == "cuda":
            continue
        random = torch.Generator().manual_seed(1)
        records = torch.randn(9, 8, generator=random)
        records[:, -1] = torch.arange(9) % 2
        weights, state = (
            records[:, :4].to(dtype).to(DEVICE),
            [torch.rand(9, w, generator=random) for w in state_widths(optimizer, 4)],
        )
        for part in state:
            part[records[:, -1] == 0] = 0.0
        state, marks = [part.to(DEVICE) for part in state], records.to(DEVICE)[:, -1]
        rows, gradients = torch.tensor([6, 1, 0, 4, 3]), torch.randn(5, 4, generator=random)
        used = record_bytes(weights, state)
        width = used + padding + 4
        delta = random_bytes(5, width) if wanted is not None and "delta" in wanted else None
        between = random_bytes(5, width)[:, used:-4] if delta is not None else 0
        log = RecordLog(
            torch.zeros(7, dtype=torch.int64).to(DEVICE),
            torch.zeros(7, width, dtype=torch.uint8).to(DEVICE),
            torch.zeros(9, dtype=torch.int32).to(DEVICE),
            counter=torch.zeros(1, dtype=torch.int64).to(DEVICE),
        )
        sparse_update(
            weights,
            state,
            rows.to(DEVICE),
            gradients.to(DEVICE),
            optimizer,
            lr=0.05,
            delta=delta,
            log=log if wanted is not None and "log" in wanted else None,
            marks=marks,
            backend=backend,
        )
        assert marks.tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 0]
        if wanted is not None:
            now = gather_records(weights, state, rows.to(DEVICE), backend="reference")
            found = log.records[:5] if delta is None else delta
            assert torch.equal(found[[0, 2, 3], :used], now[[0, 2, 3]])
            assert (found[:, used:-4] == between).all()
            last = found[:, -4:].contiguous().view(torch.float32).flatten()
            assert last.tolist() == [1, 0, 1, 1, 0]
        results.append([weights, *state, log.records] + ([] if delta is None else [delta]))
    for some in results[1:]:
        for expected, found in zip(results[0], some):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_kernels_equal_the_cpu(optimizer):
    """Bits on the GPU are those of the C++ on the CPU."""
    random = torch.Generator().manual_seed(0)
    weights, gradients = (
        torch.randn(1000, 64, generator=random),
        torch.randn(500, 64, generator=random),
    )
    state = [torch.rand(1000, w, generator=random) for w in state_widths(optimizer, 64)]
    rows = torch.randperm(1000, generator=random)[:500]
    delta = torch.zeros(500, record_bytes(weights, state), dtype=torch.uint8)
    on_gpu = [part.cuda() for part in (weights, *state, delta)]
    sparse_update(
        on_gpu[0], on_gpu[1:-1], rows.cuda(), gradients.cuda(), optimizer, lr=0.05, delta=on_gpu[-1]
    )
    sparse_update(weights, state, rows, gradients, optimizer, lr=0.05, delta=delta, backend="cpu")
    for mine, its in zip([weights, *state, delta], on_gpu):
        assert torch.equal(mine.view(torch.uint8), its.cpu().view(torch.uint8))


@pytest.mark.parametrize("dimension, width", [(16, 16), (16, 20), (13, 13), (13, 14), (520, 521)])
@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("with_picked", [True, False])
def test_scatter_add(dimension, width, unique, with_picked):
    """Sums whose order matters, of rows that hold nothing yet and of rows that do."""
    random = torch.Generator().manual_seed(1)
    index = torch.randperm(31, generator=random)[:29]
    if not unique:
        index = torch.cat(
            [index, torch.randint(0, 31, (11,), generator=random), torch.full((20,), 3)]
        )
    if dimension > 100:
        index = index[:3].repeat(1 if unique else 2)
    values = torch.randn(len(index), dimension, generator=random) * 1e3
    values[:2] = -0.0
    picked = torch.randperm(len(index), generator=random) if with_picked else None
    results = []
    for backend in ("reference", "triton"):
        out, seen = torch.randn(31, width, generator=random.manual_seed(2)), torch.arange(31) % 2
        out[:5] = -0.0
        out, seen = out.to(DEVICE), seen.to(torch.uint8).to(DEVICE)
        scatter_add(
            out if width > dimension else out[:, :dimension],
            index.to(DEVICE),
            values.to(DEVICE),
            backend,
            seen if width > dimension else None,
            None if picked is None else picked.to(DEVICE),
            unique=unique,
        )
        results.append([out, seen])
    for expected, found in zip(*results):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dimension, dtype", [(16, torch.float32), (5, torch.float16)])
def test_records(dimension, dtype):
    results = []
    for backend in ("reference", "triton"):
        weights = torch.arange(12 * (dimension + 3), dtype=dtype).view(12, -1)[:, :dimension]
        state = [torch.arange(12.0), torch.arange(24.0).view(12, 2)]
        weights, state = weights.to(DEVICE), [part.to(DEVICE) for part in state]
        rows = torch.tensor([3, 11, 0, 7, 5]).to(DEVICE)
        found = gather_records(weights, state, rows, backend=backend)
        scatter_records(weights, state, rows, found.flip(0), backend=backend)
        picked = torch.tensor([4, 4]).to(DEVICE)
        scatter_records(weights, state, rows[:2], found, backend=backend, picked=picked)
        delta = random_bytes(2, found.shape[1])
        xor_records(weights, state, torch.tensor([1, 7]).to(DEVICE), delta, backend=backend)
        results.append([found, weights, *state])
    for expected, found in zip(*results):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("width", [32, 12, 7])
def test_merge_records(width):
    """New rows and known ones together; the device counts."""
    logs = []
    for backend in ("reference", "triton"):
        log = RecordLog(
            torch.zeros(40, dtype=torch.int64).to(DEVICE),
            torch.zeros(40, width, dtype=torch.uint8).to(DEVICE),
            torch.zeros(20, dtype=torch.int32).to(DEVICE),
            counter=torch.zeros(1, dtype=torch.int64).to(DEVICE),
        )
        for turn, rows in enumerate([[5, 2, 9], [], [1, 9, 0, 2], [2]]):
            delta = random_bytes(len(rows), width, seed=turn)
            numbers = torch.tensor(rows, dtype=torch.int64).to(DEVICE)
            merge_records(log, numbers, delta, backend=backend)
        assert log.count >= 5
        log.settle()
        assert log.count == 5
        logs.append([log.rows, log.records, log.places, log.counter])
    for expected, found in zip(*logs):
        assert torch.equal(found, expected)


def test_a_log_without_a_counter_is_refused():
    numbers, places = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    log = RecordLog(numbers.to(DEVICE), random_bytes(4, 8), places.to(DEVICE))
    with pytest.raises(ValueError, match="a log without a counter"):
        merge_records(log, torch.tensor([1]).to(DEVICE), random_bytes(1, 8), backend="triton")


@pytest.mark.parametrize("dimension", [16, 5])
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("seed", [7, 2**64 - 1])
def test_hash_uniform(dimension, per_row, seed):
    rows = torch.tensor([0, 5, 2**40, 1]).to(DEVICE)
    table = torch.tensor([3, -(2**63), 0, 3]).to(DEVICE) if per_row else 2**63 + 1
    bound = torch.tensor([0.5, 1.0, 0.0, 0.1]).to(DEVICE) if per_row else 0.3
    expected, found = (
        hash_uniform(seed, table, rows, dimension, bound, backend)
        for backend in ("reference", "triton")
    )
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("dimension", [16, 5])
def test_begin_rows(backend, dimension):
    """Rows never updated get their values, the others keep theirs."""
    rows, table = torch.tensor([9, 0, 4, 2, 1]), torch.tensor([1, 2, 1, 2, 1])
    targets, bound = torch.tensor([5, 0, 3, 1, 4]), torch.full((5,), 0.3)
    results = []
    for name in ("reference", backend):
        if name == "cpu" and DEVICE == "cuda":
            pytest.skip("a GPU is there: the CPU's is tested elsewhere")
        records = torch.full((6, dimension + 3), 7.0).to(DEVICE)
        records[:, -1] = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
        weights, touched = records[:, :dimension], records[:, -1]
        given = [part.to(DEVICE) for part in (targets, table, rows, bound)]
        begin_rows(weights, touched, given[0], 3, *given[1:], backend=name)
        results.append(records)
        assert (weights == 7.0).all(dim=1).tolist() == [False, True, True, False, True, False]
    assert torch.equal(results[1].view(torch.int32), results[0].view(torch.int32))


@pytest.mark.parametrize(
    "batch, features, dimension",
    [(3, 4, 16), (2, 11, 4), (2, 1, 13), (2, 0, 5), (0, 0, 4), (1, 2, 0), (3, 4, 1)],
)
def test_dot_interaction(batch, features, dimension):
    random = torch.Generator().manual_seed(features)
    dense = torch.randn(batch, dimension + 1, generator=random).to(DEVICE)[:, :dimension]
    values = torch.randn(7, dimension, generator=random).to(DEVICE)
    places = torch.randint(0, 5, (batch * features,), generator=random).to(DEVICE)
    forward = [
        dot_interaction(dense, values, places, backend) for backend in ("reference", "triton")
    ]
    assert torch.equal(forward[1].view(torch.int32), forward[0].view(torch.int32))
    gradients = torch.randn(forward[0].shape, generator=random).to(DEVICE)
    results = [
        dot_interaction_backward(gradients, dense, values, places, backend)
        for backend in ("reference", "triton")
    ]
    for expected, found in zip(*results):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("units", [1, 3, 4])
@pytest.mark.parametrize("rows", [[], [6], [7, 3, 7, 2**40 + 1, 0, 3, 4, 11], [5] * 9])
def test_unique_by_unit(units, rows):
    numbers = torch.tensor(rows, dtype=torch.int64).to(DEVICE)
    results = [unique_by_unit(numbers, units, backend) for backend in ("reference", "triton")]
    for expected, found in zip(*results):
        assert torch.equal(found, expected)


def test_only_the_number_of_unique_rows_is_waited_for(gpu):
    with gpu.used("auto") as device:
        waits = {}
        for name, call in calls(Shapes(8, "rowwise_adagrad", features=3), device):
            with waits_for_gpu() as waits[name]:
                call()
    assert len(waits) > 15
    waited = {name: places for name, places in waits.items() if places}
    assert waited == {"unique_by_unit": ["kernel unique_by_unit"]}


def test_the_warm_up_calls_every_operation(monkeypatch):
    monkeypatch.setattr(dispatch, "_taken", {})
    warm_up(Shapes(dimension=4, optimizer="adam", features=1), DEVICE, "triton")
    operations = {"parity_apply", "sparse_update", "decode", "scatter_add", "dot_interaction"}
    operations |= {"hash_uniform", "begin_rows", "merge_records"}
    operations |= {f"{name}_records" for name in ("gather", "scatter", "xor")}
    assert dispatch.taken() == dict.fromkeys(operations, "triton")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_warm_up_runs_with_deterministic_algorithms(optimizer):
    """As the ranks of a script have them: torch refuses then what writes on what it reads."""
    with prepared_torch(threads=1):
        warm_up(Shapes(dimension=4, optimizer=optimizer, features=1), DEVICE, "reference")
