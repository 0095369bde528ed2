"""End training once the held-out loss gets no better, and keep the best model."""

import torch
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm


def samples(seed):
    """Three labels of four follow the id, the rest are drawn: training overfits."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, (256,), generator=random)
    drawn = torch.rand(256, generator=random) < 0.25
    labels = torch.where(drawn, torch.randint(2, (256,), generator=random) == 1, ids % 3 == 0)
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(256, dtype=torch.int64)), labels


def batch(step, slot):
    return samples(2 * (step % 5) + slot)


config = EmbeddingBagConfig(
    name="t_item", num_embeddings=1000, embedding_dim=8, feature_names=["item"]
)
model = EmbeddingBagCollection([config], device=torch.device("meta"))
apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.3})
session = ecrm.Session(model, slots=2)
held_out = [samples(1000 + number) for number in range(8)]


@session.every(5, mode="min", keep_best=True, patience=3)
def evaluate():
    session.model.eval()  # without dropout; training goes on in its own mode
    for ids, labels in session.eval_batches(held_out):
        session.gather(logits=session.model(ids).values().sum(1), labels=labels)
    found = session.gathered
    loss = float(F.binary_cross_entropy_with_logits(found["logits"], found["labels"].float()))
    session.report(loss, held_out_loss=loss)  # the first value is compared, named values are kept
    if session.is_main:
        print(f"step {session.step}: held-out loss {loss:.4f}")


for ids, labels in session.steps(batch, steps=1000):
    logits = session.model(ids).values().sum(1)
    F.binary_cross_entropy_with_logits(logits, labels.float()).backward()
if session.is_main:
    print(f"training ended after step {session.step}")
