"""DLRM of facebookresearch on Criteo Kaggle, and DLRMv2 of MLPerf, for `criteo_references*.py`.

Layers are TorchRec's. DLRMv2 has bags of many ids, made of the one id of a row by `bags_of_ids`.

Legend: B samples, 26 features, T ids of all samples and features.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRM_DCN

from ecrm.data.dataset import CriteoDataset
from ecrm.data.hashing import mix64
from ecrm.data.metrics import auc, logit_losses

DENSE, CROSSES, LOW_RANK = 13, 3, 512
TABLES = "where the script of ECRM makes its tables: with cpu all first values are the twin's"
ONE_HOT = (1,) * 26
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""The ids of a bag for each feature: MLPerf's `--multi_hot_sizes`."""


@dataclass(frozen=True)
class Reference:
    """The published numbers of a model: layers, optimizer, samples of a step, ids of a bag."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    optimizer: type[torch.optim.Optimizer]
    rate: float
    batch: int
    hot: tuple[int, ...]


REFERENCES = {
    "kaggle": Reference((512, 256, 64, 16), (512, 256, 1), torch.optim.SGD, 0.1, 128, ONE_HOT),
    "mlperf": Reference(
        (512, 256, 128),
        (1024, 1024, 512, 256, 1),
        torch.optim.Adagrad,
        0.005,
        65_536,
        MULTI_HOT,
    ),
}


def options() -> argparse.Namespace:
    """The options of both scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="folder of `ecrm prepare criteo`")
    parser.add_argument("--model", choices=REFERENCES, default="kaggle")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, help="samples of a step; by default as published")
    parser.add_argument("--narrow", type=int, default=1, help="divide all widths by this number")
    parser.add_argument("--held-out", type=float, default=0.1, help="the share of the last rows")
    parser.add_argument("--max-rows", type=int, default=40_000_000, help="most rows of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--wire-dtype", choices=("float32", "bfloat16"), default="float32", help="with ECRM alone"
    )
    parser.add_argument("--tables", choices=("meta", "cpu"), default="meta", help=TABLES)
    return parser.parse_args()


def model_of(name: str, data: CriteoDataset, narrow: int, device: str) -> nn.Module:
    """A reference over the tables of the data, with all widths divided by `narrow`."""
    reference = REFERENCES[name]
    bottom, top = (
        [max(1, width // narrow) for width in widths]
        for widths in (reference.bottom, reference.top)
    )
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=table, num_embeddings=rows, embedding_dim=bottom[-1], feature_names=[table]
            )
            for table, rows in data.tables
        ],
        device=torch.device(device),
    )
    if name == "kaggle":
        return DLRM(bags, DENSE, bottom, top)
    return DLRM_DCN(bags, DENSE, bottom, top, CROSSES, LOW_RANK // narrow)


def bags_of_ids(ids: Tensor, rows: list[int], hot: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Bags of many ids from one id of each feature: the multi-hot expander.

    The bag of an id has the id first. All further ids are fixed by feature, id and place:
    splitmix64(feature * 2^48 + place * 2^40 + id) mod rows. MLPerf draws its further ids by NumPy,
    as uniformly. `ids` is int64 [B, 26], below `rows` and 2^40. Returns the ids int64 [T], the
    bags of the first feature first, and the lengths of the bags, int64 [26 * B].
    """
    found = []
    for feature, (column, count, size) in enumerate(zip(ids.T.numpy(), rows, hot)):
        places = np.arange(size, dtype=np.uint64) << np.uint64(40)
        keys = column.astype(np.uint64)[:, None] + places + (np.uint64(feature) << np.uint64(48))
        bags = (mix64(keys) % np.uint64(count)).astype(np.int64)
        bags[:, 0] = column
        found.append(torch.from_numpy(bags.reshape(-1)))
    return torch.cat(found), torch.tensor(hot).repeat_interleave(len(ids))


def batch_of(
    name: str, data: CriteoDataset, read: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense columns, bags of ids and labels of rows read from the dataset."""
    dense, ids, labels = read
    tables = data.tables
    values, lengths = bags_of_ids(ids, [rows for _, rows in tables], REFERENCES[name].hot)
    names = [table for table, _ in tables]
    return dense, KeyedJaggedTensor(names, values, lengths=lengths), labels


def tell(logits: Tensor, labels: Tensor) -> None:
    """Print AUC and log loss of the held-out rows."""
    scores, truth = logits.double().numpy(), labels.bool().numpy()
    print(f"AUC: {auc(truth, scores):.6f}")
    print(f"log loss: {logit_losses(truth, scores).mean():.6f}", flush=True)
