"""The place of every row and every parity row: closed formulas, no table of locations.

Rows of one row space are numbered 0..rows-1; row r is data unit `r % k` of stripe `r // k`. Stripes
rotate over the shards: stripe j has parity t on shard (j + t) mod S and data unit d on shard (j + m
+ d) mod S, so in a period of S stripes each shard holds k data rows and m parity rows and no two
members of a stripe meet on one shard. Units are numbered data first: 0..k-1 data, k..k+m-1 parity.

With whole tables on shards (`TablePlaces`) rows lie elsewhere. The local rows of a shard, and the
stripes of local rows, are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ecrm.base.errors import Unrecoverable
from ecrm.kernels.unit_order import split_by_shard
from ecrm.placement.table_places import TablePlaces, place_tables
from ecrm.placement.tables import RowSpace


@dataclass(frozen=True)
class StripeShape:
    """The lay of stripes over `shards` shards: `k` data and `m` parity units per stripe.

    `k = 1, m = 0` is the unprotected layout: every row a stripe of its own. Raises ValueError for k
    < 1, m < 0 or more units per stripe than shards.
    """

    shards: int
    k: int
    m: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 0 or self.k + self.m > self.shards:
            raise ValueError(
                f"stripes of {self.k}+{self.m} units do not fit on {self.shards} shards"
            )

    @property
    def width(self) -> int:
        """Units per stripe."""
        return self.k + self.m

    def shard_of_unit(self, residue: int, unit: int) -> int:
        """Shard holding `unit` of every stripe j with `j % shards == residue`."""
        offset = self.m + unit if unit < self.k else unit - self.k
        return (residue + offset) % self.shards

    def residue_of_unit(self, shard: int, unit: int) -> int:
        """Residue of the stripes with `unit` on `shard`: the inverse of `shard_of_unit`."""
        offset = self.m + unit if unit < self.k else unit - self.k
        return (shard - offset) % self.shards

    def members(self, residue: int) -> list[int]:
        """Shards of all units of a stripe with the residue, in unit order."""
        return [self.shard_of_unit(residue, unit) for unit in range(self.width)]

    def sharing_a_stripe(self, shard: int) -> set[int]:
        """The other shards sharing a stripe with `shard`: one rank should not host two of them."""
        near = range(1, self.width)
        return {(shard + step) % self.shards for step in near} | {
            (shard - step) % self.shards for step in near
        }

    def check_recoverable(self, lost: Iterable[int]) -> None:
        """Raise Unrecoverable if some stripe has more than m units on the `lost` shards."""
        gone = set(lost)
        for residue in range(self.shards):
            missing = [shard for shard in self.members(residue) if shard in gone]
            if len(missing) > self.m:
                raise Unrecoverable(
                    f"stripes {residue} mod {self.shards}: "
                    f"{self.width - len(missing)} of {self.k} needed units left "
                    f"(shards {', '.join(map(str, missing))} lost)"
                )


@dataclass(frozen=True)
class RowLayout:
    """Location of `rows` rows under a stripe shape, with whole tables on shards if `places`.

    All shards have the same size: shards are padded with rows of no table, always zero.
    Arguments named `rows`, `local` and `stripes` are int64 tensors of one shape; results have the
    same shape and dtype. Ranges are not checked.
    """

    shape: StripeShape
    rows: int
    places: TablePlaces | None = None

    @property
    def periods(self) -> int:
        if self.places is not None:
            return -(-self.places.rows_per_shard // self.shape.k)
        per_period = self.shape.k * self.shape.shards
        return -(-self.rows // per_period)

    @property
    def data_rows_per_shard(self) -> int:
        return self.periods * self.shape.k

    @property
    def parity_rows_per_shard(self) -> int:
        return self.periods * self.shape.m

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shard and local row number of data rows."""
        if self.places is not None:
            return self.places.locate(rows)
        k, m, shards = self.shape.k, self.shape.m, self.shape.shards
        stripe, unit = rows // k, rows % k
        return (stripe + m + unit) % shards, (stripe // shards) * k + unit

    def split(self, rows: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """Split `rows`, int64 [R], by shard.

        Returns the number of rows per shard, and shard by shard the places in `rows` and the local
        numbers.
        """
        if self.places is not None:
            return self.places.split(rows)
        return split_by_shard(rows, self.shape.k, self.shape.m, self.shape.shards)

    def rows_of(self, shard: int, local: Tensor) -> Tensor:
        """Row numbers of a shard's local rows; numbers >= `rows` are padding."""
        if self.places is not None:
            return self.places.rows_of(shard, local)
        k = self.shape.k
        return self.stripes_of_data(shard, local) * k + local % k

    def stripes_of_data(self, shard: int, local: Tensor) -> Tensor:
        """Stripes of a shard's local data rows; the unit is `local % k`."""
        k, m, shards = self.shape.k, self.shape.m, self.shape.shards
        return (local // k) * shards + (shard - m - local % k) % shards

    def stripes_of_parity(self, shard: int, local: Tensor) -> Tensor:
        """Stripes of a shard's local parity rows; the unit is `k + local % m`."""
        m, shards = self.shape.m, self.shape.shards
        return (local // m) * shards + (shard - local % m) % shards

    def local_parity(self, periods: Tensor, t: int) -> Tensor:
        """Local row of parity t, on the shard holding the parity, of the stripes in `periods`.

        A shard's local data row r is in period `r // k`.
        """
        return periods if self.shape.m == 1 else periods * self.shape.m + t

    def local_of_unit(self, stripes: Tensor, unit: int) -> Tensor:
        """Local row of `unit` of each stripe on its shard, among data or parity rows."""
        period = stripes // self.shape.shards
        return (
            period * self.shape.k + unit
            if unit < self.shape.k
            else self.local_parity(period, unit - self.shape.k)
        )


def row_layouts(
    spaces: Sequence[RowSpace], shape: StripeShape, whole_tables: bool = False
) -> tuple[RowLayout, ...]:
    """The layout of every row space; `whole_tables`: whether tables lie whole on shards."""
    if not whole_tables:
        return tuple(RowLayout(shape, space.rows) for space in spaces)
    places = place_tables(spaces, shape.shards)
    return tuple(
        RowLayout(shape, space.rows, of_space)
        for space, of_space in zip(spaces, places, strict=True)
    )
