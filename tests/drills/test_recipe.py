"""The recipe as a script under mpirun, with kills: all tensors are those of the config's run."""

import torch

from ecrm.checkpoint.saved_model import open_model
from support.commands import ecrm
from support.examples import LAYOUT

SETS = ("train.steps=40", "train.epochs=0", "train.slots=3", "train.global_batch=300")
RECIPE = "ecrm/recipes/train.py"


def test_a_killed_script_leaves_the_tensors_of_the_config(tmp_path, criteo_rows, pytestconfig):
    sets = [word for each in (f"data.path={criteo_rows}", *SETS) for word in ("--set", each)]

    def done(*words):
        ended = ecrm(*words, cwd=tmp_path, timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    done("launch", "quickstart", *sets, "--run-dir", "config")
    done("export", "config", "--output", "config.safetensors")
    kills = ("--kill", "1@9:parity", "--kill", "4@20:update")
    script = str(pytestconfig.rootpath / RECIPE)
    done("launch", script, *LAYOUT, *kills, "--", "quickstart", *sets, "--output", "r.safetensors")
    config, _ = open_model(tmp_path / "config.safetensors")
    recipe, _ = open_model(tmp_path / "r.safetensors")
    assert set(config) == set(recipe) and len(recipe) == 38
    for name, tensor in config.items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(recipe[name])), name
