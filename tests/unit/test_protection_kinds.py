"""Facts of a config about its protection are those of the protection that is built."""

from __future__ import annotations

import ast

import pytest

from ecrm.config import load_config
from ecrm.protection.kinds import KINDS
from ecrm.protection.registry import make_protection
from support.paths import ROOT


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_tells_of_the_protection_that_is_built(name, tmp_path):
    config = load_config(
        "tiny",
        [
            "data.path=data",
            f"protection.name={name}",
            "protection.k=2",
            "protection.copies=3",
            "cluster.servers=4",
            "checkpoint.every_steps=5",
        ],
    )
    protection = make_protection(config.protection, config.cluster.servers, tmp_path)
    assert protection.kind is config.kind is KINDS[name]
    shape = protection.shape
    assert (shape.k, shape.m) == config.kind.stripes(config.protection)
    assert config.failures_survived == (shape.m or protection.dense_replicas - 1)
    assert bool(protection.redundancy) == (shape.m > 0)


def test_no_other_room_asks_for_the_name_of_a_protection():
    """Each protection answers for itself: a new one touches no other room."""
    found = []
    for path in sorted((ROOT / "ecrm").rglob("*.py")):
        if path.is_relative_to(ROOT / "ecrm" / "protection"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and _asks(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def _asks(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    names = [ast.unparse(side) for side in sides if isinstance(side, ast.Attribute)]
    return any(name.endswith(("protection.name", "workload.protection")) for name in names)
