"""The next movie of MovieLens-100k by a small HSTU, with tables that survive killed ranks.

    ecrm launch examples/movielens_hstu.py --servers 3 --trainers 2 -k 2 -m 1 --kill 1@60 -- RATINGS

`movielens.py` says how to get RATINGS, `hstu.py` has the model, and `movielens_hstu_plain.py` is
the same in plain torch. The last movie of every user is held out, and ranked among all movies.
"""

import argparse

import hstu
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

parser = argparse.ArgumentParser()
parser.add_argument("ratings", help="the Parquet file of the ratings")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--seed", type=int, default=0)
typed = parser.parse_args()
SLOTS = 2

torch.manual_seed(typed.seed)  # of the layers' first weights
model = hstu.Hstu("meta")
apply_optimizer_in_backward(
    torch.optim.Adam, model.rows.parameters(), {"lr": hstu.RATE, "betas": hstu.BETAS}
)
session = ecrm.Session(
    model,
    slots=SLOTS,
    seed=typed.seed,
    dense_optimizer=lambda parameters: torch.optim.Adam(parameters, hstu.RATE, hstu.BETAS),
)
train, held_out = (hstu.histories(typed.ratings, held_out) for held_out in (False, True))

batches = ecrm.Indexed(train, hstu.BATCH // SLOTS, hstu.collate, seed=typed.seed)
for ids, targets in session.steps(batches, typed.steps):
    loss = hstu.loss_of(session.model(ids), targets)
    loss.backward()
    session.log(loss=loss)

session.model.eval()
for ids, targets in session.eval_batches(ecrm.Indexed(held_out, 64, hstu.collate)):
    session.gather(ranks=hstu.ranks(session.model(ids), targets))
if session.is_main:
    hstu.tell(session.gathered["ranks"])
