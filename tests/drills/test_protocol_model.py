"""The whole bounds of the model of the protocol; some minutes each."""

import pytest

from support.explorer import explore
from support.protocol_model import Model


@pytest.mark.parametrize(
    ("bound", "states"),
    [
        pytest.param({"deaths": 2, "cuts": 1}, 2_258_560, id="two deaths and a cut"),
        pytest.param(
            {"deaths": 1, "cuts": 1, "returns": 1}, 4_113_425, id="a death, a cut and a return"
        ),
    ],
)
def test_no_promise_is_broken_on_four_ranks(bound, states):
    found = explore(Model(**bound))
    print(found)
    assert not found.wrong and found.ends
    assert found.states == states
