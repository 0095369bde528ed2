"""The next movie of MovieLens-100k by a small HSTU, trained by plain torch in one process.

    python examples/movielens_hstu_plain.py RATINGS

`movielens.py` says how to get RATINGS, and `hstu.py` has the model. `movielens_hstu.py` is the same
with tables that survive killed ranks.
"""

import argparse
from itertools import chain, islice, repeat

import hstu
import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("ratings", help="the Parquet file of the ratings")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--seed", type=int, default=0)
typed = parser.parse_args()

torch.manual_seed(typed.seed)
model = hstu.Hstu("cpu")
optimizer = torch.optim.Adam(model.parameters(), hstu.RATE, hstu.BETAS)
train, held_out = (hstu.histories(typed.ratings, held_out) for held_out in (False, True))

loader = DataLoader(train, hstu.BATCH, shuffle=True, collate_fn=hstu.collate)
for ids, targets in islice(chain.from_iterable(repeat(loader)), typed.steps):
    loss = hstu.loss_of(model(ids), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    batches = DataLoader(held_out, 64, collate_fn=hstu.collate)
    hstu.tell(torch.cat([hstu.ranks(model(ids), targets) for ids, targets in batches]))
