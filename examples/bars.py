"""DLRM and DCNv2 with the layers and numbers of BARS on Criteo_x1, for `criteo_bars*.py`.

Rows have 10 floats and begin near zero. Adam has the rate 0.001. Rows decay by an L2 term of 1e-5.

Legend: B samples, 13 dense columns, 26 features.
"""

import argparse

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import CrossNet

from ecrm.data.dataset import CriteoDataset
from ecrm.data.metrics import auc, logit_losses

DIM, DENSE, RATE, DECAY, BETAS = 10, 13, 1e-3, 1e-5, (0.9, 0.999)
TABLES = "where the script of ECRM makes its tables: with cpu all first values are the twin's"


def options() -> argparse.Namespace:
    """The options of both scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="folder of `ecrm prepare criteo`")
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4096, help="samples of a step")
    parser.add_argument("--drops", type=int, nargs="*", default=[], help="rate / 10 after epochs")
    parser.add_argument("--held-out", type=float, default=0.1, help="the share of the last rows")
    parser.add_argument("--max-rows", type=int, default=2_000_000, help="the most rows of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tables", choices=("meta", "cpu"), default="meta", help=TABLES)
    return parser.parse_args()


def layers(inputs: int, width: int, norm: bool, dropout: float) -> list[nn.Module]:
    """Three layers of the same width, with ReLU."""
    found: list[nn.Module] = []
    for before in (inputs, width, width):
        found.append(nn.Linear(before, width))
        found += [nn.BatchNorm1d(width)] if norm else []
        found += [nn.ReLU(), nn.Dropout(dropout)]
    return found


class Dlrm(nn.Module):
    """Dot products of the rows and of an MLP over the dense columns, below an MLP."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        features = len(bags.embedding_bag_configs())
        self.bags, self.dots = bags, InteractionArch(features)
        self.bottom = nn.Sequential(*layers(DENSE, 400, True, 0.0), nn.Linear(400, DIM), nn.ReLU())
        inputs = DIM + features * (features + 1) // 2
        self.top = nn.Sequential(*layers(inputs, 400, True, 0.2), nn.Linear(400, 1))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B], from dense columns, float32 [B, 13], and the ids of 26 features."""
        rows = self.bags(ids).values().view(len(dense), -1, DIM)
        return self.top(self.dots(self.bottom(dense), rows)).squeeze(1)


class Dcn(nn.Module):
    """Three crosses of full rank beside an MLP, over the rows and a vector of each dense column."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags
        self.columns = nn.Parameter(torch.randn(DENSE, DIM) * 1e-4)
        inputs = DIM * (DENSE + len(bags.embedding_bag_configs()))
        self.crosses = CrossNet(inputs, 3)
        self.mlp = nn.Sequential(*layers(inputs, 500, False, 0.1))
        self.head = nn.Linear(inputs + 500, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, as `Dlrm.forward`."""
        columns = (dense.unsqueeze(2) * self.columns).flatten(1)
        found = torch.cat([columns, self.bags(ids).values()], dim=1)
        return self.head(torch.cat([self.crosses(found), self.mlp(found)], dim=1)).squeeze(1)


MODELS = {"dlrm": Dlrm, "dcnv2": Dcn}


def bags_of(data: CriteoDataset, device: str) -> EmbeddingBagCollection:
    """A table for each of the 26 features."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                init_fn=lambda table: nn.init.normal_(table, 0, 1e-4),
            )
            for name, rows in data.tables
        ],
        device=torch.device(device),
    )


def batch_of(
    data: CriteoDataset, found: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense columns, ids and labels of rows read from the dataset."""
    dense, ids, labels = found
    names, one = [name for name, _ in data.tables], torch.ones(ids.numel(), dtype=torch.int64)
    return dense, KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=one), labels


def tell(logits: Tensor, labels: Tensor) -> None:
    """Print AUC and log loss of the held-out rows."""
    scores, truth = logits.double().numpy(), labels.bool().numpy()
    print(f"AUC: {auc(truth, scores):.6f}")
    print(f"log loss: {logit_losses(truth, scores).mean():.6f}", flush=True)
