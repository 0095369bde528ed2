"""Send the scalars of a run to MLflow, as the command of `hooks.logger`.

ecrm launch train.py --set 'hooks.logger="python to_mlflow.py"'
"""

import json
import os
import sys
from pathlib import Path

import mlflow
from mlflow.entities import Metric

folder = Path(os.environ["ECRM_RUN_DIR"])
with open(folder / "events.jsonl") as events:
    began = json.loads(events.readline())["time"]

# One name for all launches of the run: a resumed run goes on, and leaves out known steps.
name = f"{folder.name}-{began:.0f}"
experiment = mlflow.set_experiment("ecrm").experiment_id
client = mlflow.MlflowClient()
known = client.search_runs([experiment], f"tags.mlflow.runName = '{name}'")
run = known[0] if known else client.create_run(experiment, run_name=name)
number = run.info.run_id
told = {
    tag: max(metric.step for metric in client.get_metric_history(number, tag))
    for tag in run.data.metrics
}
for line in sys.stdin:
    found = json.loads(line)
    step, when = found["step"], int(1000 * found["time"])
    metrics = [
        Metric(tag, value, when, step)
        for tag, value in found["values"].items()
        if step > told.get(tag, -1)
    ]
    if metrics:
        client.log_batch(number, metrics)
client.set_terminated(number)
