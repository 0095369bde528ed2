"""What the drill of the tutorials compares, and what no two runs share."""

import pytest

from support.walked_page import TUTORIALS, blocks_of, not_printed

STEP = (
    "step  60/175     14.9 steps/s     15,245 samples/s  loss 0.5237  committed 60  "
    "survives 1 more failure  rebuilt 100%"
)
LATER = STEP.replace("14.9", "7.1").replace("15,245", "9,001").replace("100%", "87%")
DIED = "! rank 1 died in step 60 (parity); back at commit 60 after 90 ms; shard 1 to rank 6"
MODEL = "model_sha256 3676b8566217b926"


def test_times_and_rates_are_not_compared():
    died = DIED.replace("90 ms", "131 ms")
    assert not_printed(f"{STEP}\n...\n{DIED}\n{MODEL}", f"{MODEL}\n{died}\n{LATER}") == []


@pytest.mark.parametrize(
    "line", [STEP.replace("0.5237", "0.5238"), DIED.replace("rank 6", "rank 5"), f"{MODEL}7"]
)
def test_a_line_with_another_value_is_not_printed(line):
    assert not_printed(line, f"{STEP}\n{DIED}\n{MODEL}") == [line]


def test_loosely_hashes_are_compared_all_the_same():
    later = DIED.replace("step 60", "step 207").replace("commit 60", "commit 207")
    assert not_printed(later, DIED) == [later]
    assert not_printed(later.replace("(parity)", "(commit)"), DIED, loosely=True) == []
    assert not_printed(f"{later}\n{MODEL}7", f"{DIED}\n{MODEL}", loosely=True) == [f"{MODEL}7"]


def test_every_tutorial_has_commands_and_what_they_print():
    assert len(TUTORIALS) == 6
    for page in TUTORIALS:
        kinds = [block.kind for block in blocks_of(page)]
        assert kinds.count("sh") >= 3 and "" in kinds, page
