"""Use an installed library the way its first user does, and compare with a formula written here.

    python tools/smoke.py fe_norm numpy|torch|jax

Needs the library, numpy and (for the last two) the framework, nothing else; it imports nothing of the repository.
With ``numpy`` it also makes sure that the call has loaded no framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["OPERATIONS", "main"]

FRAMEWORKS = {"torch", "jax", "cutlass", "triton", "tvm_ffi", "cuda"}


def main(arguments: list[str] | None = None) -> int:
    """Import one library and call its operations on arrays of one framework; raise if anything is wrong."""
    library, framework = sys.argv[1:] if arguments is None else arguments
    module = importlib.import_module(library)
    installed = importlib.metadata.version(library.replace("_", "-"))
    if module.__version__ != installed:
        raise RuntimeError(f"{library}.__version__ is {module.__version__}; the installed version is {installed}")
    for operation in OPERATIONS.get(library, []):
        operation(module, _array_maker(framework))
    if framework == "numpy" and FRAMEWORKS & set(sys.modules):
        raise RuntimeError(f"{library} loaded {sorted(FRAMEWORKS & set(sys.modules))} for numpy arrays")
    print(f"{library} {installed} works with {framework}; operations tried: {len(OPERATIONS.get(library, []))}")
    return 0


def _rmsnorm_silu(fe_norm: Any, array: Callable[[Any], Any]) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, 96)).astype(np.float32), random.standard_normal(96).astype(np.float32)
    result = fe_norm.rmsnorm_silu_wrapper(array(x), array(w))["o_tensor"]
    if type(result) is not type(array(x)):
        raise TypeError(f"rmsnorm_silu returned {type(result)} for {type(array(x))}")
    wide = x.astype(np.float64)
    z = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * w
    # fp32 throughout: a few roundings of values that are below 10
    np.testing.assert_allclose(np.asarray(result), z / (1 + np.exp(-z)), rtol=1e-5, atol=1e-6)


def _array_maker(framework: str) -> Callable[[Any], Any]:
    if framework == "torch":
        return importlib.import_module("torch").from_numpy  # type: ignore[no-any-return]
    if framework == "jax":
        return importlib.import_module("jax.numpy").asarray  # type: ignore[no-any-return]
    return np.asarray


OPERATIONS: dict[str, list[Callable[[Any, Callable[[Any], Any]], None]]] = {"fe_norm": [_rmsnorm_silu]}

if __name__ == "__main__":
    sys.exit(main())
