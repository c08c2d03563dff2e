"""Importing loads no framework, and the host side works where none is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

import fe_runtime

HEAVY = ("torch", "jax", "cutlass", "cuda", "triton", "tvm_ffi")
METADATA_MODULES = [
    *("arrays", "collect_env", "determinism", "device", "dtypes", "env", "errors", "experimental", "strides"),
    *("tensor_desc", "tuple_dict"),
]


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", METADATA_MODULES)
def test_importing_a_module_of_the_metadata_layer_loads_nothing_else(module: str) -> None:
    third_party = (*HEAVY, "numpy", "ml_dtypes", "platformdirs", "filelock")
    run(f"import sys, fe_runtime.{module}; loaded = set({third_party}) & set(sys.modules); assert not loaded, loaded")


def test_every_public_name_of_a_module_exists() -> None:
    names = "\n".join(
        f"import fe_runtime.{module} as m; [getattr(m, n) for n in m.__all__]" for module in METADATA_MODULES
    )
    run(names)


def test_metadata_layer_with_numpy_alone() -> None:
    run(
        f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None  # as if not installed
import numpy, ml_dtypes
from fe_runtime import arrays, determinism, dtypes, tensor_desc, tuple_dict
x = arrays.empty("numpy", (4, 8), "bfloat16", "cpu")
desc = arrays.describe(x, "x")
assert desc == tensor_desc.TensorDesc.of("bfloat16", (4, 8))
assert arrays.detect_framework(x) == "numpy" and not arrays.is_tracer(x) and not arrays.is_fake(x)
assert arrays.overlap(x, x[1:]) and arrays.alignment(x) == 16
assert dtypes.canonical_dtype(ml_dtypes.float8_e8m0fnu) == "float8_e8m0fnu"
assert arrays.resolve_stream(0, "numpy", desc.device) is None
with arrays.on_stream(None, [x]):
    pass
tuple_dict.register_pytrees()
assert determinism.resolve("op", None, has_path=True, framework="numpy") is False
try:
    arrays.empty("torch", (1,), "float32", "cpu")
except ImportError:
    pass
else:
    raise AssertionError("torch is blocked")
"""
    )


def test_package_is_typed() -> None:
    assert (Path(fe_runtime.__file__).parent / "py.typed").exists()
