"""Every key a config may hold: its type, default, range and meaning, as frozen dataclasses.

One field here is one key; the loader, the checks and the printed reference all read these fields,
so a key is added by adding a field.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ecrm.wording import counted

REQUIRED = "<required>"
MAX_ROWS = 2**31 - 1
"""Rows of a table: row ids are int32 in the prepared data."""
MAX_RANKS = 4096
MAX_RATE = 3e38
"""Optimizers compute in float32, which ends a little above."""


@dataclass(frozen=True)
class Rule:
    """What a key means and which values it takes; bounds are inclusive unless the name says otherwise."""

    description: str
    minimum: float | None = None
    maximum: float | None = None  # only together with minimum or above
    above: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()

    def wanted(self) -> str:
        """The range in words, such as "from 1 to 254"; "" where every value of the type is right."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        parts = []
        if self.above is not None:
            parts.append(
                f"above {self.above}"
                + ("" if self.maximum is None else f" and at most {self.maximum}")
            )
        if self.minimum is not None:
            parts.append(
                f"at least {self.minimum}"
                if self.maximum is None
                else f"from {self.minimum} to {self.maximum}"
            )
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return " and ".join(parts)


def key(default: Any, description: str, **bounds: Any) -> Any:
    """A dataclass field that is one config key; `bounds` are the fields of `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(description, **bounds)})


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from."""

    path: str = key(
        REQUIRED, "folder of a dataset made by `ecrm prepare`; relative to the current folder"
    )
    eval_fraction: float = key(
        0.1, "share of the samples held out for evaluation", minimum=0, maximum=0.5
    )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the DLRM."""

    embedding_dim: int = key(16, "floats per embedding row", minimum=4, maximum=1024, multiple_of=4)
    bottom_mlp: tuple[int, ...] = key(
        (64, 32, 16),
        "layer widths of the dense arch; the last is model.embedding_dim",
        minimum=1,
        maximum=65536,
    )
    top_mlp: tuple[int, ...] = key(
        (64, 32, 1), "layer widths of the over arch; the last is 1", minimum=1, maximum=65536
    )
    max_rows_per_table: int = key(
        0,
        "cap on the rows of a table, further ids share its rows: 0 = none, as the dataset says, or at least 2",
        minimum=0,
        maximum=MAX_ROWS,
    )
    dense_arch: str = key(
        "auto",
        "dense parts: TorchRec's own modules, or the same model with this project's interaction kernel, which is faster; auto = native",
        choices=("auto", "torchrec", "native"),
    )


@dataclass(frozen=True)
class TrainConfig:
    """What is trained and for how long; with the data, all that the finished model depends on."""

    global_batch: int = key(
        2048, "samples per step over all slots; a multiple of train.slots", minimum=1
    )
    slots: int = key(
        0,
        "logical trainers the batch is cut into; 0 = cluster.trainers, with --resume as the run had",
        minimum=0,
        maximum=65536,
    )
    steps: int = key(0, "steps to train; 0 = as train.epochs says", minimum=0)
    epochs: float = key(
        1.0,
        "passes over the training samples, fractions allowed; not together with train.steps. With --resume and other data, over these",
        minimum=0,
        maximum=1_000_000,
    )
    seed: int = key(0, "seed of initial rows and dense weights", minimum=0, maximum=2**63 - 1)
    sparse_optimizer: str = key(
        "rowwise_adagrad",
        "optimizer of the embedding rows",
        choices=("rowwise_adagrad", "adagrad", "sgd"),
    )
    sparse_lr: float = key(0.05, "learning rate of the embedding rows", above=0, maximum=MAX_RATE)
    sparse_eps: float = key(
        1e-8, "epsilon of the sparse Adagrad optimizers", minimum=1e-37, maximum=MAX_RATE
    )
    dense_optimizer: str = key(
        "adagrad", "optimizer of the dense parts", choices=("adagrad", "sgd", "adam")
    )
    dense_lr: float = key(0.01, "learning rate of the dense parts", above=0, maximum=MAX_RATE)
    eval_every_steps: int = key(0, "steps between evaluations; 0 = only at the end", minimum=0)
    stop_after_evaluations_without_gain: int = key(
        0,
        "end the run once so many evaluations in a row were no better than the best before, by checkpoint.keep_best or else by auc; 0 = never",
        minimum=0,
    )
    log_every_steps: int = key(50, "steps between progress lines; 0 = only at the end", minimum=0)
    on_nonfinite: str = key(
        "stop",
        "when a loss is NaN or infinite: stop = the run ends with exit code 6 and says where that began; warn = it says so, "
        "once in log_every_steps, and goes on. No checkpoint of what is not finite is ever written",
        choices=("stop", "warn"),
    )
    profile: bool = key(
        False,
        "time every phase and every call between ranks; print a table and write trace.json at the end",
    )
    tensorboard: bool = key(
        False,
        "write scalars for TensorBoard into tensorboard/ of the run folder; `ecrm launch` does, not "
        "an mpirun line typed by hand; needs the package tensorboard",
    )
    threads: int = key(1, "intra-op threads per rank", minimum=1, maximum=1024)


@dataclass(frozen=True)
class ClusterConfig:
    """How many logical roles there are, and how they are laid out on ranks."""

    servers: int = key(
        4, "ranks that hold a shard of every embedding table", minimum=1, maximum=MAX_RANKS
    )
    trainers: int = key(2, "ranks that run slots", minimum=1, maximum=MAX_RANKS)
    spares: int = key(
        1, "ranks that wait to take the place of a dead one", minimum=0, maximum=MAX_RANKS
    )
    layout: str = key(
        "dedicated",
        "dedicated = a rank is server or trainer; colocated = servers and trainers share ranks",
        choices=("dedicated", "colocated"),
    )
    failure_domain: str = key(
        "rank",
        "what may be lost at once: a rank, or all ranks of a host; no two units of a stripe are ever put in one",
        choices=("rank", "host"),
    )
    oversubscribed: str = key(
        "auto",
        "what ranks do where they outnumber the cores of a host: bind = each keeps to one core, with its helper threads, dealt out by role, and polls "
        "while it waits; sleep = the system moves them, and they sleep while they wait, which leaves the cores to others; poll = the system moves them, and "
        "they poll; auto = bind where the cores get as many slots each or no core has two ranks that run slots, else sleep; poll with train.threads above 1",
        choices=("auto", "bind", "sleep", "poll"),
    )
    hang_seconds: float = key(
        2.0, "a rank stopped for so long counts as dead and is killed", minimum=0.1
    )
    stop_seconds: float = key(
        10.0,
        "from SIGINT or SIGTERM to `ecrm launch` to the end of ranks that have not stopped; longer than a step and a checkpoint take",
        minimum=1,
    )
    stuck_seconds: float = key(
        0.0,
        "a rank that computes, reads or writes by itself for so long, without a call to others, counts as dead and is killed; "
        "0 = never. More than a step, an evaluation batch and the writing of a checkpoint ever take",
        minimum=0,
    )
    start_seconds: float = key(
        120.0, "the run ends if MPI is not up on all ranks after so long", minimum=1
    )


@dataclass(frozen=True)
class ProtectionConfig:
    """What keeps embedding rows alive when ranks die."""

    name: str = key(
        "erasure",
        "none; erasure = Reed-Solomon parity over rows and optimizer state; chain = chain replication; "
        "replicate = copies, counting those that trainers hold; "
        "stateless = training goes on with lost rows as last seen, which come back from a checkpoint: not exact; "
        "checkpoint = a failure takes all back to the newest checkpoint; mapped = to the last commit, in memory-mapped files",
        choices=("none", "erasure", "chain", "replicate", "stateless", "checkpoint", "mapped"),
    )
    k: int = key(3, "data rows per stripe, used by erasure", minimum=1, maximum=254)
    m: int = key(
        1,
        "parity rows per stripe, the failure domains that may be lost at once; used by erasure",
        minimum=1,
        maximum=254,
    )
    copies: int = key(
        2,
        "whole copies of every row, each in another failure domain; used by chain and replicate",
        minimum=2,
        maximum=4,
    )
    commit_interval: int = key(
        1, "steps between commits; at most this many steps are redone after a failure", minimum=1
    )
    last_seen_rows: int = key(
        131072,
        "rows of each width whose last values a rank that runs slots keeps; used by stateless",
        minimum=1,
        maximum=MAX_ROWS,
    )
    rebuild_rows_per_step: int = key(
        4096,
        "rows of each lost shard decoded per step (stateless: read from the checkpoint): those that the step asks for, however many, then others in the background until there are so many; rows never updated do not count",
        minimum=1,
    )
    scrub_rows_per_step: int = key(
        0,
        "rows of each shard, data and parity, compared with their stripes at a commit, going round all of them; 0 = off",
        minimum=0,
    )
    reshape: bool = key(
        True,
        "when too few ranks are left to keep stripe members apart, lay everything out anew over fewer servers with a "
        "smaller k, in one pause, so that m more failures are survived",
    )
    verify_parity_at_end: bool = key(
        False,
        "re-encode all rows after the last step and compare with the parity held; where they differ the run fails",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is written to disk for the case that more is lost than the protection covers, under every protection."""

    every_steps: int = key(
        0, "steps between checkpoints; 0 = none, unless checkpoint.every_minutes says so", minimum=0
    )
    every_minutes: float = key(
        0.0,
        "minutes between checkpoints, instead of or beside checkpoint.every_steps; 0 = none; with protection.name checkpoint or stateless 30 "
        "where neither is given",
        minimum=0,
    )
    mode: str = key(
        "sync",
        "sync = training waits until it is written; async = training waits for a copy in memory, which is written meanwhile",
        choices=("sync", "async"),
    )
    kind: str = key(
        "full",
        "full = every row ever updated; incremental = rows changed since the one before",
        choices=("full", "incremental"),
    )
    full_every: int = key(8, "with kind incremental, every so many checkpoints are full", minimum=1)
    keep: int = key(
        2,
        "complete checkpoints kept, not counting those that they add to, and that of checkpoint.keep_best",
        minimum=1,
    )
    at_end: bool = key(
        True,
        "keep the model in the run folder: a checkpoint after the last step, and where the run is asked to stop",
    )
    keep_best: str = key(
        "none",
        "auc or logloss = the checkpoint of the best evaluation so far by that measure, written at the evaluation, is kept as "
        "checkpoints/best, however old",
        choices=("none", "auc", "logloss"),
    )


@dataclass(frozen=True)
class MappedConfig:
    """Where `protection.name = "mapped"` keeps everything, and what it survives."""

    path: str = key(
        "",
        "folder of the files, new or empty, on persistent memory, tmpfs or disk, seen by all ranks; empty = mapped/ in the run folder",
    )
    flush: str = key(
        "none",
        "none = what is committed survives the death of every process; commit = of the machine too: each step waits for the device",
        choices=("none", "commit"),
    )


@dataclass(frozen=True)
class StorageConfig:
    """Where the rows of a shard live."""

    backend: str = key(
        "auto",
        "FBGEMM table-batched embeddings, or this project's own kernels, which update rows faster to the same bits; auto = native",
        choices=("auto", "fbgemm", "native"),
    )
    prefault: bool = key(
        False,
        "have the system hand out all memory of rows and redundancy at the start, in huge pages where it has them, instead of at the first "
        "update of a row: a start that takes longer the larger the tables, faster steps, and no slower first ones. The next 2 m spares have "
        "memory for one shard ready as well, those of the start also 96 MB to work in; what others take over comes in small pages, in a thread "
        "beside the steps",
    )


@dataclass(frozen=True)
class KernelsConfig:
    """What this project's C++ kernels run on; the bits are the same on all."""

    instruction_set: str = key(
        "auto",
        "auto = the best that a machine has; or one by name, which all machines of the run must have",
        choices=("auto", "portable", "avx2", "avx512", "gfni"),
    )


@dataclass(frozen=True)
class TestingConfig:
    """Switches that break the promises on purpose, so that tests can show they would notice."""

    __test__ = False  # not a test class, whatever pytest makes of the name

    imitated_hosts: int = key(
        0,
        "TEST ONLY: rank r counts as a rank of host r mod this many; 0 = hosts are what they are",
        minimum=0,
        maximum=65536,
    )
    skip_undo: bool = key(
        False, "TEST ONLY: do not go back to the commit after a failure; the model is then wrong"
    )
    flip: str = key(
        "",
        "TEST ONLY: RANK@STEP:row, :state or :parity: one bit of that rank's memory flips in that step",
    )


@dataclass(frozen=True)
class Config:
    """A whole config; made by `load_config`, which has checked every value and how they fit together."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    protection: ProtectionConfig = ProtectionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mapped: MappedConfig = MappedConfig()
    storage: StorageConfig = StorageConfig()
    kernels: KernelsConfig = KernelsConfig()
    testing: TestingConfig = TestingConfig()

    @property
    def slots(self) -> int:
        """Number of logical trainers."""
        return self.train.slots or self.cluster.trainers

    @property
    def world_size(self) -> int:
        """Number of ranks the run is started with."""
        c = self.cluster
        hosts = c.servers + c.trainers if c.layout == "dedicated" else max(c.servers, c.trainers)
        return hosts + c.spares

    @property
    def checkpoints(self) -> bool:
        """Whether checkpoints are written."""
        checkpoint = self.checkpoint
        return bool(
            checkpoint.every_steps or checkpoint.every_minutes or checkpoint.keep_best != "none"
        )

    @property
    def failures_survived(self) -> int:
        """Number of ranks that may die at once, whichever they are, without all going back to a checkpoint: protection.m, copies - 1,
        1 with stateless (one of the two dense replicas at least), or 0 without redundancy."""
        copies = self.protection.copies - 1
        return {
            "erasure": self.protection.m,
            "chain": copies,
            "replicate": copies,
            "stateless": 1,
        }.get(self.protection.name, 0)

    @property
    def ranks_in_words(self) -> str:
        """What the ranks are, such as "4 servers + 2 trainers + 1 spare"."""
        c = self.cluster
        roles = f"{counted(c.servers, 'server')} + {counted(c.trainers, 'trainer')}"
        if c.layout == "colocated":
            roles = f"max of {counted(c.servers, 'server')} and {counted(c.trainers, 'trainer')}, colocated"
        return f"{roles} + {counted(c.spares, 'spare')}" if c.spares else roles

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The values as nested dicts of plain JSON and TOML types: {section: {key: value}}."""
        return {
            section: {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in values.items()
            }
            for section, values in dataclasses.asdict(self).items()
        }


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Config)}
