"""``gemm_amax``: the reference against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from naive_gemm import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    LARGEST,
    VALUES,
    accumulation_error,
    assert_within,
    cast,
    encode,
    operand,
    product,
    storing_error,
    unpack,
    value_of,
)

from fe_gemm.reference import gemm_amax
from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
WIDE = ("float32", "float16", "bfloat16")


def pair(name: str, m: int, n: int, k: int, batch: int = 1, seed: int = 0, **known: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return operand(rng, m, k, batch, name, **known), operand(rng, n, k, batch, name, **known)


def arrays(a: Any, b: Any, framework: str = "numpy", major: str = "k") -> list[Any]:
    form = "physical" if framework == "jax" else "logical"
    given = (a.elements(major), b.elements(major), a.blocked(form, 1), b.blocked(form, 2))
    return [to_framework(x, framework) for x in given]


def values(c: Any, dtype: str) -> Any:
    """Return the values of C in float64."""
    return VALUES[E2M1][unpack(to_numpy(c), 1)] if dtype == E2M1 else value_of(to_numpy(c))


def outputs_of(name: str) -> tuple[str, ...]:
    return (*WIDE, E4M3, E5M2, *((E2M1,) if FORMATS[name][0] == E2M1 else ()))


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(1, 2, 32, 1), (37, 22, 100, 2), (130, 34, 320, 1)])
@pytest.mark.parametrize("size", [1.0, 2.0**-9])
@pytest.mark.parametrize("name", FORMATS)
def test_every_output_is_within_its_bound(name: str, size: float, m: int, n: int, k: int, batch: int) -> None:
    a, b = pair(name, m, n, k, batch, size=size)
    want, error = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    for dtype in outputs_of(name):
        c, amax = gemm_amax(*arrays(a, b), c_dtype=dtype, sf_vec_size=a.vec)
        assert_within(values(c, dtype), want, storing_error(want, dtype) + error, dtype)
        at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
        assert amax.shape == (1, 1, 1)
        assert amax.dtype == np.float32
        assert abs(amax.item() - abs(want[at])) <= 2.0**-16 * abs(want[at]) + error[at]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_integers_give_the_same_bytes(name: str, framework: str) -> None:
    a, b = pair(name, 40, 34, 72, whole=True)
    exact = product(a.exact(), b.exact())
    assert np.abs(exact).max() > LARGEST[E2M1]  # some saturate
    for dtype in outputs_of(name):
        c, amax = gemm_amax(*arrays(a, b, framework), c_dtype=dtype, sf_vec_size=a.vec)
        assert amax.item() == np.abs(exact).max()
        if dtype in LARGEST:
            codes = to_numpy(c).view(np.uint8)
            np.testing.assert_array_equal(unpack(codes, 1) if dtype == E2M1 else codes, encode(exact, dtype))
        else:
            np.testing.assert_array_equal(values(c, dtype), cast(exact, dtype))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overflow(framework: str) -> None:
    a, b = pair("mxfp8_e4m3", 4, 4, 32, whole=True)
    a.codes[:], b.codes[:], a.scales[:], b.scales[:] = 0x7E, 0x7E, 132, 132
    b.codes[0] |= 0x80
    exact = product(a.exact(), b.exact())
    assert np.abs(exact).min() > 65520
    for dtype, most in {E4M3: 448, E5M2: 57344, "float16": np.inf}.items():
        c, amax = gemm_amax(*arrays(a, b, framework), c_dtype=dtype)
        np.testing.assert_array_equal(values(c, dtype), np.sign(exact) * most)
        assert amax.item() == np.abs(exact).max()  # of the values before they were rounded


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_wins(framework: str) -> None:
    a, b = pair("mxfp8_e4m3", 6, 4, 64, whole=True)
    a.scales[2, 0, 0] = 0xFF
    for dtype in (*WIDE, E4M3, E5M2):
        c, amax = gemm_amax(*arrays(a, b, framework), c_dtype=dtype)
        assert np.isnan(amax.item())
        spoiled = np.isnan(values(c, dtype))
        assert spoiled[2].all()
        assert not np.delete(spoiled, 2, axis=0).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("m", "batch"), [(0, 1), (4, 0), (0, 0)])
def test_nothing_to_multiply(framework: str, m: int, batch: int) -> None:
    a, b = pair("nvfp4", m, 6, 32, batch)
    for dtype, columns in {"float32": 6, E2M1: 3, E5M2: 6}.items():
        c, amax = gemm_amax(*arrays(a, b, framework), c_dtype=dtype, sf_vec_size=16)
        assert tuple(c.shape) == (m, columns, batch)
        assert (tuple(amax.shape), amax.item()) == ((1, 1, 1), -np.inf)


@pytest.mark.parametrize("scale", [0.0, 1e-20])
def test_blocks_of_nothing_and_of_nearly_nothing(scale: float) -> None:
    a, b = pair("mxfp8_e4m3", 5, 7, 64)
    a.codes[:] = a.codes if scale else 0
    a.scales[:] = 127 - 66  # 2**-66 is about 1e-20
    c, amax = gemm_amax(*arrays(a, b))
    want, error = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    assert_within(value_of(c), want, error + storing_error(want, "float32"), "float32")
    assert (amax.item() > 0) == (scale > 0)


def test_container_and_pairs() -> None:
    a, b = pair("nvfp4", 5, 6, 32)
    pairs, _ = gemm_amax(*arrays(a, b, "torch"), c_dtype="float4_e2m1fn_x2", sf_vec_size=16)
    container, _ = gemm_amax(*arrays(a, b, "torch"), c_dtype="uint8", sf_vec_size=16)
    assert (pairs.dtype, container.dtype) == (torch.float4_e2m1fn_x2, torch.uint8)
    assert torch.equal(pairs.view(torch.uint8), container)
    assert pairs.stride() == container.stride() == (3, 1, 15)


@pytest.mark.parametrize("name", FORMATS)
def test_jit_and_eager_agree_bit_for_bit(name: str) -> None:
    a, b = pair(name, 40, 34, 100)
    given = arrays(a, b, "jax")
    for dtype in outputs_of(name):
        run = lambda *x: gemm_amax(*x, c_dtype=dtype, sf_vec_size=a.vec)  # noqa: B023, E731
        for eager, jitted in zip(run(*given), jax.jit(run)(*given), strict=True):
            assert to_numpy(eager).tobytes() == to_numpy(jitted).tobytes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hints_and_majors_change_nothing(framework: str) -> None:
    a, b = pair("mxfp8_e5m2", 16, 16, 64)
    hints = {"c_major": "m", "mma_tiler_mn": (256, 128), "cluster_shape_mn": (2, 1), "acc_dtype": "float32"}
    plain, hinted = gemm_amax(*arrays(a, b, framework)), gemm_amax(*arrays(a, b, framework), **hints)
    np.testing.assert_array_equal(to_numpy(plain[0]), to_numpy(hinted[0]))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", FORMATS)
def test_frameworks_agree(name: str, framework: str) -> None:
    a, b = pair(name, 33, 18, 100, size=0.25)
    error = accumulation_error(a.exact(), b.exact())
    want, want_amax = gemm_amax(*arrays(a, b), c_dtype="float32", sf_vec_size=a.vec)
    got, amax = gemm_amax(*arrays(a, b, framework), c_dtype="float32", sf_vec_size=a.vec)
    assert (np.abs(to_numpy(got) - want) <= error).all()
    np.testing.assert_allclose(amax.item(), want_amax.item(), rtol=1e-5)
