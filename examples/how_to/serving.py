"""Train with ECRM, serve without: the file has TorchRec's names."""

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        config = EmbeddingBagConfig(
            name="t_item", num_embeddings=1000, embedding_dim=8, feature_names=["item"]
        )
        self.bags = EmbeddingBagCollection([config], device=torch.device(device))
        self.layer = nn.Linear(8, 1)

    def forward(self, ids):
        return self.layer(self.bags(ids).values()).squeeze(1)


def batch(step, slot):
    ids = torch.randint(1000, (256,), generator=torch.Generator().manual_seed(2 * step + slot))
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(256, dtype=torch.int64))


torch.manual_seed(0)  # of the layer's first weights
model = Model("meta")
apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.3})
session = ecrm.Session(model, slots=2, dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.05))
for ids in session.steps(batch, steps=60):
    labels = (ids.values() % 3 == 0).float()
    F.binary_cross_entropy_with_logits(session.model(ids), labels).backward()
session.save("model.pt")

if session.is_main:  # a server of models needs TorchRec, and no ECRM
    served = Model("cpu")
    served.load_state_dict(torch.load("model.pt"))
    served.eval()
    asked = KeyedJaggedTensor(["item"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    with torch.no_grad():
        scores = served(asked).sigmoid()
    print(f"score of item 3: {scores[0]:.2f}, of item 4: {scores[1]:.2f}")
