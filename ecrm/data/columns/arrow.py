"""pyarrow, or a line for the user if pyarrow is missing. Needed for preparing, not for reading."""

from __future__ import annotations

from ecrm.base.errors import UsageError

try:
    import pyarrow
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet
    import pyarrow.types
except ImportError as error:
    raise UsageError(
        f"input files are read with pyarrow, which cannot be imported ({error})",
        otherwise='type pip install "ecrm[tables]", or pip install pyarrow',
    ) from error

__all__ = ["pyarrow"]
