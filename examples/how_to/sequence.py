"""Sequences of ids in their order, for attention or a recurrent layer."""

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

ITEMS, LONGEST, DIM = 200, 6, 16


class NextItem(nn.Module):
    """Scores of all candidates as the next item, by attention over the sequence."""

    def __init__(self):
        super().__init__()
        config = EmbeddingConfig(
            name="t_item",
            num_embeddings=ITEMS,
            embedding_dim=DIM,
            feature_names=["history", "candidate"],
        )
        self.items = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.place = nn.Parameter(torch.randn(LONGEST, DIM) * 0.1)
        self.attention = nn.MultiheadAttention(DIM, num_heads=2, batch_first=True)
        self.last = nn.Linear(DIM, DIM)

    def forward(self, kjt):
        rows = self.items(kjt)
        history, lengths = rows["history"].to_padded_dense(LONGEST), rows["history"].lengths()
        absent = torch.arange(LONGEST) >= lengths.unsqueeze(1)
        known = history + self.place
        mixed, _ = self.attention(known, known, known, absent, need_weights=False)
        newest = torch.arange(len(lengths)), lengths - 1
        return (self.last((mixed + history)[newest]) * rows["candidate"].values()).sum(1)


def batch(step, slot, size=256):
    """Half of the candidates are the item after the newest one, the others are drawn."""
    random = torch.Generator().manual_seed(2 * step + slot)
    lengths = torch.randint(1, LONGEST + 1, (size,), generator=random)
    histories = [torch.randint(ITEMS, (n,), generator=random) for n in lengths.tolist()]
    labels = torch.randint(2, (size,), generator=random)
    newest = torch.stack([history[-1] for history in histories])
    drawn = torch.randint(ITEMS, (size,), generator=random)
    candidates = torch.where(labels == 1, (newest + 1) % ITEMS, drawn)
    ids = torch.cat([*histories, candidates])
    lengths = torch.cat([lengths, torch.ones(size, dtype=torch.int64)])
    return KeyedJaggedTensor(["history", "candidate"], ids, lengths=lengths), labels.float()


torch.manual_seed(0)  # of the layers' first weights
model = NextItem()
apply_optimizer_in_backward(torch.optim.Adagrad, model.items.parameters(), {"lr": 0.3})
session = ecrm.Session(model, slots=2, dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01))
for kjt, labels in session.steps(batch, steps=100):
    loss = F.binary_cross_entropy_with_logits(session.model(kjt), labels)
    loss.backward()
    session.log(loss=loss)
session.model.eval()
for kjt, labels in session.eval_batches([batch(1000 + number, 0) for number in range(4)]):
    session.gather(right=(session.model(kjt) > 0) == (labels > 0))
if session.is_main:
    print(f"{session.gathered['right'].float().mean():.0%} of held-out samples are right")
