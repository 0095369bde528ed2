"""Send the scalars of a run to W&B, as the command of `hooks.logger`.

ecrm launch train.py --set 'hooks.logger="python to_wandb.py"'
"""

import json
import os
import sys
from pathlib import Path

import wandb

folder = Path(os.environ["ECRM_RUN_DIR"])
with open(folder / "events.jsonl") as events:
    began = json.loads(events.readline())["time"]

# One id for all launches of the run: W&B goes on, and leaves out the steps that it has.
run = wandb.init(project="ecrm", id=f"{folder.name}-{began:.0f}", resume="allow")
for line in sys.stdin:
    found = json.loads(line)
    run.log(found["values"], step=found["step"])
run.finish()
