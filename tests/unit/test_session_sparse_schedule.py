"""A torch scheduler of the learning rates of rows."""

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from ecrm.base.errors import UsageError
from ecrm.tables.sparse_schedule import rates_of

MAKES = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "step": lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    "warm-up": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), StepLR(optimizer, 5)], [4]
    ),
}


@pytest.mark.filterwarnings("error", "ignore:The epoch parameter")
@pytest.mark.parametrize("name", MAKES)
def test_the_factor_of_a_step_is_the_rate_that_torch_has_in_it(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    scheduler, expected = MAKES[name](optimizer), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rate = rates_of(MAKES[name])
    assert len(set(expected)) > 3
    assert [rate(step) for step in (11, *range(12))] == [expected[11], *expected]


def test_a_scheduler_that_goes_by_losses_is_refused():
    with pytest.raises(UsageError, match="ReduceLROnPlateau cannot be stepped by the number of"):
        rates_of(ReduceLROnPlateau)
