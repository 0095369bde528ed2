"""Storage backends by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.errors import UsageError
from ecrm.placement.sparse_optimizer import SparseOptimizer, SparseRate
from ecrm.storage.base import Store


def fbgemm_installed() -> bool:
    """Whether FBGEMM is installed."""
    return importlib.util.find_spec("fbgemm_gpu") is not None


def resolve_backend(name: str) -> str:
    """`fbgemm` or `native` for a config's `storage.backend`.

    Raises UsageError if FBGEMM is asked for and absent.
    """
    if name == "fbgemm" and not fbgemm_installed():
        raise UsageError(
            "storage.backend = fbgemm, but fbgemm-gpu-cpu is not installed",
            {"storage.backend": "native"},
        )
    return "native" if name == "auto" else name


StoreFactory = Callable[..., Store]
"""(rows, dim, initial values of local rows, allocate=None, optimizer=None, rate=None) -> a store.

The store's memory is from `allocate`, by default zeros: no row was ever updated. Without
`optimizer` the store has the factory's own; `rate` is a factor on the learning rate by step.
"""


def store_factory(backend: str, own: SparseOptimizer) -> StoreFactory:
    """A factory for stores of `backend`, with `own` as the optimizer by default."""
    kind: Callable[..., Store]
    if backend == "fbgemm":
        from ecrm.storage.fbgemm import FbgemmStore

        kind = FbgemmStore
    else:
        from ecrm.storage.base import NativeStore

        kind = NativeStore

    def make(
        rows: int,
        dim: int,
        initial: Callable[[Tensor], Tensor],
        allocate: Allocate | None = None,
        optimizer: SparseOptimizer | None = None,
        rate: SparseRate | None = None,
    ) -> Store:
        return kind(rows, dim, optimizer or own, initial, allocate, rate)

    return make
