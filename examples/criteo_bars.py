"""DLRM and DCNv2 of the BARS benchmark on Criteo rows, with tables that survive killed ranks.

    ecrm launch examples/criteo_bars.py --servers 3 --trainers 2 -k 2 -m 1 --kill 1@60 -- DATA

`bars.py` has the layers and the options, `criteo_bars_plain.py` is the same in plain torch. Three
things differ from BARS. Rows come in the order of the file. Adam and the decay change only the rows
of a step. Rates fall after the epochs of `--drops`, and not on a plateau.
"""

import bars
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm
from ecrm.data.dataset import CriteoDataset

typed = bars.options()
SLOTS, EVALUATED = 2, 4096
data = CriteoDataset.open(typed.data, typed.max_rows, typed.held_out)
epoch = data.train_rows // typed.batch

torch.manual_seed(typed.seed)  # of the layers' first weights
model = bars.MODELS[typed.model](bars.bags_of(data, typed.tables))
apply_optimizer_in_backward(
    torch.optim.Adam,
    model.bags.parameters(),
    {"lr": bars.RATE, "betas": bars.BETAS, "weight_decay": bars.DECAY},
)


def falling(optimizer: torch.optim.Optimizer) -> MultiStepLR:
    return MultiStepLR(optimizer, [drop * epoch for drop in typed.drops])


session = ecrm.Session(
    model,
    slots=SLOTS,
    seed=typed.seed,
    dense_optimizer=lambda parameters: torch.optim.Adam(parameters, bars.RATE, bars.BETAS),
    scheduler=falling,
    sparse_scheduler=falling,
)


def batch(step: int, slot: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    return bars.batch_of(data, data.batch_for(step, slot, SLOTS, typed.batch))


def held_out(numbers: list[int]) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    return bars.batch_of(data, data.eval_batch(numbers[0], len(numbers)))


for dense, ids, labels in session.steps(batch, typed.epochs * epoch):
    loss = F.binary_cross_entropy_with_logits(session.model(dense, ids), labels)
    loss.backward()
    session.log(loss=loss)

session.model.eval()
rows = ecrm.Indexed(range(data.eval_rows), EVALUATED, held_out, shuffle=False)
for dense, ids, labels in session.eval_batches(rows):
    session.gather(logits=session.model(dense, ids), labels=labels)
if session.is_main:
    bars.tell(session.gathered["logits"], session.gathered["labels"])
