"""A replica of any module steps as torch does over the mean of its slots, and undoes all of it."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from ecrm.base.errors import UsageError
from ecrm.model.module_replica import ModuleReplica

SLOTS, BATCH, WIDTH = 2, 24, 12


class Net(nn.Module):
    """Has a shared parameter, a frozen one, unused ones, one used now and then, and buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 17)
        self.norm = nn.BatchNorm1d(17)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(17, 17, bias=False)
        self.again = nn.Linear(17, 17)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.now_and_then = nn.Parameter(torch.ones(17))
        self.last = nn.Linear(17, 1)
        self.register_buffer("average", torch.zeros(17))
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)
        self.register_buffer("nothing", None)
        self.table = nn.Parameter(torch.empty(100, 4, device="meta"))

    def forward(self, x, seldom=False):
        x = self.drop(self.norm(self.first(x)).relu())
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)  # another tensor each time
        x = self.frozen(self.again(self.tied(x)))
        return self.last(x * self.now_and_then if seldom else x).squeeze(1)


def build(seed=0, kind=Net):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def two_groups(parameters):
    few, many = parameters[:3], parameters[3:]
    return torch.optim.Adam([{"params": few, "lr": 0.1}, {"params": many}], lr=0.01, amsgrad=True)


def cosine(optimizer):
    return CosineAnnealingLR(optimizer, 8)


def warm(optimizer):
    return SequentialLR(
        optimizer,
        [LambdaLR(optimizer, lambda step: (step + 1) / 4), CosineAnnealingLR(optimizer, 8)],
        milestones=[3],
    )


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=12)


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.1)


RECIPES = [
    (momentum, None, None),
    (adam, cosine, clip),
    (two_groups, warm, None),
    (momentum, one_cycle, clip),
    (torch.optim.Adagrad, None, clip),
]


def make(recipe=RECIPES[1], module=None, **more):
    optimizer, scheduler, before_step = recipe
    return ModuleReplica(module or build(), optimizer, scheduler, before_step, **more)


def loss_of(module, step, slot):
    generator = torch.Generator().manual_seed(100 * step + slot)
    x = torch.randn(BATCH, WIDTH, generator=generator) + slot
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    torch.manual_seed(1000 * step + slot)  # dropout
    return binary_cross_entropy_with_logits(module(x, seldom=step % 3 == 1 and slot == 1), labels)


def step_of(replica, step, loss_of=loss_of):
    """One step, with slots run in another order than theirs."""
    contributions, states = {}, {}
    for slot in reversed(range(SLOTS)):
        replica.begin_slot(slot)
        loss_of(replica.module, step, slot).backward()
        contributions[slot] = replica.contribution(SLOTS)
        state = replica.slot_state(slot == 0)
        if state is not None:
            states[slot] = state
    total = sum(contributions[slot] for slot in range(SLOTS))
    replica.apply(total, states)
    return states


def bits(replica):
    return {name: tensor.clone() for name, tensor in replica.named_state.items()}


def same(one, other):
    assert one.keys() == other.keys() and len(one) > 10
    return all(
        torch.equal(tensor.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8))
        for name, tensor in one.items()
    )


def plain_steps(recipe, steps):
    """What a plain loop makes of it: a mean of the gradients of two slots; buffers of slot 0."""
    module = build()
    make_optimizer, make_scheduler, before_step = recipe
    trained = [p for p in module.parameters() if p.requires_grad and not p.is_meta]
    optimizer = make_optimizer(trained)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    for step in range(steps):
        gradients, buffers = [], []
        began = {name: b.clone() for name, b in module.named_buffers()}
        for slot in range(SLOTS):
            for name, buffer in began.items():
                owner, _, key = name.rpartition(".")
                setattr(module.get_submodule(owner), key, buffer.clone())
            module.zero_grad()
            loss_of(module, step, slot).backward()
            gradients.append([p.grad for p in trained])
            buffers.append({name: b.clone() for name, b in module.named_buffers()})
        for name, buffer in buffers[0].items():
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, buffer.clone())
        for parameter, of_slots in zip(trained, zip(*gradients, strict=True), strict=True):
            there = [gradient for gradient in of_slots if gradient is not None]
            parameter.grad = sum(there) / SLOTS if there else None
        if before_step:
            before_step(trained)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return module, optimizer


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_of_a_plain_loop_to_the_bit(recipe):
    module, optimizer = plain_steps(recipe, 7)
    replica = make(recipe)
    for step in range(7):
        step_of(replica, step)
    ours = dict(replica.module.named_parameters())
    for name, theirs in module.named_parameters():
        assert theirs.is_meta or torch.equal(ours[name], theirs), name
    ours = dict(replica.module.named_buffers())
    for name, theirs in module.named_buffers():
        assert torch.equal(ours[name], theirs), name
    assert int(ours["norm.num_batches_tracked"]) == 7
    ours = replica.optimizer.state_dict()
    assert str(ours["param_groups"]) == str(optimizer.state_dict()["param_groups"])
    assert str(ours["state"]) == str(optimizer.state_dict()["state"])
    # a parameter without a gradient is left alone, also by weight decay
    assert torch.equal(replica.module.unused.weight, build().unused.weight)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("committed", [0, 3])
def test_undo_in_the_middle_of_a_step_equals_never_having_stepped(recipe, committed):
    calm, ours = make(recipe), make(recipe)
    module, parameters = ours.module, list(ours.module.parameters())
    for step in range(committed):
        step_of(calm, step)
        step_of(ours, step)
    ours.commit()
    then, lrs = bits(ours), [group["lr"] for group in ours.optimizer.param_groups]
    step_of(ours, committed)
    step_of(ours, committed + 1)
    ours.begin_slot(0)
    loss_of(ours.module, 9, 0).backward()  # a third begins
    assert not torch.equal(then["first.weight"], bits(ours)["first.weight"])
    ours.undo()
    ours.undo()
    assert same(then, bits(ours))
    assert [group["lr"] for group in ours.optimizer.param_groups] == lrs
    for step in range(committed, committed + 4):
        step_of(calm, step)
        step_of(ours, step)
    assert same(bits(calm), bits(ours))
    assert str(calm.optimizer.state_dict()) == str(ours.optimizer.state_dict())
    assert ours.module is module
    assert all(a is b for a, b in zip(ours.module.parameters(), parameters, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_replica_goes_on_from_the_exported_state_to_the_bit(recipe):
    ours, heir = make(recipe), make(recipe, build(seed=5))
    for step in range(3):
        step_of(ours, step)
    ours.commit()
    committed = bits(ours)
    step_of(ours, 3)
    for step in range(2):
        step_of(heir, step + 7)
    heir.load([tensor.clone() for tensor in ours.export()])
    assert same(committed, bits(heir))
    step_of(heir, 3)
    assert same(bits(ours), bits(heir)) and not same(committed, bits(heir))
    present, exported = ours.present(), ours.export()
    assert torch.equal(heir.export()[0], exported[0])
    assert not torch.equal(present[0], exported[0])
    heir.undo()
    assert same(committed, bits(heir))
    heir.load(present)
    assert same(bits(ours), bits(heir))


def test_the_start_and_the_module_alone():
    ours, other = make(), make(RECIPES[0], build(seed=5))
    began = bits(ours)
    for step in range(3):
        step_of(ours, step)
        step_of(other, step)
    other.commit()
    ours.commit()
    assert ours.reset() is ours and same(began, bits(ours))
    calm = make()
    step_of(calm, 0)
    step_of(ours, 0)
    assert same(bits(calm), bits(ours))
    ours.load(other.export()[:1])
    theirs = bits(other)
    assert ours.named_state.keys() == began.keys(), "the optimizer begins anew"
    assert all(torch.equal(t, theirs[name]) for name, t in ours.named_state.items())
    assert ours.scheduler.last_epoch == 0


def test_buffers_travel_exactly_and_only_those_that_change():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.tensor(2**62 + 1))
            self.register_buffer("bf16", torch.zeros(3, dtype=torch.bfloat16))
            self.register_buffer("constant", torch.arange(1000.0))
            self.register_buffer("zero", torch.zeros(()))

        def forward(self, slot):
            self.seen += 3
            self.bf16 += 0.1
            self.zero.neg_()  # other bits of an equal number
            return (self.weight * slot).sum()

    replica = make((momentum, None, None), Counting())
    for step in range(1, 4):
        sent = step_of(replica, step, lambda module, step, slot: module(slot))
        assert sent.keys() == {0} and len(sent[0]) < 500
        assert int(replica.module.seen) == 2**62 + 1 + 3 * step
        assert bool(replica.module.zero.signbit()) == (step % 2 == 1)
    assert replica.slot_state(True) is None, "nothing has changed since"
    replica.undo()
    assert int(replica.module.seen) == 2**62 + 1


def test_the_states_of_streams_are_undone_and_carried_like_the_rest():
    def apply(replica, states):
        sent = {}
        for slot, state in states.items():
            replica.begin_slot(slot)
            loss_of(replica.module, 0, slot).backward()
            stream = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            sent[slot] = replica.slot_state(False, stream)
        replica.apply(replica.contribution(1), sent)

    def told(replica):
        return {slot: bytes(state.tolist()) for slot, state in replica.streams.items()}

    replica, other = make(), make()
    apply(replica, {0: b"one", 2: b"two"})
    replica.commit()
    apply(replica, {0: b"later"})
    assert told(replica) == {0: b"later", 2: b"two"}
    replica.undo()
    assert told(replica) == {0: b"one", 2: b"two"}
    other.load(replica.export())
    assert told(other) == told(replica)
    other.load(replica.export()[:1])  # the weights alone: streams begin anew
    assert told(other) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_summed_in_32(dtype):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Parameter(torch.ones(5, dtype=dtype))
            self.large = nn.Parameter(torch.ones(5))

        def forward(self, step, slot):
            return self.small.float().sum() * (1.0, 2**-10)[slot] + self.large.sum() * slot

    replica = make((lambda ps: torch.optim.SGD(ps, lr=1.0), None, None), Two())
    seen = []
    replica._before_step = lambda ps: seen.append([p.grad.clone() for p in ps])
    step_of(replica, 0, lambda module, step, slot: module(step, slot))
    small, large = seen[0]
    assert small.dtype == dtype and torch.equal(small, torch.full((5,), 0.50048828125).to(dtype))
    assert torch.equal(large, torch.full((5,), 0.5))
    assert replica.module.small.dtype == dtype
    committed = replica.export()
    replica.commit()
    assert not torch.equal(committed[0], replica.export()[0])
    assert all(tensor.numpy().dtype.kind in "iuf" for tensor in replica.state_tensors)


class Average:
    """An average of weights, whose state is live tensors."""

    def __init__(self, module):
        self._module = module
        self.values = [p.detach().clone() for p in module.first.parameters()]

    def update(self):
        for value, parameter in zip(self.values, self._module.first.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.25)

    def state_dict(self):
        return {"values": self.values, "kind": "ema"}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_registered_objects_are_undone_and_given_to_others():
    ours, heir = make(), make(module=build(seed=3))
    averages = [Average(replica.module) for replica in (ours, heir)]
    for replica, average in zip((ours, heir), averages, strict=True):
        replica.register("average", average)
    first, began = averages[0], [value.clone() for value in averages[0].values]
    step_of(ours, 0)
    first.update()
    assert not torch.equal(first.values[0], began[0])
    ours.undo()
    assert all(torch.equal(a, b) for a, b in zip(first.values, began, strict=True))
    step_of(ours, 0)
    first.update()
    ours.commit()
    heir.load(ours.export())
    assert all(torch.equal(a, b) for a, b in zip(*(a.values for a in averages), strict=True))
    averages[1].values[0].add_(1)  # shares nothing with what was committed
    heir.undo()
    assert torch.equal(averages[1].values[0], first.values[0])
    with pytest.raises(UsageError, match="registered already"):
        ours.register("average", first)
    with pytest.raises(UsageError, match="without state_dict"):
        ours.register("other", object())
    with pytest.raises(UsageError, match="registered objects \\['average'\\]"):
        make().load(ours.export())


def test_a_schedule_counts_skipped_steps_and_torch_does_not_warn_of_them():
    module = nn.Linear(2, 1)
    replica = ModuleReplica(
        module,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replica.skip()
        replica.skip()
    assert replica.optimizer.param_groups[0]["lr"] == 0.25


def test_a_state_that_is_not_finite_is_told():
    replica = make()
    step_of(replica, 0)
    good = replica.present()
    assert replica.is_finite(good), "the infinities of a mask do not count"
    state = replica.optimizer.state[replica.module.first.weight]["exp_avg"]
    for spoilt, value in [
        (replica.module.first.weight, torch.inf),
        (replica.module.norm.running_mean, torch.nan),
        (state, torch.inf),
    ]:
        replica.load(good)
        with torch.no_grad():
            spoilt.view(-1)[3] = value
        replica._buffers["norm.running_mean"].copy_(replica.module.norm.running_mean)
        assert not replica.is_finite(replica.present())
    replica.load(good)
    assert replica.is_finite(replica.export())


def test_a_module_that_trains_nothing_needs_no_optimizer():
    replica = ModuleReplica(build().requires_grad_(False), None)
    for slot in range(SLOTS):
        replica.begin_slot(slot)
        loss_of(replica.module, 0, slot)
    assert replica.contribution(SLOTS).shape == (0,)
    replica.begin_slot(0)
    loss_of(replica.module, 0, 0)
    state = replica.slot_state(True)
    replica.apply(torch.zeros(0), {0: state})
    assert int(replica.module.norm.num_batches_tracked) == 1
    replica.commit()
    assert torch.equal(replica.export()[0], replica.present()[0])


def another(change):
    class Changed(Net):
        def __init__(self):
            super().__init__()
            change(self)

    return build(kind=Changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "last", nn.Linear(17, 2)), r"last.weight is \[1, 17\] .* \[2, 17\]"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), "it has no more.weight"),
        (lambda m: delattr(m, "unused"), "it has unused.weight, which"),
        (lambda m: m.last.to(torch.bfloat16), "last.weight is .* torch.float32 there"),
        (lambda m: m.register_buffer("more", torch.ones(1)), "it has no more"),
    ],
)
def test_the_state_of_another_model_is_refused_by_the_tensor_that_differs(change, said):
    with pytest.raises(UsageError, match=said):
        make(module=another(change)).load(make().export())


def test_what_cannot_be_trained_is_refused_at_once():
    with pytest.raises(UsageError, match="no dense optimizer"):
        ModuleReplica(build(), None).check_optimizer()
    with pytest.raises(UsageError, match=r"now_and_then is torch.float64"):
        make(module=build().double())
    with pytest.raises(UsageError, match="has no shape yet"):
        make(module=nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"shape \[7\] that is not the module's"):
        make((lambda ps: torch.optim.SGD([*ps, nn.Parameter(torch.ones(7))], lr=1), None, None))
    with pytest.raises(UsageError, match=r"LBFGS.step needs a closure, .* by gradients alone"):
        make((torch.optim.LBFGS, None, None))

    class Strange:
        def state_dict(self):
            return {"value": random.Random()}

        def load_state_dict(self, state):
            pass

    with pytest.raises(UsageError, match=r"registered strange\.value cannot be .* random\.Random"):
        make(extra={"strange": Strange()})


def test_what_only_shows_in_a_step_is_refused_there():
    replica = make()
    replica.begin_slot(0)
    replica.module.frozen.requires_grad_(True)
    loss_of(replica.module, 0, 0).backward()
    with pytest.raises(UsageError, match="frozen.weight has a gradient"):
        replica.contribution(SLOTS)

    class Keeping(torch.optim.SGD):
        def step(self):
            super().step()
            for group in self.param_groups:
                group["seen"] = random.Random()

    replica = make((lambda ps: Keeping(ps, lr=0.1), None, None))
    with pytest.raises(UsageError, match=r"optimizer group 0\.seen cannot be read back"):
        step_of(replica, 0)

    class Registering(nn.Linear):
        def forward(self, x):
            self.register_buffer("late", x.detach())
            return super().forward(x)

    replica = make((momentum, None, None), Registering(2, 1))
    replica.begin_slot(1)
    replica.module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="buffer late came or went"):
        replica.slot_state(False)


def test_nothing_that_is_committed_is_shared_with_what_is_live():
    replica = make(RECIPES[2])
    step_of(replica, 0)
    replica.commit()
    before = [tensor.clone() for tensor in replica.export()]
    for tensor in replica.state_tensors:
        if tensor.is_floating_point():
            tensor.add_(1)
    for group in replica.optimizer.param_groups:
        group["betas"], group["lr"] = (0.5, 0.5), 7.0
    assert all(torch.equal(a, b) for a, b in zip(before, replica.export(), strict=True))
    replica.undo()
    assert all(torch.equal(a, b) for a, b in zip(before, replica.present(), strict=True))
    assert replica.memory_bytes > 3 * sum(p.nbytes for p in replica.parameters)


def test_the_state_of_another_optimizer_is_refused():
    theirs, ours = (
        ModuleReplica(nn.Linear(2, 1), make)
        for make in (lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: torch.optim.Adam(ps))
    )
    with pytest.raises(UsageError, match="is another optimizer's: its numbers are dampening"):
        ours.load(theirs.export())


def test_streams_are_loaded_only_where_the_data_is_streams():
    def replica() -> ModuleReplica:
        return ModuleReplica(nn.Linear(2, 1), lambda ps: torch.optim.SGD(ps, lr=0.1))

    first, with_them, without = replica(), replica(), replica()
    first.streams = {0: torch.empty(0, dtype=torch.uint8)}
    first.commit()
    without.with_streams = False
    for other in with_them, without:
        other.load(first.export())
    assert with_them.over and with_them.streams.keys() == {0}
    assert not without.over and not without.streams
