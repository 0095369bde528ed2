"""Which GPU a rank uses, what it is called, and that all ranks train the model on the same."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.base.version_set import ecrm_build
from ecrm.checkpoint.compatibility import device_changed, on_gpu, same_bits
from ecrm.config import load_config
from ecrm.device import imitation
from ecrm.engine.events import Start
from ecrm.model.determinism import prepared_torch
from ecrm.process.device import card_of, device_of, gpu_memory, trained_on, use_device
from ecrm.run.hello import check_trained_on, check_version_sets, needed_versions
from support.telling import an


def config(*sets):
    return load_config("tiny", ["data.path=x", *sets])


def test_ranks_of_a_host_share_its_gpus(monkeypatch):
    assert [card_of(rank, 2) for rank in range(5)] == [0, 1, 0, 1, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = {"OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    rows_alone = config("storage.device=cuda")
    assert device_of(rows_alone, "storage.device", environ) == torch.device("cuda:1")
    assert device_of(rows_alone, "train.device", environ) == CPU


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    both = config("storage.device=cuda", "train.device=cuda")
    said = "storage.device and train.device are cuda, but torch "
    with pytest.raises(UsageError, match=said) as caught:
        use_device(both)
    assert "\n" not in str(caught.value)
    assert "storage.device=cpu" in str(caught.value) and "train.device=cpu" in str(caught.value)
    with pytest.raises(UsageError, match="^train.device is cuda, but torch"):
        use_device(config("train.device=cuda"))
    use_device(config())


def test_the_bits_of_a_gpu_are_named_by_its_model_and_by_torch(monkeypatch):
    assert trained_on(config("storage.device=cuda")) == f"the CPU with torch {torch.__version__}"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert trained_on(config("train.device=cuda")) == (
        f"A Card (compute capability 9.0) with torch {torch.__version__}"
    )


def test_ranks_that_would_come_to_other_bits_are_named():
    check_trained_on({0: "a card with torch 2", 1: "a card with torch 2"})
    said = "rank 0 trains the model on a card with torch 2, rank 3 on a card with torch 3, which"
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        check_trained_on({0: "a card with torch 2", 3: "a card with torch 3"})
    assert refused.value.speaker == 0 and "\n" not in str(refused.value)


def test_ranks_with_other_versions_are_named_unless_other_versions_are_allowed():
    here = needed_versions(config())
    check_version_sets({0: here, 1: here})
    said = f"rank 3 has other versions than rank 0: torch {here['torch']} -> 9: "
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        check_version_sets({0: here, 3: {**here, "torch": "9"}})
    assert refused.value.speaker == 0 and "train.other_versions=true" in str(refused.value)
    allowed = needed_versions(config("train.other_versions=true"))
    assert allowed == {"ecrm": here["ecrm"]}
    said = f"rank 3 has ecrm 9, rank 0 has ecrm {here['ecrm']}"
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        check_version_sets({0: allowed, 3: {"ecrm": "9"}})
    assert refused.value.speaker == 0 and "install the same ecrm" in str(refused.value)


def test_an_edited_source_is_another_build_of_ecrm(tmp_path):
    package, kernels = tmp_path / "ecrm", tmp_path / "kernels"
    for folder in (package, kernels):
        folder.mkdir()
    (package / "kernels").symlink_to(kernels)
    builds = []
    for file, text in (("a.py", ""), ("a.py", "#"), ("b.py", "#"), ("kernels/c.h", "")):
        (package / file).write_text(text)
        builds.append(ecrm_build.__wrapped__(package))
    assert len(set(builds)) == len(builds)
    (package / "notes.txt").write_text("")
    assert ecrm_build.__wrapped__(package) == builds[-1]


def test_torch_is_set_before_it_uses_the_gpu(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(imitation, "_doubles", [])  # the thread never ends its imitation
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    was_used = torch.cuda.is_initialized()
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    on_gpu = config("train.device=cuda", "testing.imitated_gpu=true")

    def in_its_thread():  # which has a GPU for the rest of its life
        use_device(on_gpu)
        return torch.zeros(1, device="cuda").is_cuda

    with prepared_torch(threads=1), ThreadPoolExecutor(1) as thread:
        torch.use_deterministic_algorithms(False)
        assert thread.submit(in_its_thread).result()
        assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not matmul.allow_tf32 and not cudnn.allow_tf32
    assert torch.cuda.is_initialized() == was_used
    matmul.allow_tf32, cudnn.allow_tf32 = before


def test_the_start_says_what_is_taken_of_a_gpu(monkeypatch):
    assert gpu_memory(config()) is None
    assert gpu_memory(config("train.device=cuda", "testing.imitated_gpu=true")) == {
        "name": "imitated"
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60_000_000, 80_000_000))
    on_card = config("storage.device=cuda")
    gpu = gpu_memory(on_card)
    assert gpu == {"name": "A Card", "bytes": 80_000_000, "taken": 20_000_000}
    start = an(Start, kernels="avx2", version_set="0a1b2c3d")
    said = replace(start, gpu=gpu).in_words("5 steps")
    assert said == "5 steps; kernels avx2, versions 0a1b2c3d, GPU A Card: 20 of 80 MB taken"
    assert start.in_words("5 steps").endswith("0a1b2c3d")


def test_going_on_elsewhere_is_named():
    cpu, card = {"seed": 1, "told": {}}, {"seed": 1, "told": {}, **on_gpu("A Card")}
    assert device_changed(cpu, cpu) == [] and cpu == {**cpu, **on_gpu("")}
    said = "the model is trained on A Card -> the CPU: other bits from here on"
    assert device_changed(card, cpu) == [said]
    assert same_bits(card, card) and not same_bits(card, cpu)
