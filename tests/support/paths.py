"""Where tests find the repository and the programs that they start."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
TERABYTE_HEAD = ROOT.parent / "shared" / "data" / "terabyte_day0_head10k.txt.gz"
