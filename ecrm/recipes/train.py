"""The model of a config, as its [data], [model] and [train] describe the training.

`ecrm launch CONFIG` runs this script, and the config decides everything. A copy of the script is a
script like any other script, and options of `ecrm launch` give the ranks and the protection:

    cp ecrm/recipes/train.py mine.py
    ecrm launch mine.py --servers 4 --trainers 2 --spares 1 -k 3 -m 1 -- \\
        quickstart --set data.path=DIR --output model.safetensors

A page to copy: a session, a loop, an evaluation. `models.py` beside this page has the models,
`rows.py` the batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ecrm.base.errors import NotFinite
from ecrm.config import Config, load_config
from ecrm.data.metrics import auc, logit_losses
from ecrm.recipes.models import MODELS
from ecrm.recipes.rows import Batch, open_rows
from ecrm.run.finite import REMEDY
from ecrm.run.plan import plan
from ecrm.session.session import Session

EPSILON = 1e-8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": partial(torch.optim.Adagrad, eps=EPSILON, fused=True),
    "adam": partial(torch.optim.Adam, eps=EPSILON, fused=True),
}
"""Optimizers of the dense layers by `train.dense_optimizer`."""


def train(config: Config, **options: Any) -> Session:
    """Train the model of a config to its end; `options` are further ones of `Session`."""
    rows, size = open_rows(config), config.train.global_batch
    torch.manual_seed(config.train.seed)
    session = Session(
        MODELS[config.model.architecture](config, rows),
        slots=config.slots,
        seed=config.train.seed,
        dense_optimizer=lambda parameters: OPTIMIZERS[config.train.dense_optimizer](
            parameters, lr=config.train.dense_lr
        ),
        wire_dtype=getattr(torch, config.train.wire_dtype),
        average_gradients=False,  # a slot's loss is its part of the mean over the global batch
        **options,
    )

    def batch_of(step: int, slot: int) -> Batch:
        return rows.batch_of(step - session.data_began, slot)

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
        if rows.held_out is None:
            return
        session.model.eval()
        for dense, ids, labels in session.eval_batches(rows.held_out):
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
    parser = argparse.ArgumentParser(description="the model of a config")
    parser.add_argument("config", help="a TOML file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--output", help="file for the trained model")
    typed = parser.parse_args()
    session = train(load_config(typed.config, typed.set))
    if typed.output is not None:
        session.save(typed.output)


if __name__ == "__main__":
    main()
