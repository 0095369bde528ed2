"""DLRM on prepared Criteo rows, as a config's [data], [model] and [train] describe it.

`ecrm launch CONFIG` runs this script, and the config decides everything. A copy of the script is a
script like any other; `ecrm launch` then says what a config says of ranks and protection:

    cp ecrm/recipes/dlrm.py mine.py
    ecrm launch mine.py --servers 4 --trainers 2 --spares 1 -k 3 -m 1 -- \\
        quickstart --set data.path=DIR --output model.safetensors

A page to copy: a model, a session, a loop. The model has the layers and the names of TorchRec's
DLRM, so that TorchRec loads the saved file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.config import Config, load_config
from ecrm.data.dataset import Batch, CriteoDataset
from ecrm.data.metrics import auc, logit_losses
from ecrm.errors import NotFinite
from ecrm.nn import DotInteraction
from ecrm.run.finite import REMEDY
from ecrm.run.plan import dense_arch, plan
from ecrm.session.data import Indexed
from ecrm.session.session import Session

DENSE_FEATURES = 13
EPSILON = 1e-8
ROW_OPTIMIZERS: dict[str, tuple[type, bool]] = {
    "sgd": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, True),
    "adam": (torch.optim.Adam, True),
    "rowwise_adagrad": (RowWiseAdagrad, True),
}
"""Optimizers of rows by `train.sparse_optimizer`, and whether they take an epsilon."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": partial(torch.optim.Adagrad, eps=EPSILON, fused=True),
    "adam": partial(torch.optim.Adam, eps=EPSILON, fused=True),
}
"""Optimizers of the dense layers by `train.dense_optimizer`."""


class Model(DLRM):  # type: ignore[misc]
    """TorchRec's DLRM; by default with the interaction of `ecrm.nn`, which reads fetched rows."""

    def __init__(self, config: Config, tables: Sequence[tuple[str, int]]) -> None:
        bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=config.model.embedding_dim,
                    feature_names=[name],
                )
                for name, rows in tables
            ],
            device=torch.device("meta"),
        )
        super().__init__(
            bags, DENSE_FEATURES, list(config.model.bottom_mlp), list(config.model.top_mlp)
        )
        kind, takes_epsilon = ROW_OPTIMIZERS[config.train.sparse_optimizer]
        numbers = {"lr": config.train.sparse_lr}
        if takes_epsilon:
            numbers["eps"] = config.train.sparse_eps
        apply_optimizer_in_backward(kind, bags.parameters(), numbers)
        self.interaction = DotInteraction(bags) if dense_arch(config) == "native" else None

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B], from dense features, float32 [B, 13], and one id per table."""
        if self.interaction is None:
            logits: Tensor = super().forward(dense, ids)
        else:
            logits = self.over_arch(self.interaction(self.dense_arch(dense), ids))
        return logits.squeeze(1)


def train(config: Config, **options: Any) -> Session:
    """Train the model of a config to its end; `options` are further ones of `Session`."""
    data = CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    names, size = [name for name, _ in data.tables], config.train.global_batch
    torch.manual_seed(config.train.seed)
    session = Session(
        Model(config, data.tables),
        slots=config.slots,
        seed=config.train.seed,
        dense_optimizer=lambda parameters: OPTIMIZERS[config.train.dense_optimizer](
            parameters, lr=config.train.dense_lr
        ),
        average_gradients=False,  # a slot's loss is its part of the mean over the global batch
        **options,
    )

    def inputs(batch: Batch) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        dense, ids, labels = batch
        one = torch.ones(ids.numel(), dtype=torch.int32)
        return dense, KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=one), labels

    def batch_of(step: int, slot: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        return inputs(data.batch_for(step - session.data_began, slot, config.slots, size))

    def held_out(rows: list[int]) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        return inputs(data.eval_batch(rows[0], len(rows)))

    by = config.checkpoint.keep_best
    patience = config.train.stop_after_evaluations_without_gain
    mode = "min" if by == "logloss" else "max"

    @session.every(
        config.train.eval_every_steps,
        at_end=True,
        mode=mode if patience or by != "none" else None,
        keep_best=by != "none",
        patience=patience,
    )
    def evaluate() -> None:
        """Report the AUC and the log loss of the held-out rows; None where undefined."""
        if not data.eval_rows:
            return
        rows = Indexed(range(data.eval_rows), size, collate=held_out, shuffle=False)
        session.model.eval()
        for dense, ids, labels in session.eval_batches(rows):
            logits = session.model(dense.to(session.device), ids)
            session.gather(logits=logits, labels=labels.bool())
        labels, logits = (session.gathered[name].cpu().numpy() for name in ("labels", "logits"))
        area, loss = auc(labels, logits), None
        if np.isfinite(logits).all():
            loss = float(logit_losses(labels, logits).mean())
        elif config.train.on_nonfinite == "stop":
            raise NotFinite(
                f"the log loss of the evaluation at step {session.step} is not finite; {REMEDY}"
            )
        compared = loss if by == "logloss" else area
        session.report(compared, auc=area, logloss=loss, samples=len(labels))

    for dense, ids, labels in session.steps(batch_of, plan(config), samples=size):
        logits = session.model(dense.to(session.device), ids)
        losses = F.binary_cross_entropy_with_logits(
            logits, labels.to(session.device), reduction="sum"
        )
        (losses / size).backward()
        session.log(loss=losses / len(labels))
    return session


def main() -> None:
    """Train as the command line says, and save the model if wanted."""
    parser = argparse.ArgumentParser(description="DLRM on prepared Criteo rows")
    parser.add_argument("config", help="a TOML file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--output", help="file for the trained model")
    typed = parser.parse_args()
    session = train(load_config(typed.config, typed.set))
    if typed.output is not None:
        session.save(typed.output)


if __name__ == "__main__":
    main()
