"""Features with several ids, none, or ids with weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm


def kjt(features, weights=None):
    """The ids of features: {name: a list of ids for each sample}; weights in the same shape."""
    lists = [ids for samples in features.values() for ids in samples]
    flat = [id for ids in lists for id in ids]
    given = weights and [w for samples in weights.values() for ws in samples for w in ws]
    return KeyedJaggedTensor(
        list(features),
        torch.tensor(flat, dtype=torch.int64),
        weights=given and torch.tensor(given),
        lengths=torch.tensor([len(ids) for ids in lists]),
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mean, total = PoolingType.MEAN, PoolingType.SUM
        self.tags = EmbeddingBagCollection([self.table("tag", 50, mean)], device="meta")
        self.seen = EmbeddingBagCollection(
            [self.table("seen", 500, total)], is_weighted=True, device="meta"
        )
        self.layer = nn.Linear(16, 1)

    def table(self, name, rows, pooling):
        return EmbeddingBagConfig(
            name=f"t_{name}",
            num_embeddings=rows,
            embedding_dim=8,
            feature_names=[name],
            pooling=pooling,
        )

    def forward(self, tags, seen):
        pooled = [self.tags(tags).values(), self.seen(seen).values()]
        return self.layer(torch.cat(pooled, dim=1)).squeeze(1)


def batch(step, slot, size=128):
    """A sample has up to three tags, and up to four items with seconds of attention."""
    random = torch.Generator().manual_seed(2 * step + slot)

    def draw(below, most):
        counts = torch.randint(most + 1, (size,), generator=random).tolist()
        return [torch.randint(below, (n,), generator=random).tolist() for n in counts]

    tags, seen = draw(50, 3), draw(500, 4)
    seconds = [[0.1 * (item % 10) for item in items] for items in seen]
    labels = torch.tensor([float(any(tag % 5 == 0 for tag in own)) for own in tags])
    return kjt({"tag": tags}), kjt({"seen": seen}, {"seen": seconds}), labels


torch.manual_seed(0)  # of the layer's first weights
model = Model()
for bags in (model.tags, model.seen):
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.3})
session = ecrm.Session(model, slots=2, dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.05))
for tags, seen, labels in session.steps(batch, steps=60):
    loss = F.binary_cross_entropy_with_logits(session.model(tags, seen), labels)
    loss.backward()
    session.log(loss=loss)
session.model.eval()
for tags, seen, labels in session.eval_batches([batch(1000 + number, 0) for number in range(4)]):
    right = (session.model(tags, seen) > 0) == (labels > 0)
    session.gather(right=right)
if session.is_main:
    print(f"{session.gathered['right'].float().mean():.0%} of held-out samples are right")
