"""Checks of config values: first each key by itself, then how the keys fit together.

Pure functions: values in, problems out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ecrm.base.errors import Problem
from ecrm.config.faults import parse_flip, parse_gpu_fault
from ecrm.config.schema import MAX_RANKS, REQUIRED, SECTIONS, Config, ModelConfig, Rule
from ecrm.protection.kinds import WITH_PARITY

TYPES: dict[str, dict[str, Any]] = {
    name: typing.get_type_hints(section) for name, section in SECTIONS.items()
}
KEYS: dict[str, dataclasses.Field[Any]] = {
    f"{name}.{field.name}": field
    for name, section in SECTIONS.items()
    for field in dataclasses.fields(section)
}

TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    bool: "true or false",
    tuple[int, ...]: "a list of whole numbers, such as [64, 32, 16]",
    tuple[str, ...]: 'a list of texts, such as ["user_id", "age"]',
}


def type_of(name: str) -> Any:
    """The Python type of the key `name` ("section.key")."""
    section, _, key = name.partition(".")
    return TYPES[section][key]


SHOWN = 200
"""Most characters of a wrong value repeated in a message."""

_INT64 = range(-(2**63), 2**63)


def show(value: Any) -> str:
    """A value as typed in a config file."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)  # JSON's words and escapes are TOML's too
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    if isinstance(value, dict):
        return "a table"
    return str(value)


def shown(value: Any) -> str:
    """A wrong value as typed, cut to a readable length."""
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(map(shown, value[:SHOWN])) + "]"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > SHOWN:
        # Python refuses to write out thousands of digits
        text = f"a number of {value.bit_length()} bits"
    else:
        text = show(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


GONE = {"storage.backend": "rows have one store, with the bits of every value of the key"}
"""Keys of earlier versions, with the reason why a config needs none of them."""


def unknown_key(name: str) -> str | None:
    """The problem with the name of a key, with the nearest right name; None if the key exists."""
    if name in KEYS:
        return None
    if name in GONE:
        return f"{name}: no key any more, leave the key out: {GONE[name]}"
    if name in SECTIONS:
        return f"{name} is a section, not a key; it has {_keys_of(name)}"
    nearest = max(KEYS, key=lambda other: _likeness(name, other))
    if _likeness(name, nearest) >= 0.6:
        return f"{name}: no such key; did you mean {nearest}?"
    section = name.partition(".")[0]
    if section in SECTIONS:
        return f"{name}: no such key; [{section}] has {_keys_of(section)}"
    near = difflib.get_close_matches(section, SECTIONS, n=1)
    guess = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(SECTIONS)}"
    return f"{name}: no section [{section}]; {guess}"


def check_value(name: str, value: Any) -> tuple[Any, str | None]:
    """Return (the value in the key's own type, None), or (anything, the problem with the value)."""
    rule: Rule = KEYS[name].metadata["rule"]
    kind = type_of(name)
    whole = type(value) is int
    if kind is int:
        right = whole
    elif kind is float:
        right = (whole or type(value) is float) and abs(value) <= sys.float_info.max  # not NaN
        value = float(value) if right else value
    elif kind in (tuple[int, ...], tuple[str, ...]):
        of, least = (int, 1) if kind == tuple[int, ...] else (str, 0)
        right = (
            isinstance(value, list | tuple)
            and len(value) >= least
            and all(type(v) is of for v in value)
        )
        value = tuple(value) if right else value
    else:
        right = type(value) is kind
    if not right:
        return value, f"{name} is {shown(value)}: must be {TYPE_WORDS[kind]}{_range_suffix(rule)}"
    if not all(_fits(rule, v) for v in (value if isinstance(value, tuple) else [value])):
        each = "each must be" if isinstance(value, tuple) else "must be"
        return (
            value,
            f"{name} is {shown(value)}: {each} {rule.wanted()}{_nearest_choice(rule, value)}",
        )
    if whole and kind is int and value not in _INT64:
        return value, f"{name} is {shown(value)}: must be below 2^63"
    if kind is str and "\0" in value:
        return value, f"{name} is {shown(value)}: must not hold the character NUL"
    return value, None


def problems_of_values(raw: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Check names, types and ranges of {section: {key: value}}.

    Returns typed values and one line per problem.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    problems = []
    for name, value in _flatten(raw):
        problem = unknown_key(name)
        if problem is None:
            value, problem = check_value(name, value)
            section, _, key = name.partition(".")
            values[section][key] = value
        if problem is not None:
            problems.append(problem)
    for name, field in KEYS.items():
        section, _, key = name.partition(".")
        if field.default is REQUIRED and key not in values[section]:
            problems.append(
                f"{name} is missing: set {name}=... {field.metadata['rule'].description}"
            )
    return values, problems


def problems_of_fit(config: Config) -> list[Problem]:
    """The problems of keys that are right by themselves but do not fit together."""
    return [
        *_problems_of_model(config.model),
        *_problems_of_steps(config),
        *_problems_of_redundancy(config),
        *_problems_of_evaluations(config),
        *_problems_of_what_is_kept(config),
        *_problems_of_device(config),
        *_problems_of_flip(config),
        *_problems_of_rejoin(config),
        *_problems_of_gpu_fault(config),
    ]


def _problems_of_rejoin(config: Config) -> list[Problem]:
    kind = config.kind
    if not config.cluster.rejoin or (kind.keeps_deltas and kind.exact):
        return []
    return [
        _problem(
            "cluster.rejoin brings lost hosts back, and protection.name is "
            f"{config.protection.name}, which admits no rank",
            {"cluster.rejoin": False},
            WITH_PARITY,
        )
    ]


def _problems_of_model(model: ModelConfig) -> list[Problem]:
    problems = []
    if model.architecture != "two_tower" and model.bottom_mlp[-1] != model.embedding_dim:
        problems.append(
            _problem(
                f"model.bottom_mlp ends in {model.bottom_mlp[-1]}, "
                f"but model.embedding_dim is {model.embedding_dim}",
                {"model.bottom_mlp": (*model.bottom_mlp[:-1], model.embedding_dim)},
                {"model.embedding_dim": model.bottom_mlp[-1]},
            )
        )
    if model.interaction == "native" and model.architecture != "dlrm":
        problems.append(
            _problem(
                f"model.dense_arch is native, but model.architecture is {model.architecture}, "
                "which has TorchRec's modules alone",
                {"model.dense_arch": "auto"},
                {"model.architecture": "dlrm"},
            )
        )
    if model.top_mlp[-1] != 1:
        problems.append(
            _problem(
                f"model.top_mlp ends in {model.top_mlp[-1]}, must end in 1, the logit",
                {"model.top_mlp": (*model.top_mlp, 1)},
            )
        )
    if model.max_rows_per_table == 1:
        problems.append(
            _problem(
                "model.max_rows_per_table is 1: must be 0, for no cap, "
                "or at least 2 (one row is the missing value's)",
                {"model.max_rows_per_table": 0},
            )
        )
    return problems


def _problems_of_steps(config: Config) -> list[Problem]:
    """Steps, batches, slots and the number of ranks."""
    train, cluster = config.train, config.cluster
    problems = []
    if train.steps and train.epochs:
        problems.append(
            _problem(
                f"train.steps is {train.steps} and train.epochs is {show(train.epochs)}, "
                "of which one may be given",
                {"train.epochs": 0},
                {"train.steps": 0},
            )
        )
    if not train.steps and not train.epochs:
        problems.append(_problem("train.steps and train.epochs are both 0", {"train.epochs": 1}))
    if config.slots < cluster.trainers:
        problems.append(
            _problem(
                f"train.slots is {config.slots}, fewer than the {cluster.trainers} trainers",
                {"train.slots": cluster.trainers},
                {"cluster.trainers": config.slots},
            )
        )
    if config.world_size > MAX_RANKS:
        problems.append(
            _problem(
                f"{config.ranks_in_words} make {config.world_size} ranks, more than {MAX_RANKS}",
                *_fewer_ranks(config),
            )
        )
    if train.global_batch % config.slots:
        below = train.global_batch // config.slots * config.slots
        problems.append(
            _problem(
                f"train.global_batch is {train.global_batch}, "
                f"not a multiple of the {config.slots} slots",
                {"train.global_batch": below or config.slots},
            )
        )
    return problems


def _problems_of_redundancy(config: Config) -> list[Problem]:
    """Requirements of a protection on the ranks, and of scrubbing on the protection."""
    protection, servers = config.protection, config.cluster.servers
    wrong = config.kind.wrong(protection, servers, config.world_size)
    problems = [_problem(said, *ways_out) for said, ways_out in wrong]
    # m+1 dense replicas always fit: world_size >= cluster.servers >= k+m >= m+1
    if protection.scrub_rows_per_step and not config.kind.parity:
        problems.append(
            _problem(
                f"protection.scrub_rows_per_step is {protection.scrub_rows_per_step}, "
                f"but protection.name is {protection.name}, which keeps no parity to compare with",
                WITH_PARITY,
                {"protection.scrub_rows_per_step": 0},
            )
        )
    return problems


def _problems_of_evaluations(config: Config) -> list[Problem]:
    """Keys that need train.eval_every_steps and data.eval_fraction."""
    train = config.train
    problems = []
    if not train.eval_every_steps or not config.data.eval_fraction:
        wrong = "train.eval_every_steps" if not train.eval_every_steps else "data.eval_fraction"
        right = {wrong: 100 if not train.eval_every_steps else 0.1}
        for name, value, off in (
            ("checkpoint.keep_best", config.checkpoint.keep_best, "none"),
            (
                "train.stop_after_evaluations_without_gain",
                train.stop_after_evaluations_without_gain,
                0,
            ),
        ):
            if value != off:
                problems.append(
                    _problem(
                        f"{name} is {show(value)}, which goes by evaluations while training, "
                        f"but {wrong} is 0",
                        right,
                        {name: off},
                    )
                )
    return problems


def _problems_of_what_is_kept(config: Config) -> list[Problem]:
    """Requirements of a protection on checkpoints."""
    protection = config.protection
    problems = []
    if config.kind.needs_checkpoints and not (
        config.checkpoint.every_steps or config.checkpoint.every_minutes
    ):
        problems.append(
            _problem(
                f"protection.name is {protection.name}, which restores what is lost from "
                "checkpoints, but checkpoint.every_steps and checkpoint.every_minutes are both 0",
                {"checkpoint.every_steps": 100},
                {"checkpoint.every_minutes": 10},
            )
        )
    if config.kind.rows_in_files and config.cluster.whole_tables:
        problems.append(
            _problem(
                f"cluster.placement is tables, but protection.name is {protection.name}, whose "
                "files hold rows in the order of rows",
                {"cluster.placement": "rows"},
                WITH_PARITY,
            )
        )
    if config.kind.rows_in_files and config.checkpoint.keep_best != "none":
        problems.append(
            _problem(
                f"checkpoint.keep_best is {config.checkpoint.keep_best}, but protection.name is "
                f"{protection.name}: a run that goes on from mapped files does not know which "
                "evaluation was the best",
                {"checkpoint.keep_best": "none"},
                WITH_PARITY,
            )
        )
    return problems


def _problem(wrong: str, *ways_out: Mapping[str, Any]) -> Problem:
    """A problem with only the ways out whose values are allowed."""
    return Problem(
        wrong,
        tuple(
            way for way in ways_out if all(check_value(*entry)[1] is None for entry in way.items())
        ),
    )


def _fewer_ranks(config: Config) -> list[dict[str, int]]:
    """Ways to stay within MAX_RANKS: fewer ranks of one role, or of all roles if need be."""
    cluster, surplus = config.cluster, config.world_size - MAX_RANKS
    if cluster.layout == "colocated":
        return [{"cluster.spares": cluster.spares - surplus}]
    counts = {
        "cluster.servers": cluster.servers,
        "cluster.trainers": cluster.trainers,
        "cluster.spares": cluster.spares,
    }
    if any(count > surplus for count in counts.values()):
        return [{name: count - surplus} for name, count in counts.items()]
    servers = min(cluster.servers, MAX_RANKS - 1)
    trainers = min(cluster.trainers, MAX_RANKS - servers)
    return [
        {
            "cluster.servers": servers,
            "cluster.trainers": trainers,
            "cluster.spares": MAX_RANKS - servers - trainers,
        }
    ]


def _problems_of_device(config: Config) -> list[Problem]:
    """Keys that do not fit rows on a GPU, and keys that need a GPU."""
    storage, on_cpu = config.storage, {"storage.device": "cpu"}
    if storage.device == config.train.device == "cpu":
        found = [
            (config.testing.imitated_gpu, "testing.imitated_gpu is true", "testing.imitated_gpu"),
            (
                config.kernels.backend != "auto",
                f"kernels.backend is {config.kernels.backend}",
                "kernels.backend",
            ),
        ]
        default: dict[str, Any] = {"testing.imitated_gpu": False, "kernels.backend": "auto"}
        return [
            _problem(
                f"{said}, but storage.device and train.device are cpu: there is no GPU to use",
                {name: default[name]},
                {"storage.device": "cuda"},
                {"train.device": "cuda"},
            )
            for wrong, said, name in found
            if wrong
        ]
    if storage.device == "cpu":
        return []
    said = "storage.device is cuda"
    problems = []
    if storage.prefault:
        problems.append(
            _problem(
                f"{said}, but storage.prefault is true: all of a GPU's memory is taken at the "
                "start anyway",
                {"storage.prefault": False},
                on_cpu,
            )
        )
    if config.kind.rows_in_files:
        problems.append(
            _problem(
                f"{said}, but protection.name is {config.protection.name}: rows are in files",
                WITH_PARITY,
                on_cpu,
            )
        )
    return problems


def _problems_of_flip(config: Config) -> list[Problem]:
    text, servers, steps = config.testing.flip, config.cluster.servers, config.train.steps
    if not text:
        return []
    flip = parse_flip(text)
    said = f"testing.flip is {show(text)}"
    if flip is None:
        return [
            _problem(
                f"{said}: must be RANK@STEP:row, RANK@STEP:state or RANK@STEP:parity",
                {"testing.flip": "0@1:row"},
            )
        ]
    if flip.rank >= servers:
        return [
            _problem(
                f"{said}: rank {flip.rank} is no server, servers are ranks 0 to {servers - 1}",
                {"testing.flip": f"{servers - 1}@{flip.step}:{flip.kind}"},
            )
        ]
    if steps and flip.step >= steps:
        return [
            _problem(
                f"{said}: there is no step {flip.step}, the last is {steps - 1}",
                {"testing.flip": f"{flip.rank}@{steps - 1}:{flip.kind}"},
            )
        ]
    row = {"testing.flip": f"{flip.rank}@{flip.step}:row"}
    if flip.kind == "parity" and not config.kind.parity:
        return [
            _problem(
                f"{said}, but protection.name is {config.protection.name}: there is no parity", row
            )
        ]
    if flip.kind == "state" and config.train.sparse_optimizer == "sgd":
        return [_problem(f"{said}, but train.sparse_optimizer is sgd: it keeps no state", row)]
    return []


def _problems_of_gpu_fault(config: Config) -> list[Problem]:
    text = config.testing.gpu_fault
    if not text:
        return []
    said, none = f"testing.gpu_fault is {show(text)}", {"testing.gpu_fault": ""}
    fault = parse_gpu_fault(text)
    if fault is None:
        return [
            _problem(
                f"{said}: must be RANK@STEP:PHASE:memory, RANK@STEP:PHASE:lost or "
                "RANK@STEP:PHASE:hang",
                {"testing.gpu_fault": "0@1:update:lost"},
            )
        ]
    if not config.testing.imitated_gpu:
        return [_problem(f"{said}, but testing.imitated_gpu is false: no other GPU fails so", none)]
    return []


def _flatten(raw: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for section, values in raw.items():
        if isinstance(values, Mapping):
            if not values and section not in SECTIONS:
                yield f"{section}.", {}
            for key, value in values.items():
                yield f"{section}.{key}", value
        else:
            yield section, values


def _likeness(name: str, other: str) -> float:
    """The likeness of `other` to a mistyped `name`.

    The key counts for 1, a near section adds up to 0.2.
    """
    section, _, key = name.rpartition(".")
    other_section, _, other_key = other.rpartition(".")
    alike = difflib.SequenceMatcher(None, key, other_key).ratio()
    if key in other_key.split("_"):
        alike = max(alike, 0.7)
    if alike < 0.6:
        return 0.0
    return alike + 0.2 * difflib.SequenceMatcher(None, section, other_section).ratio()


def _keys_of(section: str) -> str:
    return ", ".join(field.name for field in dataclasses.fields(SECTIONS[section]))


def _fits(rule: Rule, value: Any) -> bool:
    if rule.choices:
        return value in rule.choices
    return (
        (rule.above is None or value > rule.above)
        and (rule.minimum is None or value >= rule.minimum)
        and (rule.maximum is None or value <= rule.maximum)
        and (rule.multiple_of is None or value % rule.multiple_of == 0)
    )


def _range_suffix(rule: Rule) -> str:
    return f", {rule.wanted()}" if rule.wanted() else ""


def _nearest_choice(rule: Rule, value: Any) -> str:
    near = difflib.get_close_matches(value, rule.choices, n=1) if rule.choices else []
    return f"; did you mean {near[0]}?" if near else ""
