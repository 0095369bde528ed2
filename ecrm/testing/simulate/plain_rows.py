"""Rows and optimizers in plain numpy, written from docs/concepts and the pages linked there.

The second oracle of the simulator. This module imports nothing of the project, so an error of a
kernel cannot be an error here as well. All arithmetic is on float32, unless said otherwise: each
operation is rounded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15
FOLDS = 8
"""Partial sums of a sum of squares."""


@dataclass(frozen=True)
class PlainOptimizer:
    """The optimizer of rows by name, with its numbers."""

    name: str
    rate: float
    epsilon: float
    betas: tuple[float, float]
    decay: float
    decoupled: bool


@dataclass(frozen=True)
class PlainTable:
    """A table of `rows` rows of `width` floats.

    `optimizer` is `None` for the run's own. Rows begin in the range `begins`, `None` for the
    default, or with the values `given`, called with a row and the seed of the row. `given` returns
    `None` for rows without a given value.
    """

    rows: int
    width: int
    optimizer: PlainOptimizer | None = None
    begins: tuple[float, float] | None = None
    given: Callable[[int, int], Floats | None] | None = None


class PlainSpace:
    """A row space: tables of one width and optimizer, end to end, with optimizer state.

    `weights` is float32 [R, D], every array of `states` float32 [R, D] or [R, 1]. `marks`, float32
    [R], is 1 for rows updated at least once.
    """

    def __init__(self, tables: Mapping[int, PlainTable], own: PlainOptimizer, seed: int) -> None:
        """`tables` maps numbers in the model's list to tables; `own` is the run's optimizer."""
        first = next(iter(tables.values()))
        self.optimizer = first.optimizer or own
        self.weights = np.concatenate(
            [_first_values(seed, number, table) for number, table in tables.items()]
        )
        rows, width = self.weights.shape
        widths = {"rowwise_adagrad": [1], "adagrad": [width], "adam": [width, width]}
        self.states = [
            np.zeros((rows, each), np.float32) for each in widths.get(self.optimizer.name, [])
        ]
        self.marks = np.zeros(rows, np.float32)

    def update(self, rows: NDArray[np.int64], gradients: Floats, step: int, factor: float) -> None:
        """One step, from 0, of the optimizer on `rows` with summed gradients, float32 [R, D].

        `factor` multiplies the learning rate.
        """
        old = self.weights[rows]
        new = _stepped(
            old, [state[rows] for state in self.states], gradients, self.optimizer, step, factor
        )
        for part, values in zip([self.weights, *self.states], new, strict=True):
            part[rows] = values
        self.marks[rows] = 1

    def records(self) -> NDArray[np.uint8]:
        """The records of all rows, uint8 [R, B]: weights, state, mark; zeros if never updated."""
        parts = np.concatenate([self.weights, *self.states, self.marks[:, None]], axis=1)
        return np.where(self.marks[:, None] > 0, parts, np.float32(0)).view(np.uint8)


class PlainRows:
    """All row spaces of a job, updated step by step."""

    def __init__(self, tables: Sequence[PlainTable], own: PlainOptimizer, seed: int) -> None:
        alike: dict[tuple[int, PlainOptimizer | None], dict[int, PlainTable]] = {}
        for number, table in enumerate(tables):
            alike.setdefault((table.width, table.optimizer), {})[number] = table
        self.spaces = [PlainSpace(members, own, seed) for members in alike.values()]

    def step(
        self,
        rows: Mapping[int, Sequence[NDArray[np.int64]]],
        gradients: Mapping[int, Sequence[Floats]],
        step: int,
        factor: float = 1.0,
        sit_out: Collection[int] = (),
    ) -> None:
        """One training step. `rows[slot][space]` are unique, in the order of the gradients.

        The sum of a row's gradients begins with the first slot, and goes on in slot order. Slots
        that `sit_out` change nothing.
        """
        for number, space in enumerate(self.spaces):
            sums: dict[int, Floats] = {}
            for slot in sorted(set(rows) - set(sit_out)):
                for row, gradient in zip(
                    rows[slot][number].tolist(), gradients[slot][number], strict=True
                ):
                    sums[row] = sums[row] + gradient if row in sums else gradient.copy()
            if sums:
                space.update(np.array(list(sums)), np.stack(list(sums.values())), step, factor)


def _first_values(seed: int, number: int, table: PlainTable) -> Floats:
    """The values of a table's rows before the first update, float32 [rows, width]."""
    key = _mixed(_mixed(seed + GAMMA) ^ number)
    low, high = table.begins or (-(table.rows**-0.5), table.rows**-0.5)
    bound = np.float32((high - low) / 2 if table.begins else 1 / np.sqrt(table.rows))
    values = np.empty((table.rows, table.width), np.float32)
    for row in range(table.rows):
        own = None if table.given is None else table.given(row, (key + row * GAMMA) % 2**32)
        values[row] = _uniform(key, row, table.width, bound) if own is None else own
    if table.begins:
        values = np.clip(values + np.float32((low + high) / 2), np.float32(low), np.float32(high))
    return values


def _uniform(key: int, row: int, width: int, bound: np.float32) -> Floats:
    """A row by the hash, float32 [width], in [-bound, bound)."""
    row_key = _mixed(key + GAMMA * (row + 1))
    bits = [_mixed(row_key + GAMMA * (column + 1)) >> 40 for column in range(width)]
    return np.array([(each - 2**23) / 2**23 for each in bits], np.float32) * bound + np.float32(0)


def _mixed(word: int) -> int:
    """The finalizer of SplitMix64."""
    word %= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def bfloat16(values: Floats) -> Floats:
    """The nearest numbers of 16 bits, ties to even, as float32. Not for NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _stepped(
    w: Floats, states: Sequence[Floats], g: Floats, by: PlainOptimizer, step: int, factor: float
) -> list[Floats]:
    """The new weights and states of rows. Numbers are computed in float64, then rounded once."""
    rate, epsilon, one = np.float32(by.rate * factor), np.float32(by.epsilon), 1.0
    if by.decay and by.decoupled:
        w = w * np.float32(one - by.rate * factor * by.decay)
    elif by.decay:
        g = g + w * np.float32(by.decay)
    if by.name == "sgd":
        return [_fused(np.full_like(g, -rate), g, w)]
    if by.name == "rowwise_adagrad":
        h = states[0] + _squares(g)[:, None] / np.float32(g.shape[1])
        return [w - g * (rate / (np.sqrt(h) + epsilon)), h]
    if by.name == "adagrad":
        h = _fused(g, g, states[0])
        root = np.sqrt(h.astype(np.float64)) + np.float64(epsilon)
        return [(w - (g * rate).astype(np.float64) / root).astype(np.float32), h]
    assert by.name == "adam"
    b1, b2 = by.betas
    m = states[0] * np.float32(b1) + g * np.float32(one - b1)
    v = states[1] * np.float32(b2) + (g * g) * np.float32(one - b2)
    root = np.sqrt(v / np.float32(one - b2 ** (step + 1))) + epsilon
    return [w - ((m / np.float32(one - b1 ** (step + 1))) / root) * rate, m, v]


def _squares(g: Floats) -> Floats:
    """The sum of squares of every row, float32 [R].

    Column d goes into partial sum d mod 8. The eight sums are added in pairs.
    """
    sums = [np.zeros(len(g), np.float32) for _ in range(FOLDS)]
    for column in range(g.shape[1]):
        sums[column % FOLDS] = sums[column % FOLDS] + g[:, column] * g[:, column]
    while len(sums) > 1:
        sums = [sums[place] + sums[place + 1] for place in range(0, len(sums), 2)]
    return sums[0]


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once. Results below the smallest normal float32 may be rounded twice.

    The product is exact in float64, the sum is not. A sum in float64 exactly between two float32
    numbers hides the direction of its own error. Only then does the error choose.
    """
    product, other = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    between = (total.view(np.int64) & (2**29 - 1)) == 2**28
    towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(between & (error != 0), towards, total).astype(np.float32)
