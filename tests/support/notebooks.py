"""A notebook executed from top to bottom, by nbclient."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest


def executed(notebook: Path, folder: Path, seconds: int = 200) -> Any:
    """The notebook with its outputs, of a kernel in that folder; skips without nbclient.

    The commands of this environment, such as `ecrm`, are found in the kernel. Raises nbclient's
    CellExecutionError for a cell that fails.
    """
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    read = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        read, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return client.execute(env={**os.environ, "PATH": path})


def said(cell: Any) -> str:
    """The text that a cell has printed, and the value of its last line."""
    texts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in cell["outputs"]
    ]
    return "".join("".join(text) for text in texts)  # a file has lists of lines
