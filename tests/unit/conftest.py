"""Fixtures shared by tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ecrm.kernels import native


@pytest.fixture(params=("reference", *native.supported_instruction_sets()))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of each routine of a kernel: the reference, and C++ of each instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    with native.forced(request.param):
        yield "cpu"
