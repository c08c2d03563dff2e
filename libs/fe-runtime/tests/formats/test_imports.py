from __future__ import annotations

import subprocess
import sys

import fe_runtime.formats

NUMPY_ALONE = """
import sys
for name in ("torch", "jax", "jaxlib", "cutlass", "tvm_ffi"):
    sys.modules[name] = None  # an import of it fails
import numpy as np
from fe_runtime import formats
x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
elements, scales = formats.quantize_mx(x, "float4_e2m1fn")
blocked = formats.to_blocked(scales)
plain = formats.from_blocked(formats.blocked_view(blocked, "logical"), 2, 1)[0]
assert np.abs(formats.dequantize(elements, plain) - x).max() <= 0.5
"""

LOADS_NOTHING = """
import sys
import fe_runtime.formats
loaded = {"torch", "jax", "jaxlib", "cutlass", "cuda", "triton", "tvm_ffi"} & set(sys.modules)
assert not loaded, loaded
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_numpy_is_enough() -> None:
    run(NUMPY_ALONE)


def test_no_framework_is_loaded() -> None:
    run(LOADS_NOTHING)


def test_every_public_name_exists() -> None:
    assert sorted(fe_runtime.formats.__all__, key=str.lower) == sorted(set(fe_runtime.formats.__all__), key=str.lower)
    for name in fe_runtime.formats.__all__:
        assert getattr(fe_runtime.formats, name) is not None
