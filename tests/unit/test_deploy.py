"""The files of deploy/: names and options in them are those of the program."""

from __future__ import annotations

import json
import re

from ecrm.run.metrics_endpoint import METRICS
from support.paths import ROOT

DEPLOY = ROOT / "deploy"


def test_the_dashboard_shows_every_metric_and_no_other():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"ecrm_\w+", " ".join(queries))) == set(METRICS) - {
        "ecrm_checkpoint_step"
    }
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_the_page_of_metrics_names_every_metric():
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text()
    assert set(re.findall(r"`(ecrm_\w+)`", page)) == set(METRICS)
