"""The Triton kernels against the references: compiled on a GPU, otherwise interpreted."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from ecrm.coding import ReedSolomon  # noqa: E402
from ecrm.kernels.decode import decode  # noqa: E402
from ecrm.kernels.parity_apply import parity_apply  # noqa: E402
from ecrm.kernels.records import RecordLog, record_bytes  # noqa: E402
from ecrm.kernels.sparse_update import OPTIMIZERS, sparse_update, state_widths  # noqa: E402


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


@pytest.mark.parametrize("k, m, n, width", [(4, 2, 3, 68), (3, 1, 2, 5), (4, 4, 1, 16)])
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
        (1024, 2, True, 3, {}),
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
        for first, some in enumerate(gradients):
            rows = torch.arange(first, first + 19).to(DEVICE)
            sparse_update(
                weights, state, rows, some, "rowwise_adagrad", lr=0.05, log=log, backend=backend
            )
        logs.append([log.rows, log.records, log.places])
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
