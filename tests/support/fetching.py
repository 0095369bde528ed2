"""Rows that a session would have fetched, taken from whole tables in this process."""

import torch
from torchrec import KeyedJaggedTensor

from ecrm.tables.row_source import FetchedRows


def fetched_rows(batch, spaces, weights, training=True):
    """The rows that a batch asks for; `weights` are the tables by name, [rows, dim] each."""
    leaves = []
    for space, rows in zip(spaces, batch.rows, strict=True):
        values = torch.cat([weights[table.name].detach() for table in space.tables])
        leaves.append(values[rows].requires_grad_(training))
    return FetchedRows(leaves, batch)


def check_gradients(fetched, spaces, weights):
    """Gradients of the rows are those of the weights, and touch no other row."""
    for space, rows, leaf in zip(spaces, fetched.batch.rows, fetched.leaves, strict=True):
        dense = torch.zeros(space.rows, space.dim)
        dense[rows] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for table, part in zip(
            space.tables, dense.split([t.rows for t in space.tables]), strict=True
        ):
            expected = weights[table.name].grad
            expected = torch.zeros_like(part) if expected is None else expected
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)


def a_batch(draw, sizes, samples, weighted=False, id_type=torch.int64, empty=()):
    """A KeyedJaggedTensor of features that have `sizes` ids to choose from, by a random.Random."""
    lengths = [0 if f in empty else draw.randrange(5) for f in sizes for _ in range(samples)]
    counts = [sum(lengths[i * samples : (i + 1) * samples]) for i in range(len(sizes))]
    ids = [draw.randrange(size) for size, n in zip(sizes.values(), counts) for _ in range(n)]
    weights = torch.tensor([draw.random() for _ in ids]) if weighted else None
    return KeyedJaggedTensor(
        list(sizes), torch.tensor(ids, dtype=id_type), weights, torch.tensor(lengths)
    )
