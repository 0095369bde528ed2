"""Every key of a config: its type, default, range and meaning, as frozen dataclasses.

One field in this module is one key; the loader, the checks and the printed reference all read these
fields, so adding a field adds a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ecrm.base.wording import counted
from ecrm.protection.kinds import KINDS, Kind

REQUIRED = "<required>"
MAX_ROWS = 2**31 - 1
"""Most rows of a table: row ids are int32 in the prepared data."""
MAX_RANKS = 4096
MAX_RATE = 3e38
"""Optimizers compute in float32, with a maximum a little above."""
WORKING_BYTES, WORKING_BYTES_TO_SHARE = 64 << 20, 32 << 20
"""Memory waiting on a ready spare: own memory, and memory to share.

Without the own memory a spare that takes over spends 8 ms of a core on new pages until the step is
done. Without the memory to share the spare's first update took 7 ms, later updates 2 ms
(embedding-heavy, 2,048 samples per slot).
"""
READY_BYTES = WORKING_BYTES + WORKING_BYTES_TO_SHARE
"""Memory to work in of a ready spare, beside the memory of a shard."""


@dataclass(frozen=True)
class Rule:
    """The meaning of a key and its allowed values. All bounds but `above` are inclusive.

    `choices` are the values of a key with few values, each with its meaning ("" if the name says
    enough).
    """

    description: str
    minimum: float | None = None
    maximum: float | None = None  # only together with minimum or above
    above: float | None = None
    multiple_of: int | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    def wanted(self) -> str:
        """The range in words, such as "from 1 to 254"; "" if any value of the type is right."""
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
    """A dataclass field for one config key; `bounds` are the fields of `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(description, **bounds)})


@dataclass(frozen=True)
class DataConfig:
    """The samples of a run."""

    path: str = key(
        REQUIRED,
        "Folder of a dataset that `ecrm prepare criteo` or `ecrm prepare table` made. "
        "A relative path starts at the current folder.",
    )
    eval_fraction: float = key(
        0.1,
        "Share of the samples held out for evaluation: the last ones. "
        "A table of `ecrm prepare table` has held-out rows of its own.",
        minimum=0,
        maximum=0.5,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model, and its shape."""

    architecture: str = key(
        "dlrm",
        "The kind of the model.",
        choices={
            "dlrm": "Dot products of all features, as in TorchRec's DLRM.",
            "dcnv2": "Crosses of low rank, as in TorchRec's DLRM_DCN.",
            "two_tower": "The dot product of two MLPs: one has model.user_columns, "
            "the other all other columns.",
        },
    )
    embedding_dim: int = key(
        16, "Floats per embedding row.", minimum=4, maximum=1024, multiple_of=4
    )
    bottom_mlp: tuple[int, ...] = key(
        (64, 32, 16),
        "Layer widths of the dense arch; the last is model.embedding_dim. "
        "With two_tower, the layer widths of each tower.",
        minimum=1,
        maximum=65536,
    )
    top_mlp: tuple[int, ...] = key(
        (64, 32, 1),
        "Layer widths of the over arch. The last is 1. Used by dlrm and dcnv2.",
        minimum=1,
        maximum=65536,
    )
    cross_layers: int = key(3, "Number of crosses. Used by dcnv2.", minimum=1, maximum=64)
    cross_rank: int = key(
        32, "Rank of the matrices of a cross. Used by dcnv2.", minimum=1, maximum=65536
    )
    user_columns: tuple[str, ...] = key(
        (), "Names of the features and dense columns of the user's tower. Used by two_tower."
    )
    max_rows_per_table: int = key(
        0,
        "Most rows of a table; ids beyond them share its rows. "
        "0 means as many as the dataset says, any other value is at least 2.",
        minimum=0,
        maximum=MAX_ROWS,
    )
    dense_arch: str = key(
        "auto",
        "What computes the dense parts.",
        choices={
            "auto": "The same as native with dlrm, else the same as torchrec.",
            "torchrec": "TorchRec's own modules.",
            "native": "The same model with this project's interaction kernel, which is faster.",
        },
    )

    @property
    def interaction(self) -> str:
        """The implementation of the dense parts: `native` or `torchrec`."""
        if self.dense_arch != "auto":
            return self.dense_arch
        return "native" if self.architecture == "dlrm" else "torchrec"


@dataclass(frozen=True)
class TrainConfig:
    """The training: batches, length, optimizers and device."""

    global_batch: int = key(
        2048, "Samples per step over all slots. A multiple of train.slots.", minimum=1
    )
    slots: int = key(
        0,
        "Number of slots: logical trainers that each take an equal part of the batch. "
        "0 means cluster.trainers, or with --resume as many as the run had.",
        minimum=0,
        maximum=65536,
    )
    steps: int = key(0, "Steps to train. 0 means that train.epochs decides.", minimum=0)
    epochs: float = key(
        1.0,
        "Passes over the training samples; fractions are allowed. Not together with train.steps. "
        "With --resume and other data, passes over that data.",
        minimum=0,
        maximum=1_000_000,
    )
    seed: int = key(0, "Seed of initial rows and dense weights.", minimum=0, maximum=2**63 - 1)
    sparse_optimizer: str = key(
        "rowwise_adagrad",
        "Optimizer of the embedding rows.",
        choices={
            "rowwise_adagrad": "Adagrad with one number of state per row.",
            "adagrad": "Adagrad with one number of state per float.",
            "sgd": "Stochastic gradient descent without state.",
            "adam": "Adam with two numbers of state per float, betas 0.9 and 0.999. "
            "Rows that a step does not use keep their moments.",
        },
    )
    sparse_lr: float = key(0.05, "Learning rate of the embedding rows.", above=0, maximum=MAX_RATE)
    sparse_eps: float = key(
        1e-8,
        "Epsilon of the sparse Adagrad optimizers and of Adam.",
        minimum=1e-37,
        maximum=MAX_RATE,
    )
    dense_optimizer: str = key(
        "adagrad",
        "Optimizer of the dense parts.",
        choices=dict.fromkeys(("adagrad", "sgd", "adam"), ""),
    )
    dense_lr: float = key(0.01, "Learning rate of the dense parts.", above=0, maximum=MAX_RATE)
    wire_dtype: str = key(
        "float32",
        "The dtype of rows and gradients of rows between hosts (quantized communication). "
        "It decides bits, on any number of hosts: the model computes with rounded values.",
        choices={
            "float32": "Four bytes, and nothing is rounded.",
            "bfloat16": "Two bytes. Rows read, sums of bags, and their gradients are rounded. "
            "Stored rows, optimizer state, parity and saved models stay float32.",
        },
    )
    eval_every_steps: int = key(0, "Steps between evaluations. 0 means only at the end.", minimum=0)
    stop_after_evaluations_without_gain: int = key(
        0,
        "End the run after this many evaluations in a row that were no better than the best. "
        "They are compared by checkpoint.keep_best, or by AUC where that is none. 0 means never.",
        minimum=0,
    )
    other_versions: bool = key(
        False,
        "Go on with --resume from a run with other versions of packages, or from another kind of "
        "CPU, and train on hosts that differ in these. Equal bits are then not promised.",
    )
    log_every_steps: int = key(
        50, "Steps between progress lines. 0 means only at the end.", minimum=0
    )
    on_nonfinite: str = key(
        "stop",
        "What happens when a loss is NaN or infinite. No checkpoint ever holds such a value.",
        choices={
            "stop": "The run ends with exit code 6 and says where the value appeared first.",
            "warn": "The run says so, at most once in train.log_every_steps steps, and goes on.",
        },
    )
    check_determinism: int = key(
        -1,
        "For scripts: each slot of so many first steps is computed twice. Where a bit differs, the "
        "run ends and names the first parameter or row. -1 is the number that the script's Session "
        "has, 1 by default.",
        minimum=-1,
    )
    profile: bool = key(
        False,
        "Time every phase and every call between ranks. "
        "At the end, print a table and write trace.json.",
    )
    tensorboard: bool = key(
        False,
        "Write scalars for TensorBoard into tensorboard/ of the run folder. `ecrm launch` does "
        "this, an mpirun line typed by hand does not. It needs the package tensorboard.",
    )
    threads: int = key(1, "Intra-op threads per rank.", minimum=1, maximum=1024)
    device: str = key(
        "cpu",
        "Where the model is trained, all but its rows. The bits are those of the device: all ranks "
        "must have the same model of GPU and the same torch.",
        choices={
            "cpu": "On the CPU.",
            "cuda": "On a GPU. Ranks of a host share its GPUs: each uses one.",
        },
    )


@dataclass(frozen=True)
class ClusterConfig:
    """The number of logical roles, and their layout on ranks."""

    servers: int = key(
        4, "Ranks that hold a shard of every embedding table.", minimum=1, maximum=MAX_RANKS
    )
    trainers: int = key(2, "Ranks that run slots.", minimum=1, maximum=MAX_RANKS)
    spares: int = key(
        1, "Ranks that wait to take the place of a dead one.", minimum=0, maximum=MAX_RANKS
    )
    layout: str = key(
        "dedicated",
        "Whether a rank may have two roles.",
        choices={
            "dedicated": "A rank is a server or a trainer.",
            "colocated": "Servers and trainers share ranks.",
        },
    )
    placement: str = key(
        "rows",
        "Where the rows of a table lie.",
        choices={
            "rows": "Spread over all servers, row after row (row-wise sharding).",
            "tables": "All on one server, unless the table is too large for an even share "
            "(table-wise sharding). The server sums bags for trainers on other hosts.",
        },
    )
    failure_domain: str = key(
        "rank",
        "What may be lost at once. "
        "The units of a stripe are kept in different domains while there are enough.",
        choices={"rank": "One rank.", "host": "All ranks of a host."},
    )
    rejoin: bool = key(
        False,
        "With --hosts: whether `ecrm launch` brings lost hosts back into the run. "
        "A host that is lost again soon waits twice as long, up to 600 s.",
    )
    oversubscribed: str = key(
        "auto",
        "What ranks do on a host that has fewer cores than ranks.",
        choices={
            "auto": "ECRM chooses. With train.threads above 1 it takes poll. Otherwise it takes "
            "bind if slots spread evenly over the cores, or if no core has two "
            "ranks that run slots. "
            "In all other cases it takes sleep.",
            "bind": "Each rank, with its helper threads, stays on one core, dealt out by role. "
            "It polls while it waits.",
            "sleep": "The system moves ranks between cores. "
            "They sleep while they wait, which leaves the cores to others.",
            "poll": "The system moves ranks between cores. They poll while they wait.",
        },
    )
    hang_seconds: float = key(
        2.0,
        "A rank that stands still for this long counts as dead and is killed.",
        minimum=0.1,
    )
    gpu_hang_seconds: float = key(
        10.0,
        "A rank whose GPU is not done for this long with what it was given counts as dead and is "
        "killed. Set it longer than a slot takes on a GPU, times the ranks that share it.",
        minimum=0.1,
    )
    stop_seconds: float = key(
        10.0,
        "After SIGINT or SIGTERM to `ecrm launch`, ranks have this long to stop before they are "
        "killed. Set it longer than a step and a checkpoint take.",
        minimum=1,
    )
    stuck_seconds: float = key(
        600.0,
        "A rank that works by itself for this long, without a call to others, counts as dead and "
        "is killed. 0 means never. "
        "Set it longer than a step, an evaluation batch and the writing of a checkpoint ever take. "
        "A script's code before its first step and after its loop takes as long as it takes.",
        minimum=0,
    )
    start_seconds: float = key(
        120.0, "The run ends if MPI is not up on all ranks after this long.", minimum=1
    )

    @property
    def whole_tables(self) -> bool:
        """Whether small tables lie whole on servers."""
        return self.placement == "tables"


@dataclass(frozen=True)
class ProtectionConfig:
    """The protection of embedding rows against the death of ranks."""

    name: str = key(
        "erasure",
        "What protects rows and optimizer state.",
        choices={kind.name: kind.meaning for kind in KINDS.values()},
    )
    k: int = key(3, "Data rows per stripe. Used by erasure.", minimum=1, maximum=254)
    m: int = key(
        1,
        "Parity rows per stripe: how many failure domains may be lost at once. Used by erasure.",
        minimum=1,
        maximum=254,
    )
    shards_per_server: int = key(
        1,
        "Shards of each server. Without spares, the shards of a dead server go to as many ranks, "
        "which rebuild side by side, and each needs memory for its part only. Several spares share "
        "the shards likewise. "
        "Each shard more adds messages to every step. Used by erasure.",
        minimum=1,
        maximum=16,
    )
    copies: int = key(
        2,
        "Whole copies of every row, each in another failure domain. Used by chain and replicate.",
        minimum=2,
        maximum=4,
    )
    commit_interval: int = key(
        1, "Steps between commits. A failure redoes at most this many steps.", minimum=1
    )
    last_seen_rows: int = key(
        131072,
        "Rows of each width whose last values a rank that runs slots keeps. Used by stateless.",
        minimum=1,
        maximum=MAX_ROWS,
    )
    rebuild_share: float = key(
        0.05,
        "The share of time that steps may give to rebuilding. Rows asked for by steps come at "
        "once. Rows in the background get the rest of the share, half of the share at least. Each "
        "host of a lost shard measures steps before the failure, and steps with and without "
        "background rows. 1 means no measurement and as many rows as are allowed otherwise.",
        above=0,
        maximum=1,
    )
    rebuild_rows_per_step: int = key(
        0,
        "Rows of each lost shard that are rebuilt per step at most, if protection.rebuild_share "
        "allows as many; with stateless, read from the checkpoint. Rows that the step asks for "
        "come first, however many they are. Rows that were never updated do not count. "
        "0 means 64 MiB of rows.",
        minimum=0,
    )
    scrub_rows_per_step: int = key(
        0,
        "Rows of each shard, data and parity, that a commit compares with their stripes. "
        "All rows have their turn, again and again. 0 means off.",
        minimum=0,
    )
    reshape: bool = key(
        True,
        "When too few ranks are left to keep the units of a stripe apart, spread all data over "
        "fewer servers with a smaller k. This takes one pause; then m more failures are survived.",
    )
    verify_parity_at_end: bool = key(
        False,
        "After the last step, encode all rows again and compare them with the parity held. "
        "The run fails where they differ.",
    )


_NEED_CHECKPOINTS = " and ".join(kind.name for kind in KINDS.values() if kind.needs_checkpoints)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints on disk, under every protection, in case of losses beyond the protection."""

    every_steps: int = key(
        0,
        "Steps between checkpoints. 0 means none, unless checkpoint.every_minutes is set.",
        minimum=0,
    )
    every_minutes: float = key(
        0.0,
        "Minutes between checkpoints, instead of or beside checkpoint.every_steps. 0 means none. "
        f"Where neither is set, protection.name {_NEED_CHECKPOINTS} use 30 minutes.",
        minimum=0,
    )
    mode: str = key(
        "sync",
        "What training waits for.",
        choices={
            "sync": "Training waits until the checkpoint is written.",
            "async": "Training waits for a copy in memory, which is written while it goes on.",
        },
    )
    kind: str = key(
        "full",
        "Which rows a checkpoint holds.",
        choices={
            "full": "Every row that was ever updated.",
            "incremental": "The rows that changed since the checkpoint before.",
        },
    )
    full_every: int = key(
        8, "With kind incremental, one checkpoint in this many is full.", minimum=1
    )
    keep: int = key(
        2,
        "Complete checkpoints to keep. Those that they add to, and that of checkpoint.keep_best, "
        "do not count.",
        minimum=1,
    )
    at_end: bool = key(
        True,
        "Write a checkpoint after the last step, and when the run is asked to stop. "
        "It keeps the model in the run folder.",
    )
    keep_best: str = key(
        "none",
        "Write a checkpoint at the best evaluation so far and keep it as checkpoints/best, however "
        "old it gets.",
        choices={
            "none": "No such checkpoint.",
            "auc": "The evaluation with the highest AUC.",
            "logloss": "The evaluation with the lowest log loss.",
        },
    )


@dataclass(frozen=True)
class MappedConfig:
    """The files of `protection.name = "mapped"`, and the failures that they survive."""

    path: str = key(
        "",
        "Folder of the files, new or empty, on persistent memory, tmpfs or disk. "
        "All ranks must see it. Empty means mapped/ in the run folder.",
    )
    flush: str = key(
        "none",
        "What committed updates survive.",
        choices={
            "none": "The death of every process.",
            "commit": "The death of the machine as well: each step waits for the device.",
        },
    )


@dataclass(frozen=True)
class StorageConfig:
    """The storage of a shard's rows."""

    device: str = key(
        "cpu",
        "Where rows, their optimizer state and their redundancy lie. The bits are the same.",
        choices={
            "cpu": "In the memory of the machine.",
            "cuda": "On a GPU. `train.device` says where the model is trained.",
        },
    )
    prefault: bool = key(
        False,
        "Take the memory of all rows and redundancy when training starts, not when a row is first "
        "updated. The memory comes in huge pages if the system has them. The start takes longer, "
        "and steps are faster. The next 2 m spares also keep memory for one shard ready. Those "
        f"that are next at the start hold {READY_BYTES >> 20} MiB more to work in. Any other rank "
        "that takes over a shard gets its memory in small pages, while training goes on.",
    )


@dataclass(frozen=True)
class KernelsConfig:
    """The backend of this project's kernels. The bits are the same on all backends."""

    backend: str = key(
        "auto",
        "What kernels run on where a device is cuda. On the CPU they are C++.",
        choices={
            "auto": "The same as triton.",
            "triton": "Kernels for the GPU.",
            "reference": "Plain operations of torch, slowly, to compare with.",
        },
    )
    instruction_set: str = key(
        "auto",
        "The instruction set of the C++. All machines of the run must have one that is named.",
        choices={
            "auto": "The best that a machine has.",
            "portable": "Plain C++.",
            "avx2": "",
            "avx512": "",
            "gfni": "",
        },
    )


@dataclass(frozen=True)
class MetricsConfig:
    """The numbers of a run for Prometheus."""

    port: int = key(
        0,
        "Port at which the rank that reports serves the metrics, as /metrics over HTTP. Another "
        "rank serves them after its death. There is no password. 0 means none.",
        minimum=0,
        maximum=65535,
    )
    address: str = key(
        "0.0.0.0", "Address of the rank's host to listen at. 0.0.0.0 means all of them."
    )


@dataclass(frozen=True)
class HooksConfig:
    """Commands that `ecrm launch` runs on its own machine."""

    on_failure: str = key(
        "",
        "Shell command to run after each failure that was survived. It finds the event as JSON in "
        "ECRM_EVENT and the run folder in ECRM_RUN_DIR. Its output goes to hooks.log.",
    )
    logger: str = key(
        "",
        "Shell command to run beside the run, such as a logger for W&B or MLflow. It reads the "
        "values of each progress step and each evaluation from its standard input, a JSON object "
        "a line. Its output goes to hooks.log.",
    )
    seconds: float = key(
        30.0,
        "A command that takes longer is killed. A logger is killed this long after the last step.",
        above=0,
        maximum=3600,
    )


@dataclass(frozen=True)
class TestingConfig:
    """Switches that break the promises on purpose, to show that tests would notice."""

    __test__ = False  # not a test class, despite the name

    imitated_hosts: int = key(
        0,
        "TEST ONLY. Rank r counts as a rank of host r modulo this number. "
        "0 means that hosts are what they are.",
        minimum=0,
        maximum=65536,
    )
    imitated_gpu: bool = key(
        False,
        "TEST ONLY. Imitate a GPU in memory of the CPU. It is very slow.",
    )
    skip_undo: bool = key(
        False,
        "TEST ONLY. Do not go back to the commit after a failure. The model is then wrong.",
    )
    flip: str = key(
        "",
        "TEST ONLY. Flip one bit of a rank's memory in a step: "
        "RANK@STEP:row, RANK@STEP:state or RANK@STEP:parity.",
    )
    gpu_fault: str = key(
        "",
        "TEST ONLY. Have the imitated GPU of a rank fail from a phase of a step on: "
        "RANK@STEP:PHASE:memory, RANK@STEP:PHASE:lost or RANK@STEP:PHASE:hang.",
    )


@dataclass(frozen=True)
class Config:
    """A whole config, made by `load_config`, which checks every value and all values together."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    protection: ProtectionConfig = ProtectionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mapped: MappedConfig = MappedConfig()
    storage: StorageConfig = StorageConfig()
    kernels: KernelsConfig = KernelsConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()
    testing: TestingConfig = TestingConfig()

    @property
    def slots(self) -> int:
        """Number of logical trainers."""
        return self.train.slots or self.cluster.trainers

    @property
    def world_size(self) -> int:
        """Number of ranks at the start of the run."""
        c = self.cluster
        hosts = c.servers + c.trainers if c.layout == "dedicated" else max(c.servers, c.trainers)
        return hosts + c.spares

    @property
    def checkpoints(self) -> bool:
        """Whether checkpoints are written while the run trains."""
        checkpoint = self.checkpoint
        return bool(
            checkpoint.every_steps or checkpoint.every_minutes or checkpoint.keep_best != "none"
        )

    @property
    def failures_survived(self) -> int:
        """Number of ranks that may die at once without a rollback, for any choice of ranks.

        The number is protection.m, protection.copies - 1, 1 with stateless (which keeps two dense
        replicas), or 0 without redundancy.
        """
        return self.kind.survives(self.protection)

    @property
    def ready_spares(self) -> int:
        """Number of spares with memory ready for a takeover, with storage.prefault; else 0.

        As many ranks as survivable may die at once, and as many more while the spares that move up
        take memory.
        """
        return 2 * self.failures_survived if self.storage.prefault else 0

    @property
    def kind(self) -> Kind:
        """The kind of protection."""
        return KINDS[self.protection.name]

    @property
    def ranks_in_words(self) -> str:
        """The ranks by role, such as "4 servers + 2 trainers + 1 spare"."""
        c = self.cluster
        roles = f"{counted(c.servers, 'server')} + {counted(c.trainers, 'trainer')}"
        if c.layout == "colocated":
            roles = (
                f"max of {counted(c.servers, 'server')} and {counted(c.trainers, 'trainer')}, "
                "colocated"
            )
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
