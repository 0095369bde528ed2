"""TorchRec's own models, unmodified, under mpirun: kills change no bit of them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import ecrm
from support.drilling import Run
from support.examples import LAYOUT, dead_ranks
from support.paths import PROGRAMS
from support.programs.torchrec_models import MODELS

STEPS = 12
SERVER, TRAINER = "1@5:parity", "4@8:forward"


@dataclass(frozen=True)
class Trained:
    """A run, the model that it saved, and what each rank at its end was told of each step."""

    run: Run
    saved: dict[str, torch.Tensor]
    told: list[dict[str, Any]]


def trained(folder: Path, name: str, *kills: str) -> Trained:
    program, model = PROGRAMS / "torchrec_models.py", folder / "model.pt"
    words = [word for kill in kills for word in ("--kill", kill)]
    line = ("launch", str(program), *LAYOUT, "--run-dir", str(folder / "run"), *words)
    done = ecrm(*line, "--", name, str(model), str(STEPS), cwd=folder, timeout=200)
    run = Run(done.returncode, done.stdout + done.stderr, folder / "run")
    assert run.code == 0, run.output
    told = [json.loads(path.read_text()) for path in folder.glob("model.pt.*.json")]
    return Trained(run, torch.load(model, weights_only=True), told)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return functools.cache(lambda name: trained(tmp_path_factory.mktemp("calm"), name))


@pytest.mark.parametrize("kills", [(SERVER,), (TRAINER,), (SERVER, TRAINER)])
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_server_and_a_killed_trainer_change_no_bit(name, kills, tmp_path, calm):
    undisturbed, killed = calm(name), trained(tmp_path, name, *kills)
    assert dead_ranks(undisturbed.run) == []
    assert dead_ranks(killed.run) == sorted(int(kill.split("@")[0]) for kill in kills)
    assert killed.run.model == undisturbed.run.model
    assert killed.saved.keys() == undisturbed.saved.keys()
    assert all(
        torch.equal(killed.saved[tensor], there) for tensor, there in undisturbed.saved.items()
    )
    (whole,) = {json.dumps(told) for told in undisturbed.told if told}
    assert list(json.loads(whole)) == [str(step + 1) for step in range(STEPS)]
    told = [told for told in killed.told if told]
    assert told and any(len(some) == STEPS for some in told)
    for some in told:  # a rank that took over is told the rest
        assert some == {step: json.loads(whole)[step] for step in some}
