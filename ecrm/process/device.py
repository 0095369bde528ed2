"""The GPU of a rank: its number, its use by torch, and its name.

Ranks of a host share the host's GPUs: local rank r uses GPU r modulo the number of GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.base.testing_part import testing_part
from ecrm.config.schema import Config
from ecrm.device.imitation import IMITATED_GPU
from ecrm.kernels import dispatch
from ecrm.model.determinism import prepare_cuda, prepare_torch

LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
DEVICES = ("storage.device", "train.device")


def use_device(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Have this process use its GPU, if a device of the config is a GPU.

    Comes before any other use of a GPU, and after the guard's fork. Raises UsageError if this
    machine has no GPU.
    """
    dispatch.use_on_gpu(config.kernels.backend)
    wanted = [name for name in DEVICES if _kind(config, name) == "cuda"]
    if not wanted:
        return
    imitated = config.testing.imitated_gpu
    if not imitated and not torch.cuda.is_available():
        said = " and ".join(wanted) + (" is" if len(wanted) == 1 else " are")
        why = "" if torch.version.cuda else ", for it was built without CUDA"
        raise UsageError(
            f"{said} cuda, but torch {torch.__version__} finds no GPU here{why}",
            dict.fromkeys(wanted, "cpu"),
            otherwise="start on machines with a GPU, and with a torch for it",
        )
    prepare_cuda()
    if config.train.device == "cuda":
        prepare_torch(config.train.threads)
    if imitated:
        testing_part("imitated_gpu").imitate_gpu()
    else:
        torch.cuda.set_device(_card(environ))


def device_of(config: Config, name: str, environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this rank for `name`, an entry of DEVICES."""
    if _kind(config, name) == "cpu":
        return CPU
    if config.testing.imitated_gpu:
        return IMITATED_GPU
    return torch.device("cuda", _card(environ))


def trained_on(config: Config) -> str:
    """The causes of the dense part's bits besides the config, in words.

    The words name the model of GPU, if the dense part is trained on a GPU, and torch's version.
    """
    if config.train.device == "cpu":
        where = "the CPU"
    elif config.testing.imitated_gpu:
        where = "an imitated GPU"
    else:
        major, minor = torch.cuda.get_device_capability()
        where = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    return f"{where} with torch {torch.__version__}"


def gpu_trained_on(config: Config) -> str:
    """As `trained_on`, but "" for a dense part on the CPU, since bits on the CPU stay the same."""
    return "" if config.train.device == "cpu" else trained_on(config)


def gpu_memory(config: Config) -> dict[str, str | int] | None:
    """This rank's GPU: name, bytes, and bytes taken by any process; `None` without a GPU.

    An imitated GPU has a name only.
    """
    if not any(_kind(config, name) == "cuda" for name in DEVICES):
        return None
    if config.testing.imitated_gpu:
        return {"name": "imitated"}
    free, total = torch.cuda.mem_get_info()
    return {"name": torch.cuda.get_device_name(), "bytes": total, "taken": total - free}


def card_of(local_rank: int, cards: int) -> int:
    """The GPU of a local rank on a host with `cards` GPUs."""
    return local_rank % cards


def _card(environ: Mapping[str, str]) -> int:
    return card_of(int(environ.get(LOCAL_RANK, 0)), torch.cuda.device_count())


def _kind(config: Config, name: str) -> str:
    return config.storage.device if name == "storage.device" else config.train.device
