"""Where the public names are found, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fe_conv


def test_operations_are_the_same_objects_under_each_of_their_names() -> None:
    from fe_conv import compat, ops

    assert fe_conv.ops.causal_conv1d is fe_conv.causal_conv1d
    assert compat.ops is ops
    assert compat.ops.causal_conv1d is fe_conv.causal_conv1d
    assert compat.ops.causal_conv1d_update is fe_conv.causal_conv1d_update
    assert compat.fla is fe_conv.fla


@pytest.mark.parametrize(
    "before",
    ["", "import fe_conv.sequence", "import fe_conv.reference.causal_conv1d", "from fe_conv import ops, compat"],
    ids=["nothing", "the implementation", "the reference of that name", "the other namespaces"],
)
def test_the_attribute_is_always_the_callable(before: str) -> None:
    code = f"""
{before}
import fe_conv, fe_conv.ops
for home in (fe_conv, fe_conv.ops, fe_conv.compat.ops):
    assert callable(home.causal_conv1d) and home.causal_conv1d.__name__ == "causal_conv1d"
import fe_conv.sequence, fe_conv.reference.causal_conv1d
assert callable(fe_conv.causal_conv1d) and callable(fe_conv.ops.causal_conv1d)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists_and_is_listed() -> None:
    for module in (fe_conv, fe_conv.ops, fe_conv.compat):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name in dir(module)


def test_numpy_arrays_load_no_framework() -> None:
    code = """
import sys, numpy as np, fe_conv
assert not {"torch", "jax", "cutlass"} & set(sys.modules)
y = fe_conv.causal_conv1d(np.ones((1, 2, 5)), np.ones((2, 3)), activation="silu")
assert y.shape == (1, 2, 5)
assert not {"torch", "jax", "cutlass", "triton", "cuda", "tvm_ffi"} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
