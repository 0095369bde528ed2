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
    protection = make_protection(config.protection, config.cluster.servers, tmp_path, durable=False)
    assert protection.kind is config.kind is KINDS[name]
    shape = protection.shape
    assert (shape.k, shape.m) == config.kind.stripes(config.protection)
    assert config.failures_survived == (shape.m or protection.dense_replicas - 1)
    assert bool(protection.redundancy) == (shape.m > 0)


NAMES = ("protection.name", "workload.protection", "['protection.name']")
"""Ends of expressions with the name of a protection."""


def asks(source: str) -> list[int]:
    """The lines in which a program decides by the name of a protection, KINDS apart."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) != "KINDS":
            asked = [node.slice]
        elif isinstance(node, ast.Match):
            asked = [node.subject]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get"):
            asked = node.args[:1]
        if any(ast.unparse(each).endswith(NAMES) for each in asked):
            found.append(node.lineno)
    return found


def test_no_other_room_decides_by_the_name_of_a_protection():
    """Each protection answers for itself."""
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("ecrm", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "ecrm" / "protection")
        and (lines := asks(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "config.protection.name == 'mapped'",
        "protection.name in ('chain', 'replicate')",
        "{'chain': 1}.get(protection.name, 0)",
        "{'chain': 1}[workload.protection]",
        "contender.sets['protection.name'] != 'chain'",
        "match protection.name:\n    case 'chain': pass",
    ],
)
def test_a_decision_by_the_name_is_found(source):
    assert asks(source) == [1]
    assert asks("KINDS[config.protection.name].survives") == []
