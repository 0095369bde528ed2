"""Two bytes on the wire of links between two hosts, float32 in the memory lent within a host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.protection import routing
from support.link_ranks import LinkRanks
from support.paths import PROGRAMS
from support.sessions import run
from support.two_bytes import LAYOUT, script

KILLED = 1


@pytest.fixture(scope="module")
def simulated():
    return run((), replace(LAYOUT, whole_tables=True), script()).tables


@pytest.mark.parametrize(
    ("placement", "many", "gathered"),
    [("rows", 1, 0), ("tables", 32, 2)],
    ids=["rows in arrays", "sums in objects, gathered by host"],
)
def test_two_bytes_travel_between_hosts_and_none_within(
    tmp_path: Path, simulated, placement: str, many: int, gathered: int
) -> None:
    program = PROGRAMS / "two_bytes.py"
    words = (tmp_path, placement, KILLED, many)
    ranks = LinkRanks(LAYOUT.world, program, *words, gathered=gathered)
    output = ranks.wait()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == LAYOUT.world - 1 and ranks.codes[KILLED] == -9, output
    assert {(each["mismatches"], each["deaths"]) for each in found} == {(0, 1)}
    assert [each["tables"] for each in found if each["tables"]] == [simulated]
    dtypes: dict[str, set[str]] = {}
    for each in found:
        for kind, names in each["kinds"].items():
            dtypes.setdefault(kind, set()).update(names)
    kinds = [routing.ROWS, routing.GRADIENTS]
    assert [dtypes.pop(f"near {kind}") for kind in kinds] == [{"torch.float32"}] * 2
    kinds += [routing.SUMS, routing.BAG_GRADIENTS] if placement == "tables" else []
    assert [dtypes.pop(f"far {kind}") for kind in kinds] == [{"torch.bfloat16"}] * len(kinds)
    assert not dtypes, "sums within a host"
