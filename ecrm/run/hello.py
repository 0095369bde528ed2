"""The hello of a rank: its host and its inputs, said once to all ranks before a session's run.

Every rank judges all hellos alike, so a refused run ends on all ranks with the same error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.base.version_set import differing, ecrm_build, version_set
from ecrm.checkpoint.compatibility import FLOAT32, WIRE
from ecrm.config.schema import Config
from ecrm.model.nested_state import leaves
from ecrm.process.linux import memory_bytes
from ecrm.process.preflight import host_name
from ecrm.run.consistency import Alike, InputDigests, unlike
from ecrm.run.gather import gather_results
from ecrm.run.trained_module import begins_otherwise, differences
from ecrm.transport.base import Transport

ECRM = "ecrm"
"""The key of the build of ecrm, among versions."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a rank that must be the same on all ranks.

    `given`: config, script and data by digest. `trained_on`: the device and the torch that decide
    bits, in words. `versions`: a result of `needed_versions`.
    `model`: a result of `TrainedModule.about`. `weights`: digests of tensors by name.
    """

    given: InputDigests
    trained_on: str
    versions: Mapping[str, str]
    model: Mapping[str, Any]
    weights: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all inputs, without the name of the host."""
        parts = [self.given.digests, self.trained_on, self.versions, self.model, self.weights]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Hello:
    """The facts of one rank, as JSON values.

    - `process`: {"pid", "host", "failure_domain", "cores": usable core numbers}.
    - `inputs`: the digest of the rank's `Inputs`.
    - `rows_on_gpu`: whether rows lie on a GPU. `reads_files`: whether tables begin as in a file.
    - `available`: bytes of memory left on the host.
    - `offer`: needed to read the rank's shared memory; `word`: the offset of the rank's
      whereabouts in the shared memory, -1 for none.
    """

    process: Mapping[str, Any]
    inputs: str
    rows_on_gpu: bool
    reads_files: bool
    available: int
    offer: Mapping[str, Any]
    word: int

    @property
    def host(self) -> str:
        """The name of the rank's host."""
        name: str = self.process["host"]
        return name


def needed_versions(config: Config) -> Mapping[str, str]:
    """The build of ecrm and the set of versions that all ranks need.

    Only the build of ecrm if `train.other_versions` allows other versions.
    """
    return {ECRM: ecrm_build(), **({} if config.train.other_versions else version_set())}


Hellos = Mapping[int, Hello]
"""The hello of every rank that has reached the start."""


def hello_of(
    transport: Transport, config: Config, inputs: Inputs, reads_files: bool, word: int
) -> dict[str, Any]:
    """This rank's hello, as JSON values."""
    memory = transport.shared_memory
    hello = Hello(
        _process(transport.rank, config),
        inputs.digest,
        config.storage.device != "cpu",
        reads_files,
        memory_bytes()[1],
        {} if memory is None else memory.offer(host_name()),
        word,
    )
    return asdict(hello)


def _process(rank: int, config: Config) -> dict[str, Any]:
    host = host_name()
    domain = f"rank {rank}"
    if config.cluster.failure_domain == "host":
        hosts = config.testing.imitated_hosts
        domain = f"{host}#{rank % hosts}" if hosts else host
    return {
        "pid": os.getpid(),
        "host": host,
        "failure_domain": domain,
        "cores": sorted(os.sched_getaffinity(0)),
    }


def check_inputs(transport: Transport, hellos: Hellos, mine: Inputs, alike: Alike) -> None:
    """Collective: raise UsageError on every rank unless all have the same inputs.

    Ranks send their inputs only if two hellos differ.
    """
    if len({hello.inputs for hello in hellos.values()}) > 1:
        said = gather_results(transport, lambda: asdict(mine))
        judge_inputs({rank: _inputs(each) for rank, each in said.items()}, alike)


def _inputs(said: Mapping[str, Any]) -> Inputs:
    given = InputDigests(**said["given"])
    return Inputs(**{**said, "given": given})


def judge_inputs(of_ranks: Mapping[int, Inputs], alike: Alike) -> None:
    """Raise UsageError for all ranks, naming the ranks that differ, and the difference."""
    if problem := unlike({rank: each.given for rank, each in of_ranks.items()}, alike):
        raise UsageError(problem).on_all_ranks(min(of_ranks))
    check_trained_on({rank: each.trained_on for rank, each in of_ranks.items()})
    check_version_sets({rank: each.versions for rank, each in of_ranks.items()})
    check_models({rank: each.model for rank, each in of_ranks.items()})
    check_weights({rank: each.weights for rank, each in of_ranks.items()})


def check_trained_on(of_ranks: Mapping[int, str]) -> None:
    """Raise UsageError unless all ranks train on equal devices: any rank may take over a slot.

    `of_ranks` names the device of each rank, in words.
    """
    first, *others = sorted(of_ranks)
    for rank in others:
        if of_ranks[rank] != of_ranks[first]:
            raise UsageError(
                f"rank {first} trains the model on {of_ranks[first]}, rank {rank} on "
                f"{of_ranks[rank]}, which come to other bits",
                otherwise="give all ranks the same model of GPU and the same torch",
            ).on_all_ranks(first)


def check_version_sets(of_ranks: Mapping[int, Mapping[str, str]]) -> None:
    """Raise UsageError unless all ranks have the same ecrm and the same set of versions.

    `of_ranks` are results of `needed_versions`, by rank.
    """
    first, *others = sorted(of_ranks)
    for rank in others:
        builds = of_ranks[first][ECRM], of_ranks[rank][ECRM]
        if builds[0] != builds[1]:
            raise UsageError(
                f"rank {rank} has ecrm {builds[1]}, rank {first} has ecrm {builds[0]}",
                otherwise="install the same ecrm, with the same sources, on all hosts",
            ).on_all_ranks(first)
        if changed := differing(of_ranks[first], of_ranks[rank]):
            raise UsageError(
                f"rank {rank} has other versions than rank {first}: {changed}: "
                "bits are equal within one set",
                {"train.other_versions": True},
                otherwise="install the same versions on all hosts",
            ).on_all_ranks(first)


def check_models(of_ranks: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UsageError unless all ranks have the same model.

    `of_ranks` are the results of `TrainedModule.about`, by rank.
    """
    first, *others = sorted(of_ranks)
    here = {WIRE: FLOAT32, **of_ranks[first]}  # an identity of float32 has no such key
    for rank in others:
        there = {WIRE: FLOAT32, **of_ranks[rank]}
        for name, table in here["table"].items():
            if begins_otherwise(there["table"].get(name), table):
                raise _other_numbers(f"table {name}", rank, first)
        if there != here:
            where = f"on rank {rank}", f"on rank {first}"
            raise UsageError(
                f"rank {rank} has another model than rank {first}: "
                f"{differences(there, here, *where) or _first_other(there, here, *where)}",
                otherwise="build it alike on all ranks, from the script and its arguments alone",
            ).on_all_ranks(first)


def _first_other(said: Mapping[str, Any], mine: Mapping[str, Any], there: str, here: str) -> str:
    """Describe the first different number of two identities of the same tables and tensors."""
    theirs, ours = dict(leaves(said)), dict(leaves(mine))
    return next(
        f"{name} is {theirs.get(name)} {there}, {ours.get(name)} {here}"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    )


def check_weights(of_ranks: Mapping[int, Mapping[str, str]]) -> None:
    """Raise UsageError unless every tensor of the module is the same on all ranks.

    `of_ranks` are the digests of tensors, by rank and name.
    """
    first, *others = sorted(of_ranks)
    for rank in others:
        for name, digest in of_ranks[first].items():
            if of_ranks[rank].get(name) != digest:
                raise _other_numbers(name, rank, first)


def _other_numbers(name: str, rank: int, first: int) -> UsageError:
    return UsageError(
        f"{name} begins with other numbers on rank {rank} than on rank {first}",
        otherwise="draw them alike on all ranks, such as by torch.manual_seed(0) "
        "before the model is built",
    ).on_all_ranks(first)
