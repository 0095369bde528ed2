"""A small training script whose loss overflows in some steps, with a GradScaler or without one.

Arguments: [--scaler], and what is made of losses of slot 1: [--inf-in STEP], [--nan-in STEP], and
[--large-in STEP], where the loss is finite and overflows once it is scaled.
"""

import argparse

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm

STEPS, SLOTS, BATCH, ROWS = 14, 2, 6, 200

parser = argparse.ArgumentParser()
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--inf-in", type=int)
parser.add_argument("--nan-in", type=int)
parser.add_argument("--large-in", type=int)
typed = parser.parse_args()


def batch_of(step: int, slot: int) -> tuple[KeyedJaggedTensor, float]:
    random = torch.Generator().manual_seed(100 * step + slot)
    ids = torch.randint(0, ROWS, (BATCH,), generator=random)
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(BATCH, dtype=torch.int64))
    factors = {typed.inf_in: float("inf"), typed.nan_in: float("nan"), typed.large_in: 1e36}
    return kjt, factors.get(step, 1.0) if slot == 1 else 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.layers(self.bags(kjt).values()).squeeze(1)


torch.manual_seed(0)
model = Model()
apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
scaler = torch.amp.GradScaler("cpu", 2.0**14, growth_interval=3) if typed.scaler else None
session = ecrm.Session(
    model,
    slots=SLOTS,
    dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    grad_scaler=scaler,
)
for kjt, factor in session.steps(batch_of, STEPS):
    loss = (session.model(kjt) - kjt.values() / ROWS).square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    session.log(loss=loss, scale=1.0 if scaler is None else scaler.get_scale())
