"""What kernels promise of NaNs: every backend has them in the same places.

All other values have the same bits on every backend. The bits of a NaN may differ.
"""

from __future__ import annotations

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import OPTIMIZERS, sparse_update, state_widths

# quiet and signalling ones, of both signs
NANS = [0x7FC00000, 0x7FC01234, 0x7F800001, 0x7FABCDEF, -0x400000, -0x3FEDCB, -1]


def _spoilt(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Random floats, some of them NaNs of all kinds, some infinities of both signs."""
    values = torch.randn(*shape, generator=random)
    bits = values.view(torch.int32)
    nans = torch.tensor(NANS, dtype=torch.int32)[
        torch.randint(0, len(NANS), shape, generator=random)
    ]
    bits[:] = torch.where(torch.rand(shape, generator=random) < 0.02, nans, bits)
    infinite = torch.rand(shape, generator=random) < 0.01
    values[infinite] = torch.where(values[infinite] > 0, torch.inf, -torch.inf)
    return values


def _scatter_add(backend: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    out, index = _spoilt(random, 40, 37), torch.randint(0, 40, (100,), generator=random)
    scatter_add(out, index, _spoilt(random, 100, 37), backend)
    return [out]


def _dot_interaction(backend: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    places = torch.randint(0, 60, (50 * 5,), generator=random)
    given = _spoilt(random, 50, 24), _spoilt(random, 60, 24), places
    forward = dot_interaction(*given, backend)
    return [forward, *dot_interaction_backward(_spoilt(random, *forward.shape), *given, backend)]


def _sparse_update(optimizer: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    weights = _spoilt(random, 60, 37).to(dtype)
    state = [_spoilt(random, 60, width).abs() for width in state_widths(optimizer, 37)]
    before = [weights.clone(), *(part.clone() for part in state)]
    delta = torch.empty(30, sum(part[:1].nbytes for part in before), dtype=torch.uint8)
    rows = torch.randperm(60, generator=random)[:30]
    sparse_update(
        weights,
        state,
        rows,
        _spoilt(random, 30, 37),
        optimizer,
        lr=0.1,
        delta=delta,
        backend=backend,
    )
    after = [weights, *state]
    changed = torch.cat(
        [
            (old[rows].view(torch.uint8) ^ new[rows].view(torch.uint8))
            for old, new in zip(before, after)
        ],
        dim=1,
    )
    assert torch.equal(delta, changed), "a delta is of the very bits"
    return after


CASES = {"scatter_add": _scatter_add, "dot_interaction": _dot_interaction}
for name in OPTIMIZERS:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        CASES[f"sparse_update {name} {dtype}"] = lambda backend, name=name, dtype=dtype: (
            _sparse_update(name, dtype, backend)
        )


@pytest.mark.parametrize("instruction_set", native.supported_instruction_sets())
@pytest.mark.parametrize("case", CASES)
def test_nans_are_in_the_same_places_and_all_else_is_the_same_bits(case, instruction_set):
    expected = CASES[case]("reference")
    with native.forced(instruction_set):
        found = CASES[case]("cpu")
        again = CASES[case]("cpu")
    for right, mine, once_more in zip(expected, found, again, strict=True):
        assert 0 < int(right.isnan().sum()) < right.numel() * 0.9
        assert torch.equal(mine.isnan(), right.isnan())
        words = torch.int32 if right.dtype == torch.float32 else torch.int16
        numbers = ~right.isnan()
        assert torch.equal(mine.view(words)[numbers], right.view(words)[numbers])
        assert torch.equal(mine.view(words), once_more.view(words)), (
            "one instruction set gives one NaN"
        )
