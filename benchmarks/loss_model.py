"""MODEL: rebuilding and mean time to data loss on 100 to 10,000 hosts. No measurement.

A host has one server with ROWS_GB of rows and optimizer state, parity of m/k beside, a link of
NETWORK_GBIT and steps of STEP_SECONDS. `before` rebuilds 4,096 rows a step, the default until
version 0.2. `now` rebuilds within the default of protection.rebuild_share. The formulas are those
of `ecrm plan`: `rebuild_seconds` and `seconds_to_stripe_loss`.

Failures of hosts come from table 5 of "The Llama 3 Herd of Models" (arXiv 2407.21783): 419
unexpected interruptions in 54 days on 16,384 GPUs, 8 to a host. 268 of them had causes in GPUs, so
hosts without GPUs are supposed to have the other 151. Deaths are independent in the model, and a
spare replaces a dead host at once.

Writes benchmarks/results/loss_model.csv and prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ecrm.config import Config, make_config
from ecrm.launch.overhead import seconds_to_stripe_loss
from ecrm.launch.sizing import YEAR, Planned, rebuild_seconds
from lib import measure, tables

HOSTS = (100, 1_000, 10_000)
STRIPES = ((8, 1), (8, 2), (8, 3))
ROWS_GB, RECORD, NETWORK_GBIT, STEP_SECONDS = 100, 520, 10, 0.2
INTERRUPTIONS, OF_GPUS, DAYS, LLAMA_HOSTS = 419, 268, 54, 16_384 // 8
CAUSES = {"all": INTERRUPTIONS, "without those of GPUs": INTERRUPTIONS - OF_GPUS}
BEFORE_ROWS = 4096
FIELDS = (
    "what",
    "hosts",
    "causes",
    "host_mtbf_hours",
    "k",
    "m",
    "rebuild_seconds_before",
    "loss_years_before",
    "rebuild_seconds_now",
    "loss_years_now",
)


def mtbf_hours(interruptions: int) -> float:
    """Hours between failures of a host, for interruptions of the published run."""
    return 24 * DAYS * LLAMA_HOSTS / interruptions


def _config(**protection: Any) -> Config:
    return make_config({"data": {"path": "absent"}, "protection": protection}, "the loss model")


def model_rows() -> list[dict[str, Any]]:
    """The model's CSV: every number of hosts, cause of failures and stripe."""
    found = []
    configs = {
        "before": _config(rebuild_share=1, rebuild_rows_per_step=BEFORE_ROWS),
        "now": _config(),
    }
    for hosts in HOSTS:
        for causes, interruptions in CAUSES.items():
            hours = mtbf_hours(interruptions)
            given = Planned(hosts, 0, NETWORK_GBIT * 1e9 / 8, 3600 * hours, STEP_SECONDS)
            for k, m in STRIPES:
                rows = ROWS_GB * 1e9 * (1 + m / k) / RECORD
                row = {
                    "what": "model",
                    "hosts": hosts,
                    "causes": causes,
                    "host_mtbf_hours": f"{hours:.0f}",
                    "k": k,
                    "m": m,
                }
                for when, config in configs.items():
                    seconds = rebuild_seconds(rows, RECORD, config, given)
                    loss = seconds_to_stripe_loss(hosts, k, m, given.mtbf_seconds, seconds)
                    row[f"rebuild_seconds_{when}"] = f"{seconds:.0f}"
                    row[f"loss_years_{when}"] = f"{loss / YEAR:.4g}"
                found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/loss_model.csv")
    options = parser.parse_args(arguments)
    target = measure.target("loss_model.csv", options.csv, smoke=False)
    rows = model_rows()
    measure.write_csv(target, rows)
    print("\n".join(tables.loss_model(rows)))
    print(f"written to {target}")


if __name__ == "__main__":
    main()
