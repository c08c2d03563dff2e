"""Frameworks are recognised from what is loaded, and never loaded to find out."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fe_runtime.arrays import (
    detect_framework,
    is_fake,
    is_jax_array,
    is_numpy_array,
    is_plain_torch_tensor,
    is_torch_tensor,
    is_tracer,
)


class Subclass(torch.Tensor):
    pass


def test_real_arrays() -> None:
    assert detect_framework(torch.zeros(2)) == "torch"
    assert detect_framework(torch.nn.Parameter(torch.zeros(2))) == "torch"
    assert detect_framework(torch.zeros(2).as_subclass(Subclass)) == "torch"
    assert detect_framework(jnp.zeros(2)) == "jax"
    assert detect_framework(np.zeros(2)) == "numpy"
    assert detect_framework(np.zeros(2, ml_dtypes.bfloat16)) == "numpy"


@pytest.mark.parametrize("other", [None, 1, 2.0, "x", [1], (1,), {}, np.float32(1), object(), torch, torch.Tensor])
def test_everything_else_is_unknown(other: object) -> None:
    assert detect_framework(other) == "unknown"


def test_a_tracer_is_jax_and_a_tracer() -> None:
    seen: list[object] = []

    def f(x: Any) -> Any:
        seen.extend([detect_framework(x), is_tracer(x), is_jax_array(x)])
        return x

    jax.jit(f)(jnp.zeros(2))
    assert seen == ["jax", True, True]
    assert not is_tracer(jnp.zeros(2))
    assert not is_tracer(torch.zeros(2))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert is_fake(torch.zeros(2))
    assert is_fake(torch.zeros(2, device="meta"))
    assert not is_fake(torch.zeros(2))
    assert not is_fake(np.zeros(2))


def test_plain_torch_tensors() -> None:
    assert is_plain_torch_tensor(torch.zeros(2))
    assert is_plain_torch_tensor(torch.nn.Parameter(torch.zeros(2)))
    assert not is_plain_torch_tensor(torch.zeros(2).as_subclass(Subclass))
    assert not is_plain_torch_tensor(torch.zeros(2, device="meta"))
    assert not is_plain_torch_tensor(torch.zeros(2, dtype=torch.complex64).conj().imag)  # a lazily negated view
    assert not is_plain_torch_tensor(np.zeros(2))
    with FakeTensorMode():
        assert not is_plain_torch_tensor(torch.zeros(2))


def test_tensors_inside_torch_func_are_not_plain() -> None:
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(is_plain_torch_tensor(x)) or x)(torch.zeros(3, 2))
    assert seen == [False]


class TestFakeModules:
    """Stand-ins in ``sys.modules``: each framework is asked under its own name, and half-imported ones are harmless."""

    @pytest.mark.parametrize(
        ("module", "name", "predicate"),
        [("torch", "Tensor", is_torch_tensor), ("jax", "Array", is_jax_array), ("numpy", "ndarray", is_numpy_array)],
    )
    def test_an_instance_of_the_loaded_class(
        self, monkeypatch: pytest.MonkeyPatch, module: str, name: str, predicate: Any
    ) -> None:
        stand_in = ModuleType(module)
        array_class = type(name, (), {})
        monkeypatch.setitem(sys.modules, module, stand_in)
        assert not predicate(array_class())  # the module is there, its class not yet
        setattr(stand_in, name, array_class)
        assert predicate(array_class())
        assert detect_framework(array_class()) == module
        monkeypatch.delitem(sys.modules, module)
        assert not predicate(array_class())
        monkeypatch.setitem(sys.modules, module, None)  # an import blocker
        assert not predicate(array_class())

    @pytest.mark.parametrize("home", ["jax", "jaxlib._jax", "jax._src.core"])
    def test_a_type_of_jax(self, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
        monkeypatch.delitem(sys.modules, "jax")
        assert detect_framework(type("ArrayImpl", (), {"__module__": home})()) == "jax"
        assert detect_framework(type("Array", (), {"__module__": home.replace("jax", "jaxtyping", 1)})()) == "unknown"


def test_asking_imports_nothing() -> None:
    program = """
import sys
from fe_runtime.arrays import detect_framework, describe, is_tracer, is_fake
class Foreign:
    shape, dtype = (2, 3), "float32"
    def __dlpack__(self): raise AssertionError
for x in (Foreign(), [1], 2):
    assert detect_framework(x) == "unknown" and not is_tracer(x) and not is_fake(x)
assert describe(Foreign()).stride == (3, 1)
heavy = {"torch", "jax", "numpy", "ml_dtypes", "cutlass", "cuda", "triton", "tvm_ffi"}
sys.exit(str(heavy & set(sys.modules) or ""))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.stderr.strip(), done.stderr
