"""The Triton kernels compile for a GPU, on machines without one too.

The compiler neither fuses nor approximates operations whose results must be exact.
"""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ecrm.kernels.decode.triton import _multiply
from ecrm.kernels.parity_apply.triton import _add_rows
from ecrm.kernels.sparse_update.triton import _update

FLOATS = ("lr", "eps", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2")
FLOATS += ("correction1", "correction2", "l2", "keep")

def assembly(kernel, pointers, constants, **options):
    types = {name: "fp32" if name in FLOATS else "i32" for name in kernel.arg_names}
    types |= {name: "*" + element for name, element in pointers.items()}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]

words = {"parity": "i32", "delta": "i32", "sorted_rows": "i64", "order": "i64"}
words |= {"coefficients": "u8"}
print(len(assembly(_add_rows, words, {"BLOCK": 64}, num_warps=1)))
print(len(assembly(_multiply, {"units": "u8", "out": "u8", "matrix": "u8"}, {"BLOCK": 1024})))
for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam"):
    pointers = {"weights": "fp32", "state0": "fp32", "state1": "fp32"}
    pointers |= {"rows": "i64", "gradients": "fp32"}
    pointers |= {"weights_change": "i32", "state0_change": "i32", "state1_change": "i32"}
    constants = {"OPTIMIZER": optimizer, "WITH_L2": True, "WITH_DELTA": True, "ROWS": 16}
    print("//", optimizer)
    print(assembly(_update, pointers, constants, num_warps=4, enable_fp_fusion=False))
"""


def test_kernels_compile_and_round_every_operation():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    pieces = re.split(r"^// (sgd|rowwise_adagrad|adagrad|adam)$", done.stdout, flags=re.M)[1:]
    parts = dict(zip(pieces[::2], pieces[1::2]))
    fused = {
        name: len(re.findall(r"\bfma\.rn\.f(?:32|64)", text)) > 0 for name, text in parts.items()
    }
    assert fused == {"sgd": True, "rowwise_adagrad": False, "adagrad": True, "adam": False}
    for text in parts.values():
        assert not re.findall(r"\b\w+\.(?:approx|full)[.\w]*", text)
        assert not re.findall(r"\b\w+[.\w]*\.ftz[.\w]*", text)
