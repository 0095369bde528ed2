"""Add a feature with a table of its own to a trained model."""

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

ROWS = {"item": 1000, "shop": 20}


class Model(nn.Module):
    """The sum of all features' rows: a further table changes no shape of the layer."""

    def __init__(self, features):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=ROWS[name], embedding_dim=8, feature_names=[name]
            )
            for name in features
        ]
        self.bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.layer = nn.Linear(8, 1)

    def forward(self, kjt):
        return self.layer(sum(self.bags(kjt).to_dict().values())).squeeze(1)


def batches(features):
    def batch(step, slot):
        random = torch.Generator().manual_seed(2 * step + slot)
        ids = {name: torch.randint(rows, (256,), generator=random) for name, rows in ROWS.items()}
        labels = (ids["item"] % 3 + ids["shop"] % 2 == 0).float()
        kjt = KeyedJaggedTensor(
            features,
            torch.cat([ids[name] for name in features]),
            lengths=torch.ones(256 * len(features), dtype=torch.int64),
        )
        return kjt, labels

    return batch


def train(features, steps, begin_with=None):
    torch.manual_seed(0)  # of the layer's first weights
    model = Model(features)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.3})
    session = ecrm.Session(model, slots=2, dense_optimizer=lambda ps: torch.optim.Adam(ps, 0.05))
    if begin_with:
        session.load(begin_with, strict=False)  # the new table begins as without the file

    def told(finished, logged):
        if session.is_main and finished in (1, steps):
            print(f"{' and '.join(features)}: step {finished}, loss {logged[0]['loss']:.3f}")

    session.on_commit(told)
    for kjt, labels in session.steps(batches(features), steps):
        loss = F.binary_cross_entropy_with_logits(session.model(kjt), labels)
        loss.backward()
        session.log(loss=loss)
    session.save("model.pt" if begin_with else "before.pt")


train(["item"], steps=60)
train(["item", "shop"], steps=60, begin_with="before.pt")
