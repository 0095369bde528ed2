"""Draws every figure of the docs, and writes the measured tables of README and docs.

python benchmarks/publish.py            # from benchmarks/results/*.csv
python benchmarks/publish.py --check    # write nothing; exit 1 and name all that would change
"""

from __future__ import annotations

import sys

from lib import figures, tables

if __name__ == "__main__":
    sys.exit(max(figures.main(), tables.main()))
