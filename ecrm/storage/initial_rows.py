"""Initial values of rows: a pure function of (seed, table, row), the same on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ecrm.base.allocate import CPU
from ecrm.device.copies import on_device, on_host
from ecrm.kernels.hash_uniform import begin_rows, hash_uniform
from ecrm.kernels.records import scatter_records
from ecrm.placement.initial_values import FileValues, InitFunction, Uniform, Values
from ecrm.placement.tables import RowSpace, Table


class InitialRows:
    """Initial values of the rows of a row space.

    Uniform by a hash of (seed, table, row, column), in [-1/sqrt(n), 1/sqrt(n)) for a table of n
    rows, as TorchRec's tables begin, unless the table has a range, a function or values of its own.
    """

    def __init__(self, space: RowSpace, seed: int) -> None:
        self._seed, self._space = seed, space
        # An extra entry for padding, the rows past the end of the space.
        self._tables = {
            CPU: (
                torch.tensor([*space.offsets, space.rows]),
                torch.tensor([*space.table_numbers, 0]),
                torch.tensor([*map(_bound, space.tables), 0.0], dtype=torch.float32),
            )
        }

    def __call__(self, rows: Tensor) -> Tensor:
        """Float32 [R, dim]; R row numbers of the space, int64, any order. Padding is zero.

        The result is on the device of `rows`.
        """
        place, *given = self._given(rows)
        values = hash_uniform(self._seed, given[0], given[1], self._space.dim, given[2])
        for number, table in enumerate(self._space.tables):
            if table.initial is None:
                continue
            here = (place == number).nonzero().squeeze(1)
            if not here.numel():
                continue
            of_table = rows[here] - self._space.offsets[number]
            if isinstance(table.initial, Values | FileValues):
                (numbers,) = on_host(of_table)
                there = numbers < len(table.initial.values)  # a table may have grown
                if not there.all():
                    here, numbers = here[on_device(here.device, there)], numbers[there]
                values[here] = on_device(rows.device, table.initial.read(numbers))
            elif isinstance(table.initial, InitFunction):
                made = self._filled(number, table.initial, of_table)
                values[here] = on_device(rows.device, made)
            else:
                values[here] = _shifted(values[here], table.initial)
        return values

    def begin(self, values: Tensor, touched: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Write initial values over the never updated rows of a matrix.

        `values[targets[i]]`, of float32 [N, dim], becomes the value of `rows[i]` where
        `touched[targets[i]]`, of float32 [N], is 0. No target comes twice. All lie on one device. A
        GPU is not waited for, unless a table has a range, a function or values of its own.
        """
        if all(table.initial is None for table in self._space.tables):
            _, numbers, of_table, bounds = self._given(rows)
            begin_rows(values, touched, targets, self._seed, numbers, of_table, bounds)
            return
        fresh = (touched[targets] == 0).nonzero().squeeze(1)
        if fresh.numel():
            new = self(rows[fresh]).view(torch.uint8)
            # a deterministic index_put_ would copy all of a matrix with a stride
            scatter_records(values, (), targets[fresh], new)

    def _given(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By row: place of the table in the space, table number, row of the table, and bound.

        Padding has a bound of 0.
        """
        offsets, numbers, bounds = self._tables_on(rows.device)
        place = torch.bucketize(rows, offsets[1:], right=True)
        return place, numbers[place], rows - offsets[place], bounds[place]

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets, numbers and bounds of tables, on a device."""
        if device not in self._tables:
            offsets, numbers, bounds = (on_device(device, each) for each in self._tables[CPU])
            self._tables[device] = offsets, numbers, bounds
        return self._tables[device]

    def _filled(self, number: int, initial: InitFunction, rows: Tensor) -> Tensor:
        """The values by a function for rows of a table of the space, float32 [R, dim]."""
        first = _mixed(_mixed(self._seed + _GAMMA) ^ self._space.table_numbers[number])
        values = torch.zeros(rows.numel(), self._space.dim)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for place, row in enumerate(rows.tolist()):
                # torch's generator uses 32 bits of a seed, different for each row
                torch.default_generator.manual_seed((first + row * _GAMMA) % 2**32)
                fresh = torch.zeros(1, self._space.dim)
                initial.function(fresh)
                values[place] = fresh[0]
        return values


def _bound(table: Table) -> float:
    """The factor on a table's hash, before any shift."""
    if isinstance(table.initial, Uniform):
        return (table.initial.high - table.initial.low) / 2
    return 1.0 / math.sqrt(table.rows)


def _shifted(values: Tensor, initial: Uniform) -> Tensor:
    """Values around 0 moved to the range of `initial`; rounding must not leave the range."""
    middle = (initial.low + initial.high) / 2
    return values.add_(middle).clamp_(initial.low, initial.high)


_GAMMA = 0x9E3779B97F4A7C15


def _mixed(word: int) -> int:
    """`mix` of kernels/hash_uniform/README.md."""
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
