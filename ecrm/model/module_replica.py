"""A replica of any torch module with its optimizer and scheduler, which can undo steps in place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.device.copies import on_device, on_host
from ecrm.model.buffers import live_buffers, put_buffers
from ecrm.model.loss_scaler import LossScaler
from ecrm.model.nested_state import (
    check_readable,
    leaves,
    off_meta,
    on_meta,
    packed,
    placed,
    read,
    same_bits,
    unpacked,
    written,
)
from ecrm.model.optimizer_state import OptimizerState
from ecrm.model.replica_refusals import (
    FREEZE,
    FREEZE_ROWS,
    check_buffers,
    check_fits,
    check_own_memory,
    check_parameters,
    check_rest,
    check_steps_alone,
)
from ecrm.model.undo_trial import UndoTrial

_STREAM, _ENDS = "", "."
"""The name of a stream's state among sent buffers; no buffer has this name."""
_AT = 16
"""Gradients begin at multiples of 16 floats, so that their addresses are aligned like tensors."""


class Stateful(Protocol):
    """Anything whose state can be taken and given back, such as an average of weights."""

    def state_dict(self) -> Any:
        """Nested state of tensors and numbers, possibly live."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state of `state_dict`; the object may keep the state."""


class ModuleReplica:
    """Holds a module, an optimizer over the module and a scheduler, equal on every holder.

    `module` and its parameters stay the same objects: every change is made in place. Trained
    parameters are the parameters with `requires_grad`, outside the meta device: the arguments of
    `make_optimizer` and `before_step`. `before_step` is called just before the optimizer's step,
    with the summed gradients. Without trained parameters no optimizer is needed. `extra` are
    further objects by name, undone and sent to new holders like the rest. `scaler` scales the
    losses of slots.

    The state is everything held by the module, the optimizer (see `OptimizerState`), the scheduler
    and the extra objects, frozen parameters included. Meta tensors and sparse buffers are left out.

    A slot begins with `begin_slot`; after the backward pass, the slot sends `contribution` and
    `slot_state`. A slot's loss is a mean over the slot's samples: gradients are divided by the
    number of slots and summed. Every slot begins with the same buffers, and the buffers at the end
    of the leading slot count, as in torch's DistributedDataParallel. `streams` are carried for the
    slots, unread.

    The module is on `device`. Messages of slots and exported state are on the CPU.

    Raises UsageError for a model or an optimizer unfit for this training.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
        make_scheduler: Callable[[Optimizer], Any] | None = None,
        before_step: Callable[[list[nn.Parameter]], object] | None = None,
        extra: Mapping[str, Stateful] = MappingProxyType({}),
        scaler: LossScaler | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.module, self._before_step, self._scaler = module, before_step, scaler
        self.device = device
        named = {name: p for name, p in module.named_parameters() if not p.is_meta}
        self._all = named
        self._trained = {name: p for name, p in named.items() if p.requires_grad}
        self._asked_for = {name: (p, p.requires_grad) for name, p in module.named_parameters()}
        check_parameters(named, self._trained, device)
        check_buffers(live_buffers(module), named)
        self._starts, self._flags_at = [], 0
        for parameter in self._trained.values():
            self._starts.append(self._flags_at)
            self._flags_at += -(-parameter.numel() // _AT) * _AT
        self.optimizer = (
            make_optimizer(self.parameters) if make_optimizer and self._trained else None
        )
        self._optimizer_state = OptimizerState(
            self.optimizer, {id(p): name for name, p in module.named_parameters()}
        )
        for optimizer in self._optimizer_state.optimizers:
            check_steps_alone(optimizer)
        self.scheduler = (
            make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        )
        self._extra: dict[str, Stateful] = dict(extra)
        if scaler is not None:
            self._extra["grad_scaler"] = scaler.scaler
        self.with_streams = True
        """Whether streams are loaded with the rest; False once the data has no streams any more."""
        self.streams: dict[int, Tensor] = {}
        """By slot, uint8 [N]: the state of the slot's data before the present step."""
        self.skipped = 0
        """Number of skipped steps, part of the state."""
        self.ends_at = -1
        """The step before which training ends, part of the state; -1 for no end."""
        self.reports: Mapping[str, Any] = {}
        """The values reported by evaluations, part of the state, as nested dicts."""
        self.goes_on_from = -1
        """A loaded end of training at this step or before is forgotten: a config's run goes on."""
        self.tries_undo: Callable[[], bool] = lambda: False
        """Whether to undo and repeat this step, if it follows a commit, as a test of undo."""
        self.trial = UndoTrial(
            module,
            lambda: self.entries,
            self.undo,
            self._things_of_steps,
            lambda: self._optimizer_state.kept,
        )
        self.used_by_steps: Mapping[str, object] = {}
        """Further objects that a step may change, by name, such as the user's before_step."""
        self._at_commit = True
        self._noted: dict[str, Tensor] | None = None
        self._readable: set[type] = set()  # types of values known to be readable
        self._has_stepped = False
        self.start_here()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the module's order."""
        return list(self._trained.values())

    @property
    def versions(self) -> int:
        """A number that grows with every in-place change of a parameter."""
        return sum(parameter._version for parameter in self._all.values())

    @property
    def changed(self) -> bool:
        """Whether a parameter has changed since `note`, or without a note since the last commit.

        A step and an undo forget the note.
        """
        before = self._saved["parameters"] if self._noted is None else self._noted
        return any(not same_bits(p.detach(), before[name]) for name, p in self._all.items())

    @property
    def changed_buffer(self) -> str:
        """The first buffer that differs from the agreed buffers; "" for none."""
        live = live_buffers(self.module)
        return next((n for n, b in live.items() if not _same(b, self._buffers.get(n))), "")

    def note(self) -> None:
        """Make `changed` compare with the present parameters."""
        self._noted = placed(self._all)

    @property
    def numbers(self) -> list[tuple[str, Any]]:
        """(name, value) of the numbers in the optimizer's groups, such as learning rates."""
        return [
            (f"{_which(number)} group {name}", value)
            for number, groups in enumerate(self._optimizer_state.groups())
            for name, value in leaves(groups)
        ]

    @property
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The present gradients of trained parameters, by name."""
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def check_parameters(self) -> None:
        """Raise UsageError if a parameter came, went or was replaced after the replica was made."""
        now = {name: p for name, p in self.module.named_parameters() if not p.is_meta}
        for name in now.keys() | self._all.keys():
            if now.get(name) is not self._all.get(name):
                raise UsageError(
                    f"parameter {name} came, went or was replaced after the session was made, "
                    "which trains those of before: change the model before Session(model, ...)"
                )

    @property
    def steps_by_reports(self) -> bool:
        """Whether the scheduler steps by the reports of evaluations, not with each step."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def report(self, value: float, reports: Mapping[str, Any]) -> None:
        """Step the scheduler by `value` if `steps_by_reports`; keep `reports`. A commit follows.

        A NaN is no value, and steps nothing.
        """
        if self.scheduler is not None and self.steps_by_reports and not math.isnan(value):
            self.scheduler.step(value)
        self.reports = reports

    def check_optimizer(self) -> None:
        """Raise UsageError if the module has trained parameters but no optimizer."""
        if self._trained and self.optimizer is None:
            raise UsageError(
                f"the model trains {len(self._trained)} parameters and has no dense optimizer: "
                "give one, such as lambda parameters: torch.optim.Adam(parameters)"
            )

    def check_frozen(self, where: str) -> None:
        """Raise UsageError if a parameter or table was frozen or unfrozen since the replica began.

        A rank taking a slot over would not know of the change.
        """
        asked = self._asked_for.items()
        with torch._C.DisableTorchFunctionSubclass():  # asking a stand-in takes 20 us
            changed = next((n for n, (p, trained) in asked if p.requires_grad != trained), None)
        if changed is not None:
            parameter, trained = self._asked_for[changed]
            raise UsageError(
                f"{where}: {changed} was {'frozen' if trained else 'unfrozen'} after the session "
                "was made",
                otherwise=FREEZE_ROWS if parameter.is_meta else FREEZE,
            )

    def start_here(self) -> None:
        """Take the present state as the start, and as committed.

        For use before the first step, if the module was changed after the replica was made.
        """
        self._buffers = placed(live_buffers(self.module))  # at the begin of the present step
        live = self._live()
        self._check_readable(live["rest"])
        self._saved = placed(live)
        self._start = placed(self._saved)

    def reset(self) -> ModuleReplica:
        """Go back to the start and commit; returns this replica."""
        self._put(self._start)
        self.commit()
        return self

    def register(self, name: str, extra: Stateful) -> None:
        """Have a further object's state undone and carried with the rest.

        The object's present state is taken as committed, and as the start.
        """
        if name in self._extra:
            raise UsageError(f"{name!r} is registered already: give each object a name of its own")
        if not all(hasattr(extra, method) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{name!r} is a {type(extra).__name__} without state_dict and load_state_dict: "
                "an object with both can be registered"
            )
        state = off_meta(extra.state_dict())
        check_readable({name: state}, "registered")
        self._extra[name] = extra
        for kept in self._saved, self._start:
            kept["rest"]["extra"][name] = placed(state)

    @property
    def memory_bytes(self) -> int:
        held = (self._live(), self._saved, self._start)
        return sum(_bytes(state) for state in held)

    @property
    def over(self) -> bool:
        """Whether the streams of all slots have ended."""
        return bool(self.streams) and not any(map(torch.numel, self.streams.values()))

    def end_at(self, step: int) -> None:
        """As in `ecrm.engine.dense.DenseReplica`."""
        if self.ends_at < 0 or step < self.ends_at:
            self.ends_at = self._saved["rest"]["ends_at"] = step

    def begin_slot(self, slot: int) -> None:
        """Before a slot's forward: drop gradients, and restore the buffers of the step's begin."""
        self._drop_gradients()
        put_buffers(self.module, self._buffers)

    @property
    def loss_scale(self) -> float:
        """The factor of losses in this step."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def scaler_calls(self) -> int | None:
        """The number of the scaler's `scale` calls so far; None without a scaler."""
        return None if self._scaler is None else self._scaler.calls

    def contribution(self, divisor: float) -> Tensor:
        """The gradients since `begin_slot`, divided: by slots and `loss_scale`; float32 [P + n].

        P counts the gradients of all trained parameters, each padded to a multiple of 16 floats; a
        missing gradient is zeros. Then come n flags, one per parameter: whether the parameter has a
        gradient. The result is a copy. Raises UsageError if a parameter not trained has a gradient.
        """
        size = self._flags_at + len(self._trained)
        flat = torch.zeros(size, device=self.device)
        for parameter, part in self._parts(flat):
            if parameter.grad is not None:
                gradient = parameter.grad
                part.copy_(gradient if gradient.layout == torch.strided else gradient.to_dense())
        if divisor != 1:
            flat[: self._flags_at].div_(divisor)
        (flat,) = on_host(flat)
        flags = [float(parameter.grad is not None) for parameter in self._trained.values()]
        flat[self._flags_at :] = torch.tensor(flags)
        for name, parameter in self._all.items():
            if name not in self._trained and parameter.grad is not None:
                raise UsageError(
                    f"parameter {name} has a gradient, but it was frozen when training began: "
                    "set requires_grad before that; a learning rate of 0 rests it until then"
                )
        return flat

    def flags_of(self, contribution: Tensor) -> dict[str, bool]:
        """Whether a contribution has a gradient of each trained parameter, by name."""
        flags = contribution[self._flags_at :].bool().tolist()
        return dict(zip(self._trained, flags, strict=True))

    def parts_of(self, contribution: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name of a trained parameter, its part of a contribution), in the module's order."""
        for name, (_, part) in zip(self._trained, self._parts(contribution), strict=True):
            yield name, part

    def _parts(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(trained parameter, its part of a contribution as a view in the parameter's shape)."""
        for start, parameter in zip(self._starts, self._trained.values(), strict=True):
            yield parameter, flat[start : start + parameter.numel()].view(parameter.shape)

    def slot_state(
        self, leads: bool, stream: Tensor | None = None, ends_at: int = -1
    ) -> Tensor | None:
        """The message of a slot besides gradients, uint8 [N]; None if empty.

        If the slot `leads`, the message has the buffers changed by the forward. The message also
        has the state of the slot's `stream` after this step, uint8 [N], if given, and the step
        before which the slot wants training to end, if `ends_at` is not negative. Raises UsageError
        if the forward has added or removed a buffer.
        """
        live = live_buffers(self.module)
        for name in live.keys() ^ self._buffers.keys():
            raise UsageError(
                f"buffer {name} came or went in the forward: register it in the module's __init__"
            )
        sent = {
            name: buffer
            for name, buffer in live.items()
            if leads and not _same(buffer, self._buffers[name])
        }
        if stream is not None:
            sent[_STREAM] = stream
        if ends_at >= 0:
            sent[_ENDS] = torch.tensor(ends_at)
        return packed(sent) if sent else None

    def apply(self, total: Tensor, states: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Take one step with the sum of all contributions; `states` are from `slot_state`, by slot.

        A parameter without a gradient in any slot has None as gradient: optimizers leave it alone.
        """
        if self._at_commit and self.tries_undo():
            self.trial.run(
                lambda: self._take_step(total.clone(), states),
                lambda: self._take_step(total, states),
            )
        else:
            self._take_step(total, states)
        self._check_stepped()

    def _things_of_steps(self) -> dict[str, object]:
        """The objects that a step may change, by name."""
        extra = {name: each for name, each in self._extra.items() if name != "grad_scaler"}
        return {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            **extra,
            **self.used_by_steps,
        }

    def _take_step(self, total: Tensor, states: Mapping[int, Tensor]) -> None:
        self._begin_step(states)
        flags = total[self._flags_at :].tolist()
        total = on_device(self.device, total)
        for (parameter, part), flag in zip(self._parts(total), flags, strict=True):
            if flag:
                parameter.grad = part.to(parameter.dtype)
        self._step()
        self._end_step(skipped=False)

    def _check_stepped(self) -> None:
        """Raise UsageError if a step has left state that no other rank can read.

        All types of values in parameter state appear by the first step; a schedule may add types
        later.
        """
        if self._has_stepped:
            groups = [{"groups": each, "state": {}} for each in self._optimizer_state.groups()]
            scheduler = None if self.scheduler is None else self.scheduler.state_dict()
            self._check_readable({"optimizers": groups, "scheduler": scheduler})
        else:
            self._has_stepped, self._readable = True, set()
            self._check_readable(self._live()["rest"])
            check_own_memory(
                leaves([each["state"] for each in self._optimizer_state.live()]), self._all
            )

    def _check_readable(self, rest: Mapping[str, Any]) -> None:
        """Raise UsageError for state that no other rank can read.

        State with only types known to be readable is not tried.
        """
        kinds: set[type] = set()
        for name, state in _named(rest):
            found = {type(value) for _, value in leaves(state)}
            if not self._readable or not found <= self._readable:
                check_readable(state, name)
            kinds |= found
        self._readable |= kinds

    def _step(self) -> None:
        """Step with the present gradients."""
        if self._before_step is not None:
            self._before_step(self.parameters)
            self._buffers = placed(live_buffers(self.module), self._buffers)
        if self.optimizer is not None:
            self.optimizer.step()

    def skip(self, states: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Skip a step because a gradient is not finite; buffers and the scheduler still go on."""
        self._begin_step(states)
        self._end_step(skipped=True)
        self.skipped += 1

    def _begin_step(self, states: Mapping[int, Tensor]) -> None:
        self._at_commit = False
        for slot, state in sorted(states.items()):
            named = unpacked(state)
            stream, ends = named.pop(_STREAM, None), named.pop(_ENDS, None)
            if ends is not None:
                self.ends_at = int(ends)
            if stream is not None:
                self.streams[slot] = stream
            self._buffers.update(self._here(named))
        put_buffers(self.module, self._buffers)
        self._drop_gradients()
        self._noted = None

    def _end_step(self, skipped: bool) -> None:
        if self._scaler is not None:
            self._scaler.update(skipped)
        if self.scheduler is not None and not self.steps_by_reports:
            with warnings.catch_warnings() if skipped else nullcontext():
                if skipped:  # torch warns if a schedule begins before its optimizer
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.scheduler.step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._all.values():
            parameter.grad = None

    def _here(self, named: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Tensors on the module's device."""
        return {name: None if t is None else on_device(self.device, t) for name, t in named.items()}

    def commit(self) -> None:
        self._saved = placed(self._live(), self._saved)
        self._at_commit = True

    def undo(self) -> None:
        self._put(self._saved)

    def export(self) -> list[Tensor]:
        """Two uint8 tensors of the committed state: `packed` parameters and buffers, then the rest.

        The first tensor alone is the state of the module, for a run that begins with its weights.
        """
        return self._exported(self._saved)

    def present(self) -> list[Tensor]:
        return self._exported(self._live())

    def _exported(self, state: dict[str, Any]) -> list[Tensor]:
        self._check_readable(state["rest"])
        return [packed({**state["parameters"], **state["buffers"]}), written(state["rest"])]

    def is_finite(self, state: Sequence[Tensor]) -> bool:
        """Whether parameters and optimizer state are finite, and no buffer has a NaN.

        Infinities in buffers are allowed: masks are made of infinities.
        """
        module, rest, *_ = state
        for name, tensor in unpacked(module).items():
            if tensor is not None and tensor.is_floating_point():
                bad = ~tensor.isfinite() if name in self._all else tensor.isnan()
                if bad.any():
                    return False
        numbers = (
            tensor
            for optimizer in read(rest)["optimizers"]
            for _, tensor in leaves(optimizer["state"])
            if isinstance(tensor, Tensor) and tensor.is_floating_point()
        )
        return all(bool(tensor.isfinite().all()) for tensor in numbers)

    def load(self, state: Sequence[Tensor]) -> None:
        """Take an exported state, in place, and commit. Raises UsageError for unfit state.

        A single tensor is parameters and buffers alone: the rest is then as at the start.
        """
        module = self._here(unpacked(state[0]))
        check_fits(module, {**self._all, **self._buffers}, set(self._all))
        self._put(
            {
                "parameters": {name: module.pop(name) for name in self._all},
                "buffers": module,
                "rest": self._checked(read(state[1], self.device))
                if len(state) > 1
                else self._start["rest"],
            }
        )
        self.commit()

    def _checked(self, rest: dict[str, Any]) -> dict[str, Any]:
        check_rest(rest, self._extra.keys(), self._optimizer_state.live(), self.scheduler)
        return rest

    @property
    def named_state(self) -> dict[str, Tensor]:
        """Parameters, buffers, then state of optimizers and extra objects, by name; some are live.

        Names and order are the same on all holders. Numbers become float64 tensors. All tensors are
        on the CPU.
        """
        live = self._live()
        optimizers = {
            "optimizer" if number == 0 else f"optimizer{number}": each["state"]
            for number, each in enumerate(live["rest"]["optimizers"])
        }
        rest = {**optimizers, "extra": live["rest"]["extra"]}
        found = {name: p.detach() for name, p in live["parameters"].items()}
        found |= {name: b.detach() for name, b in live["buffers"].items() if b is not None}
        for name, value in sorted(leaves(rest), key=itemgetter(0)):
            if isinstance(value, Tensor):
                found[name] = value.detach()
            elif isinstance(value, bool | int | float):
                found[name] = torch.tensor(value, dtype=torch.float64)
        return dict(zip(found, on_host(*found.values())))

    @property
    def whole_state(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of every part of the state; tensors are live."""
        return leaves(self._live())

    @property
    def entries(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of every part of the state, named for a reader; tensors are live."""
        live = self._live()
        rest = live["rest"]
        kinds = [*_named(rest), ("number of skipped steps", rest["skipped"])]
        kinds += [("step before which training ends", rest["ends_at"])]
        kinds += [("report of an evaluation", rest["reports"])]
        kinds += [("parameter", live["parameters"]), ("buffer", live["buffers"])]
        for kind, state in kinds:
            for name, value in leaves(state):
                yield f"{kind} {name}".rstrip(), value

    @property
    def state_tensors(self) -> list[Tensor]:
        """The tensors of `named_state`, for a digest; bfloat16, unknown to numpy, as int16."""
        return [
            tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            for tensor in self.named_state.values()
        ]

    def _live(self) -> dict[str, Any]:
        """All state as nested dicts; tensors are live, except for buffers, taken as agreed on."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        extra = {name: off_meta(each.state_dict()) for name, each in self._extra.items()}
        return {
            "parameters": self._all,
            "buffers": self._buffers,
            "rest": {
                "optimizers": self._optimizer_state.live(),
                "scheduler": scheduler,
                "extra": extra,
                "streams": self.streams,
                "skipped": self.skipped,
                "ends_at": self.ends_at,
                "reports": self.reports,
            },
        }

    def _put(self, state: dict[str, Any]) -> None:
        """Restore everything to `state`, in place; afterwards nothing of `state` is shared."""
        self._drop_gradients()
        self._noted, self._at_commit = None, True
        placed(state["parameters"], self._all)
        self._buffers = placed(state["buffers"], self._buffers)
        put_buffers(self.module, self._buffers)
        rest = state["rest"]
        self.streams = placed(rest.get("streams", {})) if self.with_streams else {}
        self.skipped, self.ends_at = rest.get("skipped", 0), rest.get("ends_at", -1)
        if self.ends_at <= self.goes_on_from:
            self.ends_at = -1
        self.reports = placed(rest.get("reports", {}))
        self._optimizer_state.put(rest["optimizers"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(placed(rest["scheduler"]))
        for name, extra in self._extra.items():
            extra.load_state_dict(on_meta(placed(rest["extra"][name])))


def _named(rest: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The parts of `rest` with names in words; `rest` may lack "extra" and "streams"."""
    named: list[tuple[str, Any]] = []
    for number, optimizer in enumerate(rest["optimizers"]):
        of = _which(number)
        named += [(f"{of} group", optimizer["groups"]), (f"{of} state", optimizer["state"])]
    named += [("scheduler", rest["scheduler"]), ("registered", rest.get("extra", {}))]
    return [*named, ("stream of slot", rest.get("streams", {}))]


def _which(number: int) -> str:
    """An optimizer in words."""
    return f"optimizer {number}" if number else "optimizer"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one, other)


def _bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for _, value in leaves(state) if isinstance(value, Tensor))
