"""Backends and instruction sets are chosen by name, reported, and never replaced quietly."""

import ctypes
import platform
import subprocess
import sys

import pytest
import torch

from ecrm.base.errors import UsageError
from ecrm.config.check import KEYS
from ecrm.kernels import dispatch, native
from ecrm.kernels.parity_apply import parity_apply


def call(backend):
    parity, delta = torch.zeros(1, 4, dtype=torch.uint8), torch.ones(1, 4, dtype=torch.uint8)
    parity_apply(parity, torch.tensor([0]), 1, delta, backend)


def test_auto_takes_the_best_instruction_set_and_says_so():
    call("auto")
    assert dispatch.taken()["parity_apply"] == f"cpu ({native.supported_instruction_sets()[-1]})"
    call("reference")
    assert dispatch.taken()["parity_apply"] == "reference"


def test_each_supported_set_can_be_forced_and_is_put_back():
    before = native.instruction_set()
    for name in native.supported_instruction_sets():
        with native.forced(name):
            call("cpu")
            assert native.instruction_set() == name
            assert dispatch.taken()["parity_apply"] == f"cpu ({name})"
        assert native.instruction_set() == before


def test_a_set_that_the_machine_lacks_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="'sse9' cannot run here; this machine has portable"):
        with native.forced("sse9"):
            pass
    monkeypatch.setattr(native, "supported_instruction_sets", lambda: ("portable",))
    with pytest.raises(ValueError, match="'gfni' cannot run here; this machine has portable$"):
        with native.forced("gfni"):
            pass


def test_a_config_names_a_set_that_stays_in_use(monkeypatch):
    # not before test_kernels_triton.py has told Triton, which it may import, to interpret
    from ecrm.run.inputs import use_instruction_set

    assert [*KEYS["kernels.instruction_set"].metadata["rule"].choices] == [
        "auto",
        *native.INSTRUCTION_SETS,
    ]
    best = native.instruction_set()
    use_instruction_set("auto")
    assert native.instruction_set() == best
    try:
        use_instruction_set("portable")
        use_instruction_set("auto")  # what is in use already
        assert native.instruction_set() == "portable"
    finally:
        native.use(best)
    monkeypatch.setattr(native, "supported_instruction_sets", lambda: ("portable",))
    with pytest.raises(
        UsageError,
        match="^kernels.instruction_set is gfni: .* this machine has portable: set "
        "kernels.instruction_set=auto$",
    ):
        use_instruction_set("gfni")


def test_the_sets_found_are_those_of_the_machine():
    if platform.machine() != "x86_64":
        assert native.supported_instruction_sets() == ("portable",)
        return
    flags = next(line for line in open("/proc/cpuinfo") if line.startswith("flags")).split()
    needed = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "gfni": {"gfni"},
    }
    found = ["portable"]
    for name, wanted in needed.items():
        if not wanted <= set(flags):
            break
        found.append(name)
    assert native.supported_instruction_sets() == tuple(found)


def test_a_library_that_was_not_built_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    for cached in (native.built, native.library):
        cached.cache_clear()
    try:
        with pytest.raises(OSError, match="not built.*pip install"):
            call("auto")
        with pytest.raises(OSError, match="not built"):
            call("cpu")
        call("reference")
    finally:
        for cached in (native.built, native.library):
            cached.cache_clear()


def test_the_library_holds_no_python_and_exports_only_its_entries():
    exported = ctypes.CDLL(str(native.LIBRARY))
    assert not hasattr(exported, "PyInit__native")
    for name in native._SIGNATURES:
        assert hasattr(exported, name)


def test_triton_on_cpu_tensors_needs_its_interpreter():
    code = (
        "import torch\n"
        "from ecrm.kernels.parity_apply import parity_apply\n"
        "z = torch.zeros(1, 4, dtype=torch.uint8)\n"
        "try: parity_apply(z, torch.tensor([0]), 1, z.clone(), backend='triton')\n"
        "except ValueError as error: print(error)\n"
        "import sys; print('triton' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={}
    )
    assert output.stdout.splitlines() == [
        "parity_apply: backend 'triton' was given CPU tensors; only TRITON_INTERPRET=1 allows that",
        "False",
    ]
