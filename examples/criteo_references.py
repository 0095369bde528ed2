"""DLRM of facebookresearch and DLRMv2 of MLPerf on Criteo rows, with tables that survive kills.

    ecrm launch examples/criteo_references.py --kill 1@20 -- DATA --model mlperf --narrow 8

`references.py` has layers, optimizers and the expander from one id to many.
`criteo_references_plain.py` is the same in plain torch.
"""

import references
import torch
import torch.nn.functional as F
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

typed = references.options()
SLOTS, EVALUATED = 2, 4096
reference = references.REFERENCES[typed.model]
data = references.CriteoDataset.open(typed.data, typed.max_rows, typed.held_out)
samples = typed.batch or reference.batch

torch.manual_seed(typed.seed)  # of the layers' first weights
model = references.model_of(typed.model, data, typed.narrow, typed.tables)
rates = {"lr": reference.rate}
apply_optimizer_in_backward(reference.optimizer, model.sparse_arch.parameters(), rates)

session = ecrm.Session(
    model,
    slots=SLOTS,
    seed=typed.seed,
    dense_optimizer=lambda parameters: reference.optimizer(parameters, **rates),
    wire_dtype=getattr(torch, typed.wire_dtype),
)


def batch(step: int, slot: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    return references.batch_of(typed.model, data, data.batch_for(step, slot, SLOTS, samples))


def held_out(numbers: list[int]) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    return references.batch_of(typed.model, data, data.eval_batch(numbers[0], len(numbers)))


for dense, ids, labels in session.steps(batch, typed.epochs * (data.train_rows // samples)):
    loss = F.binary_cross_entropy_with_logits(session.model(dense, ids).squeeze(1), labels)
    loss.backward()
    session.log(loss=loss)

session.model.eval()
rows = ecrm.Indexed(range(data.eval_rows), EVALUATED, held_out, shuffle=False)
for dense, ids, labels in session.eval_batches(rows):
    session.gather(logits=session.model(dense, ids).squeeze(1), labels=labels)
if session.is_main:
    references.tell(session.gathered["logits"], session.gathered["labels"])
