"""The models of a config: DLRM, DCNv2 and two towers, by `model.architecture`.

A page to copy. DLRM and DCNv2 have the layers and the names of TorchRec's models, so that TorchRec
loads the saved file. All rows lie in one EmbeddingBagCollection, and a feature is the sum of the
rows of its ids.

Legend: B samples, F features, D floats of a row, n dense columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRM_DCN, SparseArch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.config import Config
from ecrm.nn import DotInteraction
from ecrm.recipes.rows import RecipeRows

ROW_OPTIMIZERS: dict[str, tuple[type, bool]] = {
    "sgd": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, True),
    "adam": (torch.optim.Adam, True),
    "rowwise_adagrad": (RowWiseAdagrad, True),
}
"""Optimizers of rows by `train.sparse_optimizer`, and whether they take an epsilon."""


class Dlrm(DLRM):  # type: ignore[misc]
    """TorchRec's DLRM; by default with the interaction of `ecrm.nn`, which reads fetched rows."""

    def __init__(self, config: Config, rows: RecipeRows) -> None:
        model, bags = config.model, bags_of(config, rows)
        super().__init__(bags, rows.inputs, list(model.bottom_mlp), list(model.top_mlp))
        self.interaction = DotInteraction(bags) if model.interaction == "native" else None

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B], from dense columns, float32 [B, n], and the ids of F features."""
        if self.interaction is None:
            logits: Tensor = super().forward(dense, ids)
        else:
            logits = self.over_arch(self.interaction(self.dense_arch(dense), ids))
        return logits.squeeze(1)


class Dcn(DLRM_DCN):  # type: ignore[misc]
    """TorchRec's DLRM with the crosses of DCNv2, of low rank, in place of the dot products."""

    def __init__(self, config: Config, rows: RecipeRows) -> None:
        model = config.model
        super().__init__(
            bags_of(config, rows),
            rows.inputs,
            list(model.bottom_mlp),
            list(model.top_mlp),
            model.cross_layers,
            model.cross_rank,
        )

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B], as `Dlrm.forward`."""
        logits: Tensor = super().forward(dense, ids)
        return logits.squeeze(1)


class TwoTowers(nn.Module):
    """The dot product of a user's tower and an item's tower: two MLPs over columns of their own.

    The user's tower has the columns of `model.user_columns`, the item's tower all others.
    """

    def __init__(self, config: Config, rows: RecipeRows) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(bags_of(config, rows))
        features, users = self.sparse_arch.sparse_feature_names, config.model.user_columns
        self.places = [
            (
                [place for place, name in enumerate(features) if (name in users) == of_user],
                [place for place, name in enumerate(rows.dense) if (name in users) == of_user],
            )
            for of_user in (True, False)
        ]
        widths = [
            config.model.embedding_dim * len(of_rows) + len(of_dense)
            for of_rows, of_dense in self.places
        ]
        self.user_tower, self.item_tower = (
            tower([width, *config.model.bottom_mlp]) for width in widths
        )

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B], as `Dlrm.forward`."""
        found = self.sparse_arch(ids)
        user, item = (
            torch.cat([found[:, of_rows].flatten(1), dense[:, of_dense]], dim=1)
            for of_rows, of_dense in self.places
        )
        logits: Tensor = (self.user_tower(user) * self.item_tower(item)).sum(1)
        return logits


def tower(widths: Sequence[int]) -> nn.Sequential:
    """Layers of the given widths, the inputs first, with ReLU between two layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def bags_of(config: Config, rows: RecipeRows) -> EmbeddingBagCollection:
    """The tables of all features, on the meta device, with the optimizer of the rows."""
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=count,
                embedding_dim=config.model.embedding_dim,
                feature_names=[feature for feature, of in rows.features.items() if of == name],
            )
            for name, count in rows.tables.items()
        ],
        is_weighted=rows.weighted,
        device=torch.device("meta"),
    )
    kind, takes_epsilon = ROW_OPTIMIZERS[config.train.sparse_optimizer]
    numbers = {"lr": config.train.sparse_lr}
    if takes_epsilon:
        numbers["eps"] = config.train.sparse_eps
    apply_optimizer_in_backward(kind, bags.parameters(), numbers)
    return bags


MODELS: dict[str, type[nn.Module]] = {"dlrm": Dlrm, "dcnv2": Dcn, "two_tower": TwoTowers}
"""The models by `model.architecture`."""
