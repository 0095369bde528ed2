"""Sessions whose module is on a GPU: what is left is what one without kills leaves, or the CPU."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.config import load_config
from ecrm.device.imitation import IMITATED_GPU
from ecrm.kernels import dispatch
from ecrm.model.determinism import prepared_torch
from ecrm.model.module_replica import ModuleReplica
from ecrm.session import device
from ecrm.session.device import move, session_device
from ecrm.testing.imitated_gpu import HostMemoryExpected, imitated_gpu
from ecrm.testing.simulated_transport import PhaseFault
from support.sessions import Layout, run, train_two_tower


@pytest.fixture(autouse=True)
def reference():
    """Plain operations of torch in the place of interpreted kernels, which take a while."""
    with dispatch.used_on_gpu("reference"), prepared_torch(threads=1):
        yield


FAULTS = (PhaseFault(4, 1, "dense"), PhaseFault(1, 3, "parity"))
STEPS = 4


@pytest.fixture(scope="module")
def on_cpu():
    with prepared_torch(threads=1):
        return run(FAULTS[:0], Layout(spares=2), partial(train_two_tower, steps=STEPS))


def is_there(session):
    assert session.device == IMITATED_GPU
    held = [*session.model.parameters(), *session.model.buffers()]
    assert {tensor.is_cuda for tensor in held if not tensor.is_meta} == {True}


# the model alone, and all of it; in the second case the script moves ids, too
@pytest.mark.parametrize("everything", [False, True])
def test_a_session_on_a_gpu_leaves_what_one_without_kills_leaves(on_cpu, everything, gpu):
    """On an imitated GPU it is what one on the CPU leaves."""
    train = partial(
        train_two_tower,
        steps=STEPS,
        prepare=is_there,
        device=IMITATED_GPU,
        # on a real GPU torchrec needs FBGEMM's build for CUDA to compute with them
        moves_ids=everything and gpu.is_imitated,
    )
    layout = Layout(spares=2, gpu=everything)
    calm = on_cpu if gpu.is_imitated else run((), layout, train, on_gpu=gpu)
    left = run(FAULTS, layout, train, on_gpu=gpu)
    assert left.deaths == 2
    assert (left.tables, left.dense, left.logged) == (calm.tables, calm.dense, calm.logged)


def test_state_goes_between_cpu_and_gpu(gpu):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def replica(device):
        module = model()
        move(module, device)
        return ModuleReplica(module, lambda ps: torch.optim.Adam(ps, lr=0.1), device=device)

    def step(held):
        held.begin_slot(0)
        held.module(torch.arange(6.0).view(2, 3).to(held.device)).sum().backward()
        part, state = held.contribution(2.0), held.slot_state(leads=True)
        assert part.is_cpu and state.is_cpu
        held.apply(part, {0: state})
        held.commit()
        return [tensor.clone() for tensor in held.state_tensors]

    with gpu.used() as device:
        one, other = replica(CPU), replica(device)
        step(one), step(other)
        for giver, taker in ((one, device), (other, device), (other, CPU)):
            heir = replica(taker)
            exported = giver.export()
            assert all(type(tensor) is torch.Tensor for tensor in exported)
            heir.load(exported)
            moments = heir.optimizer.state[heir.parameters[0]]
            assert moments["exp_avg"].device == taker and moments["step"].is_cpu
            # the CPU's bits are those of an imitated GPU alone
            twin = replica(CPU if gpu.is_imitated else taker)
            expected = step(replica_of(giver, twin))
            assert all(map(torch.equal, step(heir), expected))


def replica_of(giver, heir):
    heir.load(giver.export())
    return heir


def test_what_is_left_on_the_host_is_refused_by_the_device():
    with imitated_gpu() as gpu:
        module = nn.Linear(2, 1)
        move(module, gpu)
        with pytest.raises(HostMemoryExpected, match="linear of tensors on cuda:0"):
            module(torch.ones(1, 2))


def test_moving_keeps_parameters_and_what_is_shared(gpu):
    module, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    other.weight, other.running_mean = module.weight, module.running_mean
    both, weight = nn.Sequential(module, other), module.weight
    with gpu.used() as device:
        move(both, device)
        assert module.weight is weight is other.weight and weight.is_cuda
        assert module.running_mean is other.running_mean and module.running_mean.is_cuda
        assert isinstance(weight, nn.Parameter) and weight.requires_grad


def test_a_rank_refuses_another_device_than_its_own(monkeypatch):
    def device_on_a_rank(wanted, where):
        imitated = str(where == "cuda").lower()
        typed = [f"train.device={where}", "data.path=x", f"testing.imitated_gpu={imitated}"]
        this = SimpleNamespace(spec=SimpleNamespace(config=load_config("tiny", typed)))
        monkeypatch.setattr(device, "is_rank", lambda: True)
        monkeypatch.setattr(device, "this_rank", lambda: this)
        return session_device(wanted)

    for same in (None, "cuda", "cuda:0", torch.device("cuda")):
        assert device_on_a_rank(same, "cuda") == IMITATED_GPU
    for same in (None, "cpu", "cpu:0"):
        assert device_on_a_rank(same, "cpu") == CPU
    told = r"device='cuda:1'\), but this rank has cuda:0: .*: type Session\(device='cuda'\)$"
    with pytest.raises(UsageError, match=told):
        device_on_a_rank("cuda:1", "cuda")
    with pytest.raises(UsageError, match="but train.device is cuda: leave the argument out"):
        device_on_a_rank("cpu", "cuda")


def test_a_device_that_is_not_there_is_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="^Session\\(device='cuda'\\): torch .* cannot use it: "):
        session_device("cuda")
