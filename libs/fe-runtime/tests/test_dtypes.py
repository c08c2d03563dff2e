"""Canonical dtype names and their translation."""

import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fe_runtime.dtypes import DTYPES, bits, canonical_dtype, framework_dtype

PLAIN = [name for name in DTYPES if not name.startswith("float4")]


@pytest.mark.parametrize("name", PLAIN)
def test_every_framework_spells_a_plain_dtype_by_its_name(name: str) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, name, name))
    spellings = [name, getattr(torch, name), numpy_dtype, numpy_dtype.type]
    spellings.append(getattr(jnp, "bool_" if name == "bool" else name))
    assert [canonical_dtype(spelling) for spelling in spellings] == [name] * 5


def test_fp4_spellings() -> None:
    assert canonical_dtype(torch.float4_e2m1fn_x2) == "float4_e2m1fn_x2"
    assert canonical_dtype(ml_dtypes.float4_e2m1fn) == "float4_e2m1fn"
    assert canonical_dtype(jnp.float4_e2m1fn) == "float4_e2m1fn"


def test_python_bool_is_a_dtype_name() -> None:
    assert canonical_dtype(bool) == "bool"


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(None, id="None"),
        pytest.param("half", id="alias"),
        pytest.param("Float32", id="capital"),
        pytest.param(float, id="python float"),
        pytest.param(int, id="python int"),
        pytest.param(torch.complex64, id="torch complex"),
        pytest.param(torch.float8_e4m3fnuz, id="torch fnuz"),
        pytest.param(np.dtype(">f4"), id="big endian"),
        pytest.param(np.dtype("complex128"), id="numpy complex"),
        pytest.param(np.dtype([("a", "f4")]), id="structured"),
        pytest.param(np.uint16, id="numpy uint16"),
        pytest.param([1], id="unhashable"),
        pytest.param(np.zeros(3, np.float32), id="numpy array"),
        pytest.param(torch.zeros(3), id="tensor"),
        pytest.param(3, id="number"),
        pytest.param(object(), id="object"),
        pytest.param(str, id="class"),
    ],
)
def test_anything_else_is_refused(unknown: object) -> None:
    with pytest.raises(ValueError, match="canonical_dtype: dtype must be a known dtype"):
        canonical_dtype(unknown)


def test_a_refused_dtype_stays_refused_when_asked_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="complex64"):
            canonical_dtype(torch.complex64)


# Types of the DSL are recognised by where their class was defined, so stand-ins serve and nothing heavy is imported.
@pytest.mark.parametrize(
    ("dsl_name", "name"),
    [
        ("BFloat16", "bfloat16"),
        ("Float16", "float16"),
        ("Float32", "float32"),
        ("Float8E4M3FN", "float8_e4m3fn"),
        ("Float8E5M2", "float8_e5m2"),
        ("Float8E8M0FNU", "float8_e8m0fnu"),
        ("Float4E2M1FN", "float4_e2m1fn"),
        ("Uint8", "uint8"),
        ("Int64", "int64"),
        ("Boolean", "bool"),
    ],
)
def test_dsl_types(dsl_name: str, name: str) -> None:
    assert canonical_dtype(type(dsl_name, (), {"__module__": "cutlass.base_dsl.typing"})) == name


def test_other_dsl_types_and_instances_are_refused() -> None:
    unknown = type("TFloat32", (), {"__module__": "cutlass.base_dsl.typing"})
    number = type("Float32", (), {"__module__": "cutlass.base_dsl.typing"})()
    for dtype in (unknown, number):
        with pytest.raises(ValueError, match="known dtype"):
            canonical_dtype(dtype)


def test_the_real_dsl_types_have_the_names_that_the_stand_ins_use() -> None:
    import cutlass

    assert canonical_dtype(cutlass.Float8E8M0FNU) == "float8_e8m0fnu"
    assert canonical_dtype(cutlass.Float4E2M1FN) == "float4_e2m1fn"
    assert canonical_dtype(cutlass.Boolean) == "bool"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
def test_framework_dtype_inverts_canonical_dtype(name: str, framework: str) -> None:
    found = framework_dtype(name, framework)
    assert canonical_dtype(found) == name
    assert isinstance(found, torch.dtype if framework == "torch" else np.dtype)


def test_framework_dtype_of_fp4() -> None:
    assert framework_dtype("float4_e2m1fn", "torch") is torch.float4_e2m1fn_x2
    assert framework_dtype("float4_e2m1fn_x2", "torch") is torch.float4_e2m1fn_x2
    assert framework_dtype("float4_e2m1fn_x2", "numpy") == np.dtype("uint8")
    assert framework_dtype("float4_e2m1fn", "numpy") == np.dtype(ml_dtypes.float4_e2m1fn)
    for name in ("float4_e2m1fn", "float4_e2m1fn_x2"):
        with pytest.raises(ValueError, match="uint8 in jax"):
            framework_dtype(name, "jax")


def test_framework_dtype_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from fe_runtime import dtypes

    with pytest.raises(ValueError, match="framework must be 'torch', 'jax' or 'numpy'; got 'tensorflow'"):
        framework_dtype("float32", "tensorflow")
    with pytest.raises(ValueError, match="known dtype"):
        framework_dtype("float33", "numpy")
    monkeypatch.delattr(torch, "float8_e8m0fnu")  # an old torch
    monkeypatch.setattr(dtypes, "_framework_dtypes", {})
    with pytest.raises(ValueError, match=r"Install a torch that has torch\.float8_e8m0fnu"):
        framework_dtype("float8_e8m0fnu", "torch")


@pytest.mark.parametrize("name", DTYPES)
def test_bits_agree_with_what_the_frameworks_store(name: str) -> None:
    if name == "float4_e2m1fn":
        assert bits(name) == 4
    else:
        assert bits(name) == 8 * getattr(torch, name).itemsize
    with pytest.raises(ValueError, match="known dtype"):
        bits("int4")


def test_numpy_and_jax_dtypes_need_no_jax() -> None:
    program = (
        "import sys; from fe_runtime.dtypes import framework_dtype; "
        "framework_dtype('bfloat16', 'jax'); framework_dtype('float8_e4m3fn', 'numpy'); "
        "sys.exit('torch' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
