"""A script whose model begins with a file: train.py FILE OUTPUT [STEPS]."""

import sys

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm

ROWS, DIM = 3000, 8


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="user", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"]
        )
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device(device))
        self.again = self.ebc  # so that the table has two names
        self.top = nn.Linear(DIM, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.ebc(kjt).values()).squeeze(1)


def batch(step: int, slot: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(1000 * step + slot)
    ids = torch.randint(0, ROWS // 2, (16,), generator=random)
    return KeyedJaggedTensor(["user"], ids, lengths=torch.ones(16, dtype=torch.int64))


def main(source: str, output: str, steps: str = "12") -> None:
    model = Model("meta")
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05})
    session = ecrm.Session(
        model, slots=2, dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    )
    session.load(source)
    for kjt in session.steps(batch, int(steps)):
        loss = (session.model(kjt) - kjt.values() % 2).square().mean()
        loss.backward()
        session.log(loss=loss)
    session.save(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
