"""All Triton kernels compile for a GPU, on machines without one, into the code they should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent.parent
MADE_TO_FAIL = ("approximate", "unordered", "crowded")
NARROW = ("narrow 1", "narrow 2", "narrow 4")
"""Rows of so few floats that the compiler itself broke: they compile, and need not be fast."""
MOST_REGISTERS = {"update adagrad": 128, "update adam": 128}
"""Of a thread: 128 leave room for 16 warps on a multiprocessor, 80 for 24."""


@pytest.fixture(scope="module")
def told() -> dict[str, dict]:
    """What the program found out."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = TESTS / "support/programs/compile_kernels.py"
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def compiled(told: dict[str, dict]) -> dict[str, list[dict]]:
    """What each case of the program compiled."""
    return told["compiled"]


@pytest.fixture(scope="module")
def ours(compiled: dict[str, list[dict]]) -> list[tuple[str, dict]]:
    """The project's kernels with the case that each is of."""
    return [
        (case, kernel)
        for case, kernels in compiled.items()
        if case not in MADE_TO_FAIL and case not in NARROW
        for kernel in kernels
    ]


def test_every_kernel_is_compiled(ours):
    sources = (TESTS.parent / "kernels").glob("*/triton.py")
    written = [
        line.split("(")[0].removeprefix("def ")
        for source in sources
        for before, line in zip(*(source.read_text().splitlines()[at:] for at in (0, 1)))
        if before == "@kernel"
    ]
    assert len(written) > 10
    assert {kernel["kernel"] for _, kernel in ours} == set(written)


def test_narrow_rows_compile(compiled):
    assert all(len(compiled[name]) > 2 for name in NARROW)


def test_registers_suffice(compiled, ours):
    for case, kernel in ours:
        assert kernel["spilled"] == kernel["stack"] == 0, (case, kernel)
        assert 0 < kernel["registers"] <= MOST_REGISTERS.get(case, 80), (case, kernel)
    assert compiled["crowded"][0]["spilled"] > 0


def test_every_operation_is_rounded_as_the_definition_says(compiled, ours):
    for case, kernel in ours:
        assert not kernel["approximate"], (case, kernel)
        fuses = case in ("update sgd", "update adagrad")
        assert (kernel["fused"] > 0) == fuses, (case, kernel)
    assert compiled["approximate"][0]["approximate"]


def test_floats_are_added_in_an_order(compiled, ours):
    for case, kernel in ours:
        assert not kernel["float_atomics"], (case, kernel)
    assert compiled["unordered"][0]["float_atomics"] == 1


def test_records_are_moved_16_bytes_at_a_time(ours):
    """Every kernel that moves rows does, but for what a row has beside them."""
    moves = {
        "_move",
        "_merge",
        "_xor_rows",
        "_multiply",
        "_add",
        "_update_elements",
        "_update_rows",
    }
    seen = set()
    for case, kernel in ours:
        if kernel["kernel"] in moves and case not in ("parity repeats", "update halves"):
            assert kernel["loads"]["128"] and kernel["stores"]["128"], (case, kernel)
            seen.add(kernel["kernel"])
    assert seen == moves
    for name, most in (("_xor_rows", 12), ("_move", 12), ("_multiply", 6)):
        # the rest are row numbers and factors: a few for each piece of 16 bytes
        for case, kernel in ours:
            if kernel["kernel"] == name and case == "run":
                others = sum(kernel["loads"].values()) - kernel["loads"]["128"]
                assert others <= most, (case, kernel)
                assert set(kernel["stores"]) == {"128"}, (case, kernel)


def test_nothing_is_compiled_after_the_warm_up(compiled):
    """Of calls with other row counts, addresses, strides and factors; another width is."""
    assert len(compiled["run"]) > 20
    assert compiled["later"] == []
    assert [kernel["kernel"] for kernel in compiled["other width"]] == ["_move"]


def test_a_call_launches_a_few_kernels(told):
    few = {"update_logged": 7, "dot_interaction_backward": 4, "unique_by_unit": 5}
    few |= {"update_with_delta": 2, "merge_records": 4, "scatter_add": 3, "scatter_add unique": 2}
    few |= {"decode": 2, "hash_uniform": 3}
    for name, launched in told["launches"].items():
        assert 1 <= len(launched) <= few.get(name, 1), (name, launched)
