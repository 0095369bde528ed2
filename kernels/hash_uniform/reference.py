"""The definition, in torch int64 arithmetic modulo 2^64; runs on any device."""

from __future__ import annotations

import torch

GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def fill(
    seed: int, tables: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor, out: torch.Tensor
) -> None:
    seed_key = mix(torch.tensor([signed(seed + GAMMA)], device=rows.device))
    row_keys = mix(mix(seed_key ^ tables) + (rows + 1) * signed(GAMMA))
    columns = torch.arange(1, out.shape[1] + 1, device=rows.device) * signed(GAMMA)
    bits = mix(row_keys[:, None] + columns[None, :])
    centred = shift_right(bits, 40) - 2**23
    out[:] = (centred.to(torch.float32) * 2.0**-23) * bounds[:, None] + 0.0


def mix(z: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 on 64-bit words held as int64."""
    z = (z ^ shift_right(z, 30)) * signed(FIRST)
    z = (z ^ shift_right(z, 27)) * signed(SECOND)
    return z ^ shift_right(z, 31)


def mix_number(z: int) -> int:
    """`mix` of one word, from 0 to 2^64 - 1."""
    z = (z ^ z >> 30) * FIRST % 2**64
    z = (z ^ z >> 27) * SECOND % 2**64
    return z ^ z >> 31


def shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: zeros come in, also for negative int64."""
    shifted: torch.Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def signed(word: int) -> int:
    """A word modulo 2^64 as the int64 with the same bits."""
    word %= 2**64
    return word - 2**64 if word >= 2**63 else word
