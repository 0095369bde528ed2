"""The shared library of the C++ backend: loading, and the choice of an instruction set.

Calls go through ctypes, which releases the GIL. The library has code for every instruction set, and
uses the best set of the machine. A test can force any set supported by the machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("_native.so")

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "gfni")
"""Instruction sets, in the order of the C++ enumeration.

"portable" is the only set on machines other than x86-64. The compiler turns "portable" into vector
instructions of the machine, such as NEON.
"""

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_COUNT = ctypes.c_uint64
_RANK = ctypes.c_uint32
_TIME = ctypes.c_double
_BYTES = ctypes.c_char_p
_SIGNATURES = {
    "ecrm_best_instruction_set": (ctypes.c_int, []),
    "ecrm_instruction_set": (ctypes.c_int, []),
    "ecrm_use_instruction_set": (ctypes.c_int, [ctypes.c_int]),
    "ecrm_first_outside": (_INT, [_POINTER, _INT, _INT]),
    "ecrm_parity_apply": (
        None,
        [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT],
    ),
    "ecrm_sparse_update": (None, [_POINTER]),
    "ecrm_sparse_update_logged": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT]),
    "ecrm_decode": (
        None,
        [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT],
    ),
    "ecrm_gather_records": (
        None,
        [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT],
    ),
    "ecrm_scatter_records": (
        None,
        [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER],
    ),
    "ecrm_xor_records": (
        None,
        [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT],
    ),
    "ecrm_merge_records": (
        _INT,
        [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT],
    ),
    "ecrm_unique_by_unit": (
        _INT,
        [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER],
    ),
    "ecrm_split_by_shard": (None, [_POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER]),
    "ecrm_split_by_unit": (ctypes.c_int, [_POINTER, _INT, _INT, _POINTER, _POINTER]),
    "ecrm_scatter_add": (
        None,
        [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER],
    ),
    "ecrm_first_bad_piece": (_INT, [_INT, _POINTER, _INT]),
    "ecrm_piece_addresses": (ctypes.c_int, [_POINTER, _INT, _POINTER, _INT]),
    "ecrm_bag_sum": (None, [_POINTER]),
    "ecrm_lengths_fit": (ctypes.c_int, [_POINTER, _INT, _INT]),
    "ecrm_copy_pieces": (None, [_POINTER, _POINTER, _INT]),
    "ecrm_order_parts": (
        _INT,
        [_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER],
    ),
    "ecrm_message_ends": (_INT, [_POINTER, _POINTER, _INT, _POINTER]),
    "ecrm_write_messages": (None, [_POINTER, _POINTER, _POINTER, _INT]),
    "ecrm_count_parts": (_INT, [_POINTER, _POINTER, _INT]),
    "ecrm_read_messages": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _POINTER]),
    "ecrm_divide": (ctypes.c_int, [_POINTER, _POINTER, _INT, ctypes.c_float]),
    "ecrm_segment_sum": (ctypes.c_int, [_POINTER]),
    "ecrm_uses_fit": (ctypes.c_int, [_POINTER, _INT, _POINTER, _INT]),
    "ecrm_row_digest": (None, [_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER]),
    "ecrm_dot_interaction_room": (_INT, [_INT, _INT]),
    "ecrm_dot_interaction": (
        None,
        [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER],
    ),
    "ecrm_dot_interaction_backward": (
        None,
        [
            _POINTER,
            _POINTER,
            _INT,
            _POINTER,
            _POINTER,
            _INT,
            _POINTER,
            _INT,
            _POINTER,
            _INT,
            _POINTER,
            _INT,
            _INT,
            _INT,
            _POINTER,
        ],
    ),
    "ecrm_hmac": (None, [_BYTES, _INT, _BYTES, _INT, _POINTER]),
    "ecrm_link_new": (_POINTER, [_BYTES, _BYTES, _INT, _RANK, _RANK, _POINTER]),
    "ecrm_link_free": (None, [_POINTER]),
    "ecrm_link_dialling": (None, [_POINTER, _TIME]),
    "ecrm_link_dialled": (None, [_POINTER, _TIME, _BYTES]),
    "ecrm_link_adopt": (ctypes.c_int, [_POINTER, _TIME, _COUNT, _COUNT]),
    "ecrm_link_broke": (None, [_POINTER, _TIME]),
    "ecrm_link_tick": (ctypes.c_int, [_POINTER, _TIME]),
    "ecrm_link_acknowledge_all": (None, [_POINTER]),
    "ecrm_link_send": (_COUNT, [_POINTER, _BYTES, _COUNT, ctypes.c_int]),
    "ecrm_link_take": (_POINTER, [_POINTER, _POINTER]),
    "ecrm_link_free_message": (None, [_POINTER]),
    "ecrm_link_begin_epoch": (ctypes.c_int, [_POINTER, _TIME, _COUNT, ctypes.c_int]),
    "ecrm_link_came": (ctypes.c_int, [_POINTER, _TIME, _BYTES, _COUNT]),
    "ecrm_link_gather": (_COUNT, [_POINTER, _POINTER, _COUNT]),
    "ecrm_link_wrote": (None, [_POINTER, _TIME, _COUNT]),
    "ecrm_link_wants_dial": (ctypes.c_int, [_POINTER, _TIME]),
    "ecrm_link_next": (_TIME, [_POINTER]),
    "ecrm_link_down": (_TIME, [_POINTER, _TIME]),
    "ecrm_link_figures": (None, [_POINTER, _POINTER]),
    "ecrm_reception_new": (_POINTER, [_BYTES, _BYTES, _INT, _RANK]),
    "ecrm_reception_free": (None, [_POINTER]),
    "ecrm_reception_wanted": (_COUNT, [_POINTER]),
    "ecrm_reception_came": (ctypes.c_int, [_POINTER, _BYTES, _COUNT]),
    "ecrm_reception_answer": (_COUNT, [_POINTER, _COUNT, _COUNT, _COUNT, _BYTES, _POINTER]),
    "ecrm_reception_figures": (None, [_POINTER, _POINTER]),
    "ecrm_carrier_new": (
        _POINTER,
        [_BYTES, _BYTES, _INT, _RANK, _RANK, _POINTER, _BYTES, _POINTER],
    ),
    "ecrm_carrier_free": (None, [_POINTER]),
    "ecrm_carrier_peer": (ctypes.c_int, [_POINTER, _RANK, _BYTES, ctypes.c_int]),
    "ecrm_carrier_begin_epoch": (None, [_POINTER, _COUNT, _BYTES]),
    "ecrm_carrier_lease": (ctypes.c_int, [_POINTER, _BYTES, ctypes.c_int, _TIME, _COUNT]),
    "ecrm_carrier_begin_lease": (None, [_POINTER, _TIME]),
    "ecrm_carrier_leased": (ctypes.c_int, [_POINTER]),
    "ecrm_carrier_news": (_COUNT, [_POINTER]),
    "ecrm_carrier_end_lease": (None, [_POINTER]),
    "ecrm_carrier_watch": (None, [_POINTER, ctypes.c_int]),
    "ecrm_carrier_send": (_COUNT, [_POINTER, _RANK, _POINTER, _COUNT, ctypes.c_int]),
    "ecrm_carrier_receive": (_POINTER, [_POINTER, _RANK, _POINTER, _TIME]),
    "ecrm_carrier_flush": (ctypes.c_int, [_POINTER, _TIME, _BYTES]),
    "ecrm_carrier_all_acked": (ctypes.c_int, [_POINTER, _TIME, _BYTES]),
    "ecrm_carrier_acknowledge_all": (None, [_POINTER]),
    "ecrm_carrier_down": (_TIME, [_POINTER, _RANK]),
    "ecrm_carrier_cut": (ctypes.c_int, [_POINTER, _RANK]),
    "ecrm_carrier_figures": (None, [_POINTER, _POINTER]),
    "ecrm_hash_uniform": (
        None,
        [ctypes.c_uint64, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER],
    ),
}


@cache
def built() -> bool:
    """Whether the library was built."""
    return LIBRARY.exists()


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises OSError, with the command to type, if the library is missing."""
    if not built():
        raise OSError(
            f"the C++ kernels are not built: {LIBRARY} is missing; "
            "run `pip install -e .` (needs g++)"
        )
    loaded = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


def instruction_set() -> str:
    """The instruction set in use."""
    return INSTRUCTION_SETS[library().ecrm_instruction_set()]


def supported_instruction_sets() -> tuple[str, ...]:
    """The instruction sets supported by the machine, the slowest first."""
    return INSTRUCTION_SETS[: library().ecrm_best_instruction_set() + 1]


def use(name: str) -> None:
    """Use an instruction set from now on, on all threads.

    Raises ValueError if the machine does not support the instruction set.
    """
    supported = supported_instruction_sets()
    if name not in supported:
        raise ValueError(
            f"instruction set {name!r} cannot run here; this machine has {', '.join(supported)}"
        )
    library().ecrm_use_instruction_set(INSTRUCTION_SETS.index(name))


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use an instruction set inside a block, on all threads.

    Raises ValueError if the machine does not support the instruction set.
    """
    before = instruction_set()
    use(name)
    try:
        yield
    finally:
        use(before)
