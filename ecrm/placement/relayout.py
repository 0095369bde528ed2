"""Fewer, wider-spread shards for the ranks that are left, when those can no longer keep stripe members apart."""

from __future__ import annotations

from dataclasses import replace

from ecrm.placement.assignment import CannotKeepApart, spread_shards
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, keeps_apart


def plan_reshape(view: View, shape: StripeShape) -> tuple[StripeShape, View] | None:
    """Stripes and view that keep members apart again, on the ranks that host shards now and the spares.

    The largest k up to the present one that keeps m, then the most shards. None when members are
    apart already, or when fewer than m + 2 ranks (or failure domains) are left to lay stripes over.
    """
    if not shape.m or keeps_apart(view, shape):
        return None
    ranks = sorted({*view.shards, *view.spares})
    for k in range(min(shape.k, len(ranks) - shape.m), min(shape.k, 2) - 1, -1):
        for shards in range(len(ranks), k + shape.m - 1, -1):
            fewer = StripeShape(shards, k, shape.m)
            try:
                hosts = spread_shards(fewer, ranks, view.domains)
            except CannotKeepApart:
                continue
            return fewer, replace(view, epoch=view.epoch + 1, shards=hosts)
    return None
