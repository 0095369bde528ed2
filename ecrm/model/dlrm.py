"""The dense parts of DLRM: dense arch, dot interaction, over arch; TorchRec's modules or the same without TorchRec.

B = batch, F = sparse features, D = embedding dim, N = dense features.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ecrm.errors import UsageError


class DenseParts(nn.Module):
    """logits [B] from dense features [B, N] and pooled embeddings [B, F, D], all float32."""

    def __init__(self, dense_arch: nn.Module, interaction: nn.Module, over_arch: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.interaction, self.over_arch = dense_arch, interaction, over_arch

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return self.over_arch(self.interaction(self.dense_arch(dense), embeddings)).squeeze(1)


class _Interaction(nn.Module):
    """Dense features [B, D] followed by the dot products of every pair among them and F embeddings."""

    def __init__(self, features: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(features + 1, features + 1, offset=1)
        self.register_buffer("pairs", first * (features + 1) + second, persistent=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        vectors = torch.cat((dense.unsqueeze(1), embeddings), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat((dense, products.index_select(1, self.pairs)), dim=1)


def _mlp(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += (nn.Linear(inputs, width), nn.ReLU())
        inputs = width
    return nn.Sequential(*layers)


def resolve_dense_arch(name: str) -> str:
    """`torchrec` or `native` for a config's `model.dense_arch`; raises UsageError when TorchRec is asked for and absent."""
    installed = importlib.util.find_spec("torchrec") is not None
    if name == "torchrec" and not installed:
        raise UsageError(
            "model.dense_arch = torchrec, but torchrec is not installed: "
            "type pip install 'ecrm[torchrec]' and then pip install --no-deps torchrec==1.8.0, or set model.dense_arch=native"
        )
    return ("torchrec" if installed else "native") if name == "auto" else name


def import_dense_arch(arch: str) -> None:
    """Import now what `build_dense_parts` will need, so that a rank that becomes a trainer later does not wait for it."""
    if arch == "torchrec":
        importlib.import_module("torchrec.models.dlrm")


def build_dense_parts(
    arch: str, dense_features: int, sparse_features: int, bottom: Sequence[int], top: Sequence[int], seed: int
) -> DenseParts:
    """Dense parts with initial values that depend on the seed alone; `arch` is `torchrec` or `native`.

    `bottom` ends with the embedding dim, `top` with 1. Both archs build the same layers in the same
    order, so their initial values are the same bits.
    """
    interaction_width = bottom[-1] + (sparse_features + 1) * sparse_features // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arch == "torchrec":
            from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

            return DenseParts(
                DenseArch(dense_features, list(bottom)),
                InteractionArch(sparse_features),
                OverArch(interaction_width, list(top)),
            )
        return DenseParts(
            _mlp(dense_features, bottom),
            _Interaction(sparse_features),
            nn.Sequential(*_mlp(interaction_width, top[:-1]), nn.Linear(top[-2] if len(top) > 1 else interaction_width, top[-1])),
        )
