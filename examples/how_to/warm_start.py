"""Begin with yesterday's model, although the table has grown."""

import torch
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm


def model(rows):
    config = EmbeddingBagConfig(
        name="t_item", num_embeddings=rows, embedding_dim=8, feature_names=["item"]
    )
    bags = EmbeddingBagCollection([config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.3})
    return bags


def batches(rows):
    def batch(step, slot):
        random = torch.Generator().manual_seed(2 * step + slot)
        ids = torch.randint(rows, (256,), generator=random)
        return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(256, dtype=torch.int64))

    return batch


def train(session, rows, steps):
    for ids in session.steps(batches(rows), steps):
        logits = session.model(ids).values().sum(1)
        loss = F.binary_cross_entropy_with_logits(logits, (ids.values() % 3 == 0).float())
        loss.backward()
        session.log(loss=loss)


def log_loss(session, rows):
    for ids in session.eval_batches([batches(rows)(1000 + n, 0) for n in range(4)]):
        session.gather(logits=session.model(ids).values().sum(1), labels=ids.values() % 3 == 0)
    found = session.gathered
    return F.binary_cross_entropy_with_logits(found["logits"], found["labels"].float())


yesterday = ecrm.Session(model(1000), slots=2)
train(yesterday, 1000, steps=60)
yesterday.save("yesterday.pt")

today = ecrm.Session(model(1200), slots=2)
today.load("yesterday.pt", strict=False)  # rows 1000 to 1199 begin as without the file
train(today, 1200, steps=10)
loss = log_loss(today, 1200)
if today.is_main:
    print(f"log loss after 10 steps: {loss:.3f} (0.693 by guessing)")
