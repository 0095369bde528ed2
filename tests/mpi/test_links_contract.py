"""The contract of a transport on links, calm and while connections are cut, with real SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ecrm.transport.links import CLOSE_SECONDS
from support.link_ranks import LinkRanks
from support.paths import PROGRAMS
from support.programs import transport_contract

RANKS = transport_contract.WORLD_SIZE
EXPECTED_SURVIVORS = list(transport_contract.SURVIVORS)


def results(folder: Path) -> dict[int, dict]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("cut_every", "gathered"),
    [
        pytest.param(0.0, 0, id="calm"),
        pytest.param(0.05, 0, id="cut", marks=pytest.mark.drill),
        pytest.param(0.0, 2, id="gathered", marks=pytest.mark.drill),
        pytest.param(0.05, 3, id="gathered-cut"),
    ],
)
def test_contract_holds_on_links(tmp_path: Path, cut_every: float, gathered: int) -> None:
    ranks = LinkRanks(
        RANKS,
        PROGRAMS / "transport_contract.py",
        tmp_path,
        "sleep",
        cut_every=cut_every,
        gathered=gathered,
    )
    output = ranks.wait()
    found = results(tmp_path)
    assert sorted(found) == EXPECTED_SURVIVORS, output
    assert ranks.codes == {rank: 0 if rank in EXPECTED_SURVIVORS else -9 for rank in range(RANKS)}
    for result in found.values():
        assert result["live"] == EXPECTED_SURVIVORS
        assert result["failures_seen"][1:] == ["survived"] * 3
        assert (result["losses"] > RANKS) == (cut_every > 0), "more than one for each death"
    alone, left = (found[rank]["close_seconds"] for rank in EXPECTED_SURVIVORS)
    assert alone < 1
    assert CLOSE_SECONDS <= left < 2 * CLOSE_SECONDS
    assert ranks.lines == []


@pytest.mark.parametrize(
    ("cut_every", "gathered"),
    [
        pytest.param(0.0, 0, id="calm", marks=pytest.mark.drill),
        pytest.param(0.02, 0, id="cut"),
        pytest.param(0.0, 2, id="gathered", marks=pytest.mark.drill),
        pytest.param(0.02, 3, id="gathered-cut"),
    ],
)
def test_ranks_killed_at_random_instants_on_links(
    tmp_path: Path, cut_every: float, gathered: int
) -> None:
    ranks, kills, steps = 6, 3, 30
    running = LinkRanks(
        ranks,
        PROGRAMS / "transport_drill.py",
        tmp_path,
        "sleep",
        1,
        kills,
        steps,
        cut_every=cut_every,
        gathered=gathered,
    )
    output = running.wait()
    found = results(tmp_path)
    assert len(found) == ranks - kills, output
    for result in found.values():
        assert result["live"] == sorted(found)
        assert result["steps"] == steps
        assert result["shrinks"] > 0
        assert (result["losses"] > ranks) == (cut_every > 0), "more than one for each death"
