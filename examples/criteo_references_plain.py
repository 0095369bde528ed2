"""DLRM of facebookresearch and DLRMv2 of MLPerf on Criteo rows, by plain torch in one process.

    python examples/criteo_references_plain.py DATA --model mlperf --batch 256 --narrow 8

`references.py` has layers, optimizers, options, and the expander from one id to many.
`criteo_references.py` is the same with tables that survive killed ranks.
"""

import references
import torch
import torch.nn.functional as F

typed = references.options()
reference = references.REFERENCES[typed.model]
data = references.CriteoDataset.open(typed.data, typed.max_rows, typed.held_out)
samples = typed.batch or reference.batch

torch.manual_seed(typed.seed)
model = references.model_of(typed.model, data, typed.narrow, "cpu")
optimizer = reference.optimizer(model.parameters(), lr=reference.rate)

for step in range(typed.epochs * (data.train_rows // samples)):
    read = data.batch_for(step, 0, 1, samples)
    dense, ids, labels = references.batch_of(typed.model, data, read)
    loss = F.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    read = data.eval_batch(0, data.eval_rows)
    dense, ids, labels = references.batch_of(typed.model, data, read)
    references.tell(model(dense, ids).squeeze(1), labels)
