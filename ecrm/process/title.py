"""The name of a process in `ps` and `top`: the rank and its role, such as "ecrm 3 server"."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ecrm.process.linux import name_process
from ecrm.process.neighbours import RANK

if TYPE_CHECKING:  # a guard comes before torch
    from ecrm.placement.view import View


def name_guard() -> None:
    """Name this process as the guard of its rank; without mpirun the name stays."""
    if (rank := os.environ.get(RANK)) is not None:
        name_process(f"ecrm {rank} guard")


def name_by_role(view: View, rank: int) -> None:
    """Name this process after the role of `rank` in a view.

    `both` is a rank with shards and slots. `dense` is a rank with a dense copy alone, and `spare`
    a rank with nothing.
    """
    serves, trains = bool(view.shards_of(rank)), bool(view.slots_of(rank))
    if serves and trains:
        role = "both"
    elif serves or trains:
        role = "server" if serves else "trainer"
    else:
        role = "dense" if rank in view.dense else "spare"
    name_process(f"ecrm {rank} {role}")
