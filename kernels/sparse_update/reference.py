"""The definition: torch operations, rounded one by one, in the order of README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ecrm.kernels.sparse_update import Hyper


def update(
    weights: torch.Tensor,
    states: list[torch.Tensor],
    rows: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: str,
    hyper: Hyper,
    delta: torch.Tensor | None,
    marks: torch.Tensor | None,
) -> None:
    parts = [weights, *states]
    old = [part[rows] for part in parts]
    new = new_values(old[0].float(), old[1:], gradients, optimizer, hyper)
    for part, value in zip(parts, new):
        part[rows] = value.to(part.dtype)
    if delta is not None:
        if marks is not None:
            began = marks[rows] == 0
            old[0][began] = 0.0
            delta[:, -4:] = _bits(began.float()[:, None])
        changed = torch.cat([_bits(was) ^ _bits(part[rows]) for was, part in zip(old, parts)], 1)
        delta[:, : changed.shape[1]] = changed
    if marks is not None:
        marks[rows] = 1.0


def new_values(
    w: torch.Tensor, state: list[torch.Tensor], g: torch.Tensor, optimizer: str, hyper: Hyper
) -> list[torch.Tensor]:
    """New weights and new state from old weights, old state and gradients.

    All are float32, [n, D] or [n, 1].
    """
    number = {
        name: torch.tensor(value, dtype=torch.float32, device=w.device)
        for name, value in vars(hyper).items()
    }
    lr, eps = number["learning_rate"], number["eps"]
    g = g + w * number["l2"] if hyper.l2 else g
    w = w * number["keep"]
    if optimizer == "sgd":
        return [fused_multiply_add(-lr, g, w)]
    if optimizer == "rowwise_adagrad":
        h = state[0] + sum_of_squares(g) / torch.tensor(
            g.shape[1], dtype=torch.float32, device=w.device
        )
        return [w - g * (lr / (square_root(h) + eps)), h]
    if optimizer == "adagrad":
        h = fused_multiply_add(g, g, state[0])
        return [
            (w.double() - (g * lr).double() / (square_root(h.double()) + eps.double())).float(),
            h,
        ]
    m = state[0] * number["beta1"] + g * number["one_minus_beta1"]
    v = state[1] * number["beta2"] + (g * g) * number["one_minus_beta2"]
    root = square_root(v / number["correction2"]) + eps
    return [w - ((m / number["correction1"]) / root) * lr, m, v]


def sum_of_squares(g: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a row, float32 [n, 1].

    Eight partial sums, element d in sum d mod 8, are added in pairs.
    """
    n, dimension = g.shape
    padded = torch.zeros(n, -(-dimension // 8) * 8, dtype=torch.float32, device=g.device)
    padded[:, :dimension] = g
    p = torch.zeros(n, 8, dtype=torch.float32, device=g.device)
    for eight in padded.split(8, dim=1):
        p = p + eight * eight
    pairs = p[:, 0::2] + p[:, 1::2]
    fours = pairs[:, 0::2] + pairs[:, 1::2]
    return fours[:, 0:1] + fours[:, 1:2]


def square_root(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded root.

    Torch's root on a CPU comes from MKL and is sometimes one unit off in the last place.
    """
    return (
        torch.from_numpy(np.sqrt(values.numpy()))
        if values.device.type == "cpu"
        else torch.sqrt(values)
    )


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 tensors, rounded once.

    The product is exact in float64. The float64 sum is rounded to odd, and the second rounding, to
    float32, is then correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
    2008). The error of the float64 sum comes from Knuth's two-sum.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    bits = total.view(torch.int64)
    towards_error = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_and_even = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    return torch.where(inexact_and_even, bits + towards_error, bits).view(torch.float64).float()


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).reshape(values.shape[0], -1)
