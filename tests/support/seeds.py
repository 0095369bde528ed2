"""Ranges of seeds for tests of random schedules."""

import pytest


def some_and_more(some: int, total: int) -> list:
    """The first `some` seeds, for `make test`, and the rest of `total`, for `make drill`."""
    return [
        pytest.param(range(some), id="some"),
        pytest.param(range(some, total), id="more", marks=pytest.mark.drill),
    ]
