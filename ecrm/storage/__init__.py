"""Storage backends by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from ecrm.errors import UsageError
from ecrm.storage.base import SparseOptimizer, Store


def fbgemm_installed() -> bool:
    """Whether there is an FBGEMM to import."""
    return importlib.util.find_spec("fbgemm_gpu") is not None


def resolve_backend(name: str) -> str:
    """`fbgemm` or `native` for a config's `storage.backend`.

    Raises UsageError when FBGEMM is asked for and absent.
    """
    if name == "fbgemm" and not fbgemm_installed():
        raise UsageError(
            "storage.backend = fbgemm, but fbgemm-gpu-cpu is not installed",
            {"storage.backend": "native"},
        )
    return "native" if name == "auto" else name


StoreFactory = Callable[..., Store]
"""(rows, dim, initial values of local rows, allocate=None) -> a store.

Its memory is what `allocate` gives, by default zeros: no row was ever updated.
"""


def store_factory(backend: str, optimizer: SparseOptimizer) -> StoreFactory:
    """Makes stores of that backend."""
    kind: Callable[..., Store]
    if backend == "fbgemm":
        from ecrm.storage.fbgemm import FbgemmStore

        kind = FbgemmStore
    else:
        from ecrm.storage.base import NativeStore

        kind = NativeStore
    return lambda rows, dim, initial, allocate=None: kind(rows, dim, optimizer, initial, allocate)
