"""The whole bound of the model of the protocol; some minutes."""

from support.explorer import explore
from support.protocol_model import Model


def test_two_deaths_and_a_cut_link_break_no_promise_on_four_ranks():
    found = explore(Model(deaths=2, cuts=1))
    print(found)
    assert not found.wrong and found.ends
    assert found.states == 2_570_714
