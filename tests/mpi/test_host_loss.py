"""A whole host is lost while a model is trained on it, and a host that cannot be reached."""

from __future__ import annotations

import pytest

from support.host_loss import (
    ONE_LOST,
    survives_the_loss,
    trainings,
)
from support.imitated_hosts import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def train(tmp_path, criteo_rows):
    with trainings(tmp_path, criteo_rows) as start:
        yield start


def test_a_host_is_lost(train, undisturbed_long):
    training = train(3, ONE_LOST)
    survives_the_loss(training, "h2", [1, 4], undisturbed_long)


def test_a_host_that_cannot_be_reached_is_told_before_anything_starts(train):
    training = train(
        2, {**ONE_LOST, "cluster.trainers": 1, "cluster.spares": 0}, starter="false {host}"
    )
    run = training.finish()
    assert run.code == 2
    assert f"error: host {training.hosts.namespace('h1')} cannot be used: " in run.output
    assert not run.folder.exists()
