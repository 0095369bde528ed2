"""DLRM and DCNv2 of the BARS benchmark on Criteo rows, trained by plain torch in one process.

    python examples/criteo_bars_plain.py DATA --model dcnv2

`bars.py` has the layers, the options, and the reading of rows. `criteo_bars.py` is the same with
tables that survive killed ranks. Adam and the decay change all rows in every step, as in BARS.
"""

import bars
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR

typed = bars.options()
data = bars.CriteoDataset.open(typed.data, typed.max_rows, typed.held_out)
epoch = data.train_rows // typed.batch

torch.manual_seed(typed.seed)
model = bars.MODELS[typed.model](bars.bags_of(data, "cpu"))
tables = list(model.bags.parameters())
dense_part = [each for name, each in model.named_parameters() if not name.startswith("bags.")]
optimizer = torch.optim.Adam(
    [{"params": tables, "weight_decay": bars.DECAY}, {"params": dense_part}],
    bars.RATE,
    bars.BETAS,
)
scheduler = MultiStepLR(optimizer, [drop * epoch for drop in typed.drops])

for step in range(typed.epochs * epoch):
    dense, ids, labels = bars.batch_of(data, data.batch_for(step, 0, 1, typed.batch))
    loss = F.binary_cross_entropy_with_logits(model(dense, ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

model.eval()
with torch.no_grad():
    dense, ids, labels = bars.batch_of(data, data.eval_batch(0, data.eval_rows))
    bars.tell(model(dense, ids), labels)
