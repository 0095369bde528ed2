"""What a script's tables need of its hosts' memory, and what is said where it is not there."""

import pytest

from ecrm.errors import UsageError
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import Table, row_spaces
from ecrm.rank.memory_check import judged, reserve, shard_bytes

MB = 1_000_000


def test_a_shard_is_rows_their_state_and_redundancy():
    """84 stripes a shard of 2 rows and a parity row, each of 8 + 1 + 1 floats, rounded up."""
    one = Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))
    assert shard_bytes(row_spaces([one]), StripeShape(3, 2, 1)) == 84 * 3 * 40
    assert shard_bytes(row_spaces([one]), StripeShape(3, 1, 0)) == 167 * 40
    more = [one, Table("two", 6, 4, SparseOptimizer("adam", 0.1))]
    assert shard_bytes(row_spaces(more), StripeShape(3, 2, 1)) == 84 * 3 * 40 + 3 * 52


def test_a_host_without_the_memory_is_named_and_refused_where_all_is_handed_out():
    needed, there = {"a": 90 * MB, "b": 90 * MB}, {"a": 100 * MB, "b": 80 * MB}
    assert judged(needed, {**there, "b": 90 * MB}, prefault=True) == ""
    said = judged(needed, there, prefault=False)
    assert said.startswith("once every row is trained the tables need 90 MB of memory on b, 80 MB")
    with pytest.raises(UsageError, match="90 MB .* on b.*set storage.prefault=false") as caught:
        judged(needed, there, prefault=True)
    assert str(caught.value).count("\n") == 0


def test_a_shard_that_the_system_refuses_is_refused_in_one_line():
    optimizer = SparseOptimizer("sgd", 0.1)
    huge = row_spaces([Table("ads", 1 << 50, 8, optimizer)])
    with pytest.raises(
        UsageError, match="refuses .* MB of memory on b for a shard of ads "
    ) as said:
        reserve(huge, StripeShape(2, 1, 1), shards=1, host="b")
    assert str(said.value).count("\n") == 0
    reserve(huge, StripeShape(2, 1, 1), shards=0, host="b")
    reserve(row_spaces([Table("ads", 500, 8, optimizer)]), StripeShape(2, 1, 1), 2, "b")
