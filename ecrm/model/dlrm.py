"""The dense parts of DLRM (dense arch, dot interaction, over arch), with or without TorchRec.

B = batch, F = sparse features, D = embedding dim, N = dense features, U = unique rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ecrm.errors import UsageError
from ecrm.kernels.scatter_add import scatter_add
from ecrm.ops import interact, unshared


class DenseParts(nn.Module):
    """Logits, [B], from dense features, [B, N], and unique embedding rows, `values`, [U, D].

    `places`, int64 [B * F], is the row of each (sample, feature). If `sums`, [U, D], contiguous, is
    given, the rows' gradients are written to `sums` and are the same memory.
    """

    def __init__(self, dense_arch: nn.Module, interaction: nn.Module, over_arch: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.interaction, self.over_arch = dense_arch, interaction, over_arch

    def forward(
        self, dense: Tensor, values: Tensor, places: Tensor, sums: Tensor | None = None
    ) -> Tensor:
        embedded = self.interaction(self.dense_arch(dense), values, places, sums)
        logits: Tensor = self.over_arch(embedded).squeeze(1)
        return logits


class _Interaction(nn.Module):
    """Dense features, [B, D], then the dot products of all pairs of them and F embeddings."""

    def forward(self, dense: Tensor, values: Tensor, places: Tensor, sums: Tensor | None) -> Tensor:
        return interact(dense, values, places, lambda: sums)


class _Spread(torch.autograd.Function):
    """Copies rows to their places, and sums the gradients of a row in the order of `places`.

    Torch's own operation promises no order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, sums: Tensor | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.sums = values.shape, sums
        return values.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        sums = unshared(lambda: ctx.sums)
        if sums is None:
            sums = torch.empty(ctx.shape, device=gradients.device)
        sums.zero_()  # some rows may not be among the places
        scatter_add(sums, places, gradients.contiguous())
        return sums, None, None


_spread: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Spread.apply


class _OnPooled(nn.Module):
    """TorchRec's interaction, which takes pooled embeddings [B, F, D]."""

    def __init__(self, arch: nn.Module) -> None:
        super().__init__()
        self.arch = arch

    def forward(self, dense: Tensor, values: Tensor, places: Tensor, sums: Tensor | None) -> Tensor:
        pooled = _spread(values, places, sums).view(dense.shape[0], -1, dense.shape[1])
        interacted: Tensor = self.arch(dense, pooled)
        return interacted


def _mlp(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += (nn.Linear(inputs, width), nn.ReLU())
        inputs = width
    return nn.Sequential(*layers)


def resolve_dense_arch(name: str) -> str:
    """`torchrec` or `native` for a config's `model.dense_arch`.

    Raises UsageError if TorchRec is asked for but not installed.
    """
    if name == "torchrec" and importlib.util.find_spec("torchrec") is None:
        raise UsageError(
            "model.dense_arch = torchrec, but torchrec is not installed",
            {"model.dense_arch": "native"},
            otherwise="type pip install 'ecrm[torchrec]' "
            "and then pip install --no-deps torchrec==1.8.0",
        )
    return "native" if name == "auto" else name


def import_dense_arch(arch: str) -> None:
    """Import now the modules needed by `build_dense_parts`.

    So a rank becoming a trainer later does not wait for the import.
    """
    if arch == "torchrec":
        importlib.import_module("torchrec.models.dlrm")


def build_dense_parts(
    arch: str,
    dense_features: int,
    sparse_features: int,
    bottom: Sequence[int],
    top: Sequence[int],
    seed: int,
) -> DenseParts:
    """Dense parts with initial values depending on the seed alone.

    `arch` is `torchrec` or `native`. `bottom` ends with the embedding dim, `top` with 1. Both archs
    build the same layers in the same order, so the initial values have the same bits. `native`
    computes the interaction by its own kernel, in a different order.
    """
    interaction_width = bottom[-1] + (sparse_features + 1) * sparse_features // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arch == "torchrec":
            from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

            return DenseParts(
                DenseArch(dense_features, list(bottom)),
                _OnPooled(InteractionArch(sparse_features)),
                OverArch(interaction_width, list(top)),
            )
        return DenseParts(
            _mlp(dense_features, bottom),
            _Interaction(),
            nn.Sequential(
                *_mlp(interaction_width, top[:-1]),
                nn.Linear(top[-2] if len(top) > 1 else interaction_width, top[-1]),
            ),
        )
