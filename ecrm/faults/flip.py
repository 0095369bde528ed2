"""The text of testing.flip. Pure and light: checked with the rest of a config, before anything heavy is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("row", "state", "parity")


@dataclass(frozen=True)
class Flip:
    """One bit flips on `rank` in `step`, after its updates: in a data row, its optimizer state, or a parity row."""

    rank: int
    step: int
    kind: str


def parse_flip(text: str) -> Flip | None:
    """RANK@STEP:KIND; None for anything else."""
    match = re.fullmatch(rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(KINDS)})", text)
    return Flip(int(match[1]), int(match[2]), match[3]) if match else None
