"""The training of a session as other parts must know it: tables, module, and number of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.base.errors import UsageError
from ecrm.base.version_set import version_set
from ecrm.base.wording import listed
from ecrm.checkpoint.compatibility import (
    ANEW,
    FLOAT32,
    ON,
    VERSIONS,
    WIRE,
    begun_as,
    device_changed,
    on_gpu,
    versions_changed,
)
from ecrm.checkpoint.folder import Checkpoint
from ecrm.model.nested_state import bytes_of
from ecrm.placement.initial_values import FileValues, Initial, Uniform, Values
from ecrm.run.started import Wanted

KEPT = {"slots": "Session(slots={})", "seed": "Session(seed={})"}
"""Numbers fixed for a continued run, with the code to type."""


def shapes_of(module: nn.Module) -> dict[str, list[int]]:
    """The shapes of a module's parameters and buffers by name, without meta tensors."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: list(tensor.shape) for name, tensor in named if not tensor.is_meta}


def names_of(module: nn.Module) -> dict[str, str]:
    """{name in the state_dict: first name of that parameter or buffer}.

    A tensor found more than once in the module has several names in the state_dict. The first name
    of a table, on the meta device, is left out.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    first = {id(tensor): name for name, tensor in reversed(named)}
    kept = module.state_dict(keep_vars=True)
    return {
        name: first[id(tensor)]
        for name, tensor in kept.items()
        if id(tensor) in first and not (tensor.is_meta and first[id(tensor)] == name)
    }


def of_wire(dtype: torch.dtype) -> dict[str, str]:
    """The part of an identity about the wire; empty for float32."""
    name = str(dtype).removeprefix("torch.")
    return {} if name == FLOAT32 else {WIRE: name}


def digests_of(named: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each tensor's bytes, by name."""
    return {
        name: hashlib.sha256(bytes_of(tensor).numpy().data).hexdigest()[:16]
        for name, tensor in named.items()
    }


@dataclass(frozen=True)
class TrainedModule:
    """A `Trained` (`ecrm.checkpoint.trained`): a session's request, and its module's `shapes`.

    `names` are from `names_of`. `weights` are digests of the initial state of the module, its
    optimizer and all further objects, by name. `on` is the GPU used for training, in words; "" for
    the CPU.
    """

    wanted: Wanted
    shapes: Mapping[str, list[int]]
    names: Mapping[str, str]
    weights: Mapping[str, str]
    on: str = ""

    def steps(self, data_began: int = 0) -> int:
        return self.wanted.steps

    def identity(
        self, data_began: int = 0, began_as: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        wanted = self.wanted
        return {
            "slots": wanted.slots,
            "seed": wanted.seed,
            **of_wire(wanted.wire_dtype),
            "table": {
                table.name: {
                    "rows": table.rows,
                    "dim": table.dim,
                    "optimizer": None if table.optimizer is None else table.optimizer.name,
                    "begins": _beginning(table.initial),
                }
                for table in wanted.tables
            },
            "rates": {
                table.name: {**asdict(table.optimizer), "betas": list(table.optimizer.betas)}
                for table in wanted.tables
                if table.optimizer is not None
            },
            "tensor": dict(self.shapes),
            "names": dict(self.names),
            "data_began": data_began,
            **(began_as or begun_as({"rows_seed": wanted.seed})),
            "told": {"steps": wanted.steps, **self._loaded},
            VERSIONS: version_set(),
            **on_gpu(self.on),
        }

    @property
    def _loaded(self) -> dict[str, str]:
        """The file with the rows never updated by a step, if any, under the key `loaded`."""
        found = [table.initial for table in self.wanted.tables]
        sources = [initial.source for initial in found if isinstance(initial, FileValues)]
        return {"loaded": sources[0]} if sources else {}

    def about(self) -> dict[str, Any]:
        said = self.identity()
        told = said.pop("told")
        del said["data_began"], said[VERSIONS]
        said.pop(ON, None)  # a run may go on elsewhere
        return {**said, "steps": told["steps"]}

    def check_identity(self, path: Path, said: dict[str, Any]) -> None:
        _check_that_it_is_a_session(path, said)
        mine = self.identity()
        for key, typed in KEPT.items():
            if said[key] != mine[key]:
                raise UsageError(
                    f"{path} was made with {typed.format(said[key])}, here it is {mine[key]}: "
                    f"take {said[key]}, or {ANEW}"
                )
        before, now = (each.get(WIRE, FLOAT32) for each in (said, mine))
        if before != now:
            raise UsageError(
                f"{path} was made with Session(wire_dtype=torch.{before}), here it is "
                f"torch.{now}: take torch.{before}, or {ANEW}"
            )
        if differing := differences(said, mine):
            raise UsageError(f"{path} is of another model: {differing}: {ANEW}")

    def check_data(self, path: Path, said: dict[str, Any]) -> None:
        """Accept any data: only the script knows the data."""

    def check_init(self, path: Path, said: dict[str, Any]) -> None:
        _check_that_it_is_a_session(path, said)
        if differing := differences(without_optimizers(said), without_optimizers(self.identity())):
            raise UsageError(f"--init-from {path}: the weights are of another model: {differing}")

    def began(self, checkpoint: Checkpoint) -> int:
        return 0

    def changes(self, said: dict[str, Any], mine: dict[str, Any]) -> list[str]:
        lines = [
            f"{name}: {number} {before[number]} -> {now}"
            for name, numbers in mine["rates"].items()
            for before in (said["rates"].get(name, {}),)
            for number, now in numbers.items()
            if number in before and before[number] != now
        ]
        lines += [*device_changed(said, mine), *versions_changed(said, mine)]
        steps = said["told"]["steps"], mine["told"]["steps"]
        return lines if steps[0] == steps[1] else [*lines, f"steps {steps[0]} -> {steps[1]}"]


def _beginning(initial: Initial | None) -> list[float] | str | None:
    """The initial values of rows: two bounds, or words; `None` for the default."""
    if isinstance(initial, Uniform):
        return [initial.low, initial.high]
    if isinstance(initial, Values | FileValues):
        return f"values {initial.digest[:16]}"
    return None if initial is None else "its init_fn says"


def _check_that_it_is_a_session(path: Path, said: dict[str, Any]) -> None:
    if "tensor" not in said:
        raise UsageError(f"{path} is of a config, and not of a script: {ANEW}")


def without_optimizers(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity with tables without optimizers.

    Initial values stay: rows missing in the checkpoint depend on the initial values.
    """
    tables = {name: {**table, "optimizer": None} for name, table in identity["table"].items()}
    return {**identity, "table": tables}


def begins_otherwise(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether two identities of a table differ only in initial numbers set by a script."""
    if one is None or one == other or {**one, "begins": other["begins"]} != other:
        return False
    return all(str(table["begins"]).startswith("values ") for table in (one, other))


def differences(
    said: Mapping[str, Any], mine: Mapping[str, Any], there: str = "there", here: str = "here"
) -> str:
    """Tensor by tensor, the differences of tables and module in two identities; "" if equal.

    `said` is the identity of an earlier run, or of another rank.
    """
    lines = []
    for kind in ("table", "tensor"):
        theirs, ours = said[kind], mine[kind]
        lines += [
            f"{kind} {name} is {_in_words(theirs.get(name))} {there}, "
            f"{_in_words(ours.get(name))} {here}"
            for name in {**theirs, **ours}
            if theirs.get(name) != ours.get(name)
        ]
    return listed(lines)


def _in_words(value: Any) -> str:
    """The shape of a tensor, or a table, in words."""
    if value is None:
        return "missing"
    if isinstance(value, dict):
        optimizer = f" with {value['optimizer']}" if value["optimizer"] else ""
        begins = value["begins"]
        given = "" if begins is None else f", begun as {begins}"
        return f"{value['rows']} x {value['dim']}{optimizer}{given}"
    return " x ".join(map(str, value)) or "one number"
