"""Calls of ``gemm_swiglu`` and the comparison of their results with float64, for the tests of its front door."""

from __future__ import annotations

from typing import Any

import numpy as np
from dense_calls import plain
from naive_gemm import (
    E4M3,
    E5M2,
    FORMATS,
    LARGEST,
    STORED,
    Operand,
    accumulation_error,
    assert_within,
    gated,
    operand,
    product,
    sigmoid,
    storing_error,
    value_of,
)

from fe_gemm import gemm_swiglu_wrapper
from fe_runtime.testing import to_framework, to_numpy

M, N, K, L = 40, 128, 96, 2
KEYS = ["ab12_tensor", "c_tensor", "sfc_tensor", "amax_tensor"]
PLAIN = ("float16", "bfloat16", "float32", E4M3, E5M2)
KIND = {"float32": "float32", E4M3: "float8", E5M2: "float8"}


def floats(dtype: str = "bfloat16", m: int = M, n: int = N, k: int = K, batch: int = L, majors: str = "kk") -> Any:
    """A and B in numpy, and the product with its error in float64."""
    rng = np.random.default_rng(0)
    a = plain(rng, m, k, batch, STORED[dtype], 0.5, majors[0])
    b = plain(rng, n, k, batch, STORED[dtype], 0.5, majors[1])
    exact = value_of(a), value_of(b)
    return [a, b], product(*exact), accumulation_error(*exact, KIND.get(dtype, "bfloat16"))


def blocks(name: str = "mxfp8_e4m3", m: int = M, n: int = N, k: int = K, batch: int = L) -> tuple[Operand, Operand]:
    rng = np.random.default_rng(0)
    return operand(rng, m, k, batch, name, 0.25), operand(rng, n, k, batch, name, 0.25)


def vec(name: str) -> int:
    return FORMATS[name][2]


def to(framework: str, arrays: Any) -> list[Any]:
    return [to_framework(array, framework) for array in arrays]


def with_scales(arrays: list[Any], norm_const: Any = None) -> tuple[list[Any], dict[str, Any]]:
    named = {"sfa_tensor": arrays[2], "sfb_tensor": arrays[3]}
    if norm_const is not None:
        named["norm_const_tensor"] = norm_const
    return arrays[:2], named


def run(arrays: list[Any], norm_const: Any = None, **options: Any) -> Any:
    """Call the wrapper with the scaled operands of :func:`scaled`."""
    matrices, named = with_scales(arrays, norm_const)
    return gemm_swiglu_wrapper(*matrices, **named, **options)


def activation(x: Any) -> Any:
    up, gate = gated(x)
    return up * (gate * sigmoid(gate))


def activation_error(x: Any, error: Any) -> Any:
    (up, gate), (up_error, gate_error) = gated(x), gated(error)
    s = sigmoid(gate)
    through = np.abs(gate * s) * up_error + np.abs(up * s * (1 + gate * (1 - s))) * gate_error
    return through + 2.0**-20 * np.abs(up * gate * s) + 2.0**-119 * np.abs(up)


def check(result: Any, x: Any, error: Any) -> None:
    """Compare AB12 and C, and the maximum if there is one, with float64."""
    ab12, c, _, amax = (None if r is None else to_numpy(r) for r in result)
    name = ab12.dtype.name
    assert_within(value_of(ab12), x, storing_error(x, name) + error, name, "ab12")
    want, bound = activation(x), activation_error(x, error)
    name = c.dtype.name
    if name not in LARGEST:  # an fp8 C is quantised
        assert_within(value_of(c), want, storing_error(want, name) + bound, name, "c")
    if amax is not None:
        at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
        assert (amax.shape, amax.dtype) == ((1, 1, 1), np.float32)
        assert abs(amax.item() - abs(want[at])) <= 2.0**-16 * abs(want[at]) + bound[at]
