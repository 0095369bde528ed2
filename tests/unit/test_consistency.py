"""Ranks with other data or another config than the rest are named, with what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecrm.config import load_config
from ecrm.data.described import Described
from ecrm.run.consistency import InputDigests, given_of
from ecrm.run.consistency import unlike as unlike_by
from ecrm.run.inputs import OF_CONFIG, alike


def unlike(ranks):
    return unlike_by(ranks, OF_CONFIG)


DATA = Described(
    is_table=True,
    rows=9,
    train_rows=8,
    tables={"t": 5},
    features={"movie": "t"},
    dense=("price",),
    lookups={"t": 1.0},
    weighted=False,
    ordered=False,
    binary=True,
    files={"labels.bin": {"bytes": 9, "sha256": "00"}},
)


def has(host: str = "a", *sets: str, steps: int = 7, **other: object) -> InputDigests:
    data = replace(DATA, **other)
    config = load_config("tiny", ["data.path=x", *sets])
    return given_of(host, config, steps, data=alike(data))


def test_all_the_same_is_no_problem_wherever_the_data_lies():
    assert unlike({0: has()}) is None
    assert unlike({0: has(), 3: has("b", "data.path=elsewhere")}) is None


def test_rows_may_lie_on_a_gpu_of_some_ranks_but_the_model_not():
    assert unlike({0: has(), 1: has("b", "storage.device=cuda")}) is None
    on_gpu = ("storage.device=cuda", "kernels.backend=reference")
    ranks = {0: has(), 1: has("b", *on_gpu), 2: has("b", *on_gpu, "testing.imitated_gpu=true")}
    assert unlike(ranks) is None
    said = unlike({**ranks, 3: has("c", "train.device=cuda")})
    assert "rank 3 on c has another config (train.device): " in said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            has("b", files={"labels.bin": {"bytes": 9, "sha256": "01"}}),
            "rank 2 on b has other data: ",
        ),
        (has("b", tables={"t": 6}), "rank 2 on b has other data: "),
        (has("b", dense=("cost",)), "rank 2 on b has other data: "),
        (has("b", "train.seed=8"), "rank 2 on b has another config (train.seed): "),
        (
            has("b", "train.seed=8", "train.sparse_lr=1", rows=8),
            "rank 2 on b has other data and another config (train.seed, train.sparse_lr): ",
        ),
        (has("b", steps=8), "rank 2 on b has another number of steps: "),
        (
            replace(
                has("b"), digests={k: v for k, v in has().digests.items() if k != "train.slots"}
            ),
            "another config (train.slots)",
        ),
    ],
)
def test_the_rank_that_differs_and_what_differs_are_named(other, said):
    text = unlike({0: has(), 1: has(), 2: other})
    assert (
        text.startswith("not all ranks have the same data and config: unlike rank 0 on a, ")
        and said in text
        and "\n" not in text
    )


def test_the_few_differ_from_the_many_and_of_two_halves_the_higher_ranks():
    other = has("b", "train.seed=8")
    assert "unlike rank 1 on a, rank 0 on b has another" in unlike({0: other, 1: has(), 2: has()})
    assert "unlike rank 0 on b, ranks 2, 3 on a have another" in unlike(
        {0: other, 1: other, 2: has(), 3: has()}
    )
    two = unlike({0: has(), 1: has(), 2: other, 3: has("c", rows=8)})
    assert "rank 2 on b has another config (train.seed); rank 3 on c has other data" in two


def test_the_message_of_very_many_ranks_stays_readable():
    ranks = {
        rank: has(f"h{rank}", f"train.seed={rank % 20 if rank < 100 else 1}")
        for rank in range(1000)
    }
    assert len(unlike(ranks)) < 3000
    assert "ranks 500, 501, 502, 503, 504, 505, 506, 507 and 492 more" in unlike(
        {
            rank: has("a" if rank < 500 else "b", f"train.seed={int(rank >= 500)}")
            for rank in range(1000)
        }
    )
