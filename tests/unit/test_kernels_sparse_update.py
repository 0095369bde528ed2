"""sparse_update: every instruction set against the reference.

test_kernels_fbgemm.py compares both with FBGEMM.
"""

import contextlib
import ctypes

import numpy as np
import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.records import RecordLog, gather_records, merge_records, record_bytes, xor_records
from ecrm.kernels.sparse_update import OPTIMIZERS, sparse_update, state_widths
from ecrm.kernels.sparse_update.reference import fused_multiply_add

CPU = native.supported_instruction_sets()
TYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMENSIONS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 32, 48, 64, 100, 128, 129, 1024)
HYPER = {"lr": 0.05, "eps": 1e-8, "betas": (0.9, 0.999)}
DECAYS = {
    "no decay": {},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled": True},
}
every_decay = pytest.mark.parametrize("decay", DECAYS)


class Table:
    """Random weights and state, and what a step needs."""

    def __init__(self, height, dimension, dtype, optimizer, n, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.optimizer = optimizer
        self.weights = torch.randn(height, dimension, generator=random).to(dtype)
        self.state = [
            torch.rand(height, w, generator=random) for w in state_widths(optimizer, dimension)
        ]
        self.rows = torch.randperm(height, generator=random)[:n]
        self.gradients = torch.randn(n, dimension, generator=random)
        self.delta = torch.full((n, record_bytes(self.weights, self.state)), 7, dtype=torch.uint8)

    def step(self, backend, with_delta=True, step=1, decay="no decay"):
        delta = self.delta if with_delta else None
        sparse_update(
            self.weights,
            self.state,
            self.rows,
            self.gradients,
            self.optimizer,
            **HYPER,
            **DECAYS[decay],
            step=step,
            delta=delta,
            backend=backend,
        )

    def assert_equals(self, other):
        for mine, theirs in zip(
            [self.weights, *self.state, self.delta], [other.weights, *other.state, other.delta]
        ):
            assert same_bits(mine, theirs)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def pair(*arguments, **options):
    return Table(*arguments, **options), Table(*arguments, **options)


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", TYPES)
@every_decay
def test_every_dimension_equals_the_reference(instruction_set, optimizer, dtype, decay):
    for dimension in DIMENSIONS:
        found, expected = pair(40, dimension, dtype, optimizer, 31, seed=dimension)
        before = gather_records(
            expected.weights, expected.state, expected.rows, backend="reference"
        )
        for step in (1, 2):
            expected.step("reference", step=step, decay=decay)
            with native.forced(instruction_set):
                found.step("cpu", step=step, decay=decay)
            found.assert_equals(expected)
            after = gather_records(
                expected.weights, expected.state, expected.rows, backend="reference"
            )
            assert torch.equal(found.delta, before ^ after)
            before = after


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_delta_the_result_is_the_same(instruction_set, optimizer):
    found, expected = pair(40, 37, torch.float32, optimizer, 31)
    expected.step("reference", with_delta=False)
    with native.forced(instruction_set):
        found.step("cpu", with_delta=False)
    found.assert_equals(expected)
    assert (found.delta == 7).all()


@pytest.mark.parametrize("instruction_set", [*CPU, "reference"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_decay
def test_the_delta_may_take_the_place_of_the_gradients(instruction_set, optimizer, decay):
    backend = "cpu" if instruction_set in CPU else "reference"
    with native.forced(instruction_set) if backend == "cpu" else contextlib.nullcontext():
        for dimension in DIMENSIONS:
            apart, together = pair(40, dimension, torch.float32, optimizer, 31, seed=dimension)
            for step in (1, 2):
                apart.step("reference", step=step, decay=decay)
                space = torch.full((31, together.delta.shape[1] // 4), 7.0)
                space[:, :dimension] = together.gradients
                together.gradients, together.delta = space[:, :dimension], space.view(torch.uint8)
                together.step(backend, step=step, decay=decay)
                together.assert_equals(apart)
                together.gradients = apart.gradients


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_delta_takes_the_step_back(instruction_set, optimizer, dtype):
    table, untouched = pair(40, 21, dtype, optimizer, 31)
    with native.forced(instruction_set):
        table.step("cpu")
        assert not torch.equal(table.weights, untouched.weights)
        xor_records(table.weights, table.state, table.rows, table.delta)
    assert same_bits(table.weights, untouched.weights)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(table.state, untouched.state))


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dimension", [5, 16])
def test_strided_views_leave_their_surroundings_alone(instruction_set, optimizer, dimension):
    """Weights and state inside one wide matrix, as a storage of whole records would have them."""
    table, expected = pair(20, dimension, torch.float32, optimizer, 13)
    expected.step("reference")
    widths = [dimension, *state_widths(optimizer, dimension)]
    storage = torch.full((20, sum(widths) + 3), 5.0)
    parts, at = [], 1
    for part, width in zip([table.weights, *table.state], widths):
        parts.append(storage[:, at : at + width])
        parts[-1].copy_(part)
        at += width
    gradients = torch.zeros(13, dimension + 2)
    gradients[:, 1:-1] = table.gradients
    delta = torch.full((13, table.delta.shape[1] + 9), 3, dtype=torch.uint8)
    with native.forced(instruction_set):
        sparse_update(
            parts[0],
            parts[1:],
            table.rows,
            gradients[:, 1:-1],
            optimizer,
            **HYPER,
            delta=delta[:, 3:-6],
            backend="cpu",
        )
    for part, value in zip(parts, [expected.weights, *expected.state]):
        assert same_bits(part, value)
    assert torch.equal(delta[:, 3:-6], expected.delta)
    assert (delta[:, :3] == 3).all() and (delta[:, -6:] == 3).all()
    assert (storage[:, 0] == 5).all() and (storage[:, at:] == 5).all()


@pytest.mark.parametrize("instruction_set", CPU)
def test_weights_at_an_odd_address(instruction_set):
    table, expected = pair(10, 12, torch.float32, "rowwise_adagrad", 10)
    expected.step("reference")
    odd = torch.frombuffer(
        bytearray(10 * 12 * 4 + 1), dtype=torch.float32, offset=1, count=120
    ).view(10, 12)
    assert odd.data_ptr() % 4 == 1
    odd.copy_(table.weights)
    with native.forced(instruction_set):
        sparse_update(
            odd, table.state, table.rows, table.gradients, "rowwise_adagrad", **HYPER, backend="cpu"
        )
    assert torch.equal(odd, expected.weights)


@pytest.mark.parametrize("instruction_set", CPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_extreme_values_equal_the_reference(instruction_set, optimizer, dtype):
    """Zeros, infinities, subnormals, the largest and halfway values; NaNs stay NaNs."""
    extremes = torch.tensor(
        [
            0.0,
            -0.0,
            1e-45,
            -1e-38,
            6e-08,
            5.96e-08,
            65504.0,
            65519.996,
            65520.0,
            3.4e38,
            -3.4e38,
            float("inf"),
            1.0,
            -float("inf"),
            float("nan"),
            1.0009765,
            1.00390625,
            2048.5,
            3e-05,
            6.1e-05,
        ]
    )
    dimension = extremes.numel()
    found, expected = pair(dimension, dimension, dtype, optimizer, dimension)
    for table in (found, expected):
        table.weights.copy_(extremes[None, :].expand(dimension, -1).to(dtype))
        table.gradients.copy_(extremes[:, None].expand(-1, dimension))
    expected.step("reference")
    with native.forced(instruction_set):
        found.step("cpu")
    for mine, theirs in zip([found.weights, *found.state], [expected.weights, *expected.state]):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert same_bits(mine.nan_to_num(1.5), theirs.nan_to_num(1.5))


def test_the_references_fused_multiply_add_rounds_once():
    libm = ctypes.CDLL("libm.so.6")
    libm.fmaf.restype = ctypes.c_float
    libm.fmaf.argtypes = [ctypes.c_float] * 3
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(4000).astype(np.float32) for _ in range(3))
    c[:1000] = (-(a[:1000].astype(np.float64) * b[:1000])).astype(np.float32)  # nearly cancels
    # rounding twice would give a tie
    a[1000], b[1000], c[1000] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60
    a[1001], b[1001], c[1001] = 1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60)
    found = fused_multiply_add(*(torch.from_numpy(x) for x in (a, b, c)))
    assert found.tolist() == [
        libm.fmaf(*values) for values in zip(a.tolist(), b.tolist(), c.tolist())
    ]
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert found[1000] != twice[1000] or found[1001] != twice[1001]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_decays_is_what_a_step_on_decayed_numbers_is(backend, optimizer):
    """L2 is a step with other gradients, decoupled decay one from other weights."""
    for decay in ("L2", "decoupled"):
        found, expected = pair(40, 21, torch.float32, optimizer, 31)
        before = [part.clone() for part in (found.weights, *found.state)]
        touched = expected.weights[expected.rows]
        if decay == "L2":
            expected.gradients += touched * 0.1
        else:
            expected.weights[expected.rows] = touched * (1 - 0.05 * 0.1)
        found.step(backend, decay=decay)
        expected.step("reference", with_delta=False)
        assert same_bits(found.weights, expected.weights)
        assert all(same_bits(mine, theirs) for mine, theirs in zip(found.state, expected.state))
        plain = Table(40, 21, torch.float32, optimizer, 31)
        plain.step(backend, with_delta=False)
        assert not torch.equal(plain.weights, found.weights)
        rest = torch.ones(40, dtype=torch.bool)
        rest[found.rows] = False
        assert same_bits(found.weights[rest], before[0][rest])
        xor_records(found.weights, found.state, found.rows, found.delta)
        assert all(map(same_bits, (found.weights, *found.state), before))


def test_adam_is_close_to_torchs_own():
    table = Table(30, 16, torch.float32, "adam", 30)
    for moment in table.state:
        moment.zero_()
    table.rows = torch.arange(30)
    parameter = torch.nn.Parameter(table.weights.clone())
    adam = torch.optim.Adam([parameter], lr=HYPER["lr"], eps=HYPER["eps"], betas=HYPER["betas"])
    for step in range(1, 6):
        parameter.grad = table.gradients.clone()
        adam.step()
        table.step("cpu", step=step)
    torch.testing.assert_close(table.weights, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n, dimension", [(0, 8), (3, 0)])
def test_nothing_to_do(backend, optimizer, n, dimension):
    table, before = pair(4, dimension, torch.float32, optimizer, n)
    table.step(backend, with_delta=n == 0)
    table.assert_equals(before)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"optimizer": "lamb"},
            ValueError,
            "optimizer 'lamb' is not one of sgd, rowwise_adagrad, adagrad, adam",
        ),
        ({"state": []}, ValueError, "0 state tensors given, needed: 1"),
        (
            {"state": [torch.zeros(5)]},
            ValueError,
            r"state\[0\] has shape \[5, 1\], needed: \[6, 1\]",
        ),
        ({"state": [torch.zeros(6).double()]}, TypeError, r"state\[0\] is torch.float64"),
        ({"rows": torch.tensor([0, 6])}, ValueError, r"rows\[1\] is 6, outside 0..5"),
        (
            {"gradients": torch.zeros(2, 9)},
            ValueError,
            r"gradients has shape \[2, 9\], needed: \[2, 8\]",
        ),
        ({"gradients": torch.zeros(2, 8).half()}, TypeError, "gradients is torch.float16"),
        (
            {"delta": torch.zeros(2, 35, dtype=torch.uint8)},
            ValueError,
            r"delta has shape \[2, 35\], needed: \[2, 36\]",
        ),
        ({"weights": torch.zeros(6, 8).double()}, TypeError, "weights is torch.float64"),
        ({"weights": torch.zeros(8)}, ValueError, r"weights has shape \[8\]"),
        ({"step": 0}, ValueError, "step is 0"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' is not one of"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    weights, state = torch.ones(6, 8), [torch.ones(6)]
    arguments = {
        "weights": weights,
        "state": state,
        "rows": torch.tensor([0, 1]),
        "gradients": torch.ones(2, 8),
        "optimizer": "rowwise_adagrad",
        "lr": 0.1,
    }
    with pytest.raises(error, match=message):
        sparse_update(**(arguments | change))
    assert (weights == 1).all() and (state[0] == 1).all()


@pytest.mark.parametrize("instruction_set", (*CPU, "reference"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("beyond", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@every_decay
def test_deltas_go_to_a_log_as_if_they_were_merged_into_it_afterwards(
    instruction_set, optimizer, dtype, beyond, decay, monkeypatch
):
    """A hundred rows at a time, some of which are in the log already.

    The bytes `beyond` the record are zeros.
    """
    backend = "reference" if instruction_set == "reference" else "cpu"
    for dimension in (3, 32, 65):
        found, expected = pair(700, dimension, dtype, optimizer, 650, seed=dimension)
        width = found.delta.shape[1] + beyond
        monkeypatch.setattr("ecrm.kernels.sparse_update._LOGGED_BYTES", 100 * width)
        wide = torch.zeros(650, dimension + 2)
        wide[:, 1:-1] = found.gradients
        logs = [
            RecordLog(
                torch.full((800,), -7),
                torch.full((800, width), 7, dtype=torch.uint8),
                torch.zeros(700, dtype=torch.int32),
            )
            for _ in range(2)
        ]
        for log in logs:
            merge_records(
                log,
                torch.arange(0, 100),
                torch.full((100, width), 9, dtype=torch.uint8),
                backend="reference",
            )
        expected.step("reference", decay=decay)
        delta = torch.zeros(650, width, dtype=torch.uint8)
        delta[:, : width - beyond] = expected.delta
        merge_records(logs[1], expected.rows, delta, backend="reference")
        with native.forced(instruction_set) if backend == "cpu" else contextlib.nullcontext():
            sparse_update(
                found.weights,
                found.state,
                found.rows,
                wide[:, 1:-1],
                optimizer,
                **HYPER,
                **DECAYS[decay],
                log=logs[0],
                backend=backend,
            )
        found.delta = expected.delta
        found.assert_equals(expected)
        assert logs[0].count == logs[1].count > 650
        for mine, theirs in zip(logs[0].tensors.values(), logs[1].tensors.values()):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_log_that_cannot_take_the_deltas_is_refused_before_the_first_write(backend):
    table, same = pair(20, 8, torch.float32, "rowwise_adagrad", 5)
    places = torch.zeros(20, dtype=torch.int32)

    def update(room, width, **options):
        log = RecordLog(
            torch.zeros(room, dtype=torch.int64),
            torch.zeros(room, width, dtype=torch.uint8),
            places,
        )
        sparse_update(
            table.weights,
            table.state,
            table.rows,
            table.gradients,
            "rowwise_adagrad",
            **HYPER,
            log=log,
            backend=backend,
            **options,
        )

    with pytest.raises(ValueError, match="a log of 0 rows has room for 4, needed: 5"):
        update(4, 36)
    with pytest.raises(ValueError, match="records of 32 bytes, needed: at least 36"):
        update(5, 32)
    with pytest.raises(ValueError, match="a delta and a log are given"):
        update(5, 36, delta=table.delta)
    table.assert_equals(same)
    assert not places.any()
