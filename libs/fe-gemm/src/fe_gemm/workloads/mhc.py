"""``mhc_projection_backward`` as the ``fe`` command sees it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["MHC_PROJECTION_BACKWARD"]

INPUTS = ("x", "weight", "grad_proj", "grad_r", "r")
OPTIONS = {"allow_tf32": True}
PADDING = 8
"""Coefficients are padded to a multiple of this."""

TF32_PRODUCT = 2.0**-10 + 2.0**-16
"""What rounding both factors to TF32 and adding in float32 may change, relative to the products' sizes."""
TWO_TERMS = 2.0**-15 + 2.0**-18
"""What is lost of a coefficient that is split into two bf16 terms, and by adding products in float32."""


def _operands(case: Case) -> Operands:
    m, n, columns = (case.dims[letter] for letter in ("M", "N", "Kc"))
    return {
        "x": ((m, columns), case.dtype),
        "weight": ((n, columns), "float32"),
        "grad_proj": ((m, -(-n // PADDING) * PADDING), "float32"),
        "grad_r": ((m, 1), "float32"),
        "r": ((m, 1), "float32"),
    }


def _inputs(case: Case, source: Source) -> Arrays:
    operands, columns = _operands(case), case.dims["Kc"]
    return {
        "x": source.activations(*operands["x"]),
        "weight": source.normal(*operands["weight"], scale=columns**-0.5),
        "grad_proj": source.normal(*operands["grad_proj"]),
        "grad_r": source.normal(*operands["grad_r"], scale=columns**0.5),
        "r": source.weights(*operands["r"]),
    }


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, and what TF32 products, bf16 terms and the store may change."""
    x, weight, grad_proj, grad_r, r = (np.asarray(inputs[name], np.float64) for name in INPUTS)
    p = grad_proj[:, : len(weight)]
    term = grad_r / (r * x.shape[1]) * x
    dx, dweight = term + p @ weight, p.T @ x
    off = TF32_PRODUCT * (np.abs(p) @ np.abs(weight)) + 2.0**-20 * np.abs(term)
    allowed_dx = half_step(np.abs(dx) + off, "bfloat16") + off
    allowed_dweight = (TWO_TERMS + case.dims["M"] * 2.0**-27) * (np.abs(p).T @ np.abs(x))
    return Expected(
        np.concatenate([dx.ravel(), dweight.ravel()]), np.concatenate([allowed_dx.ravel(), allowed_dweight.ravel()])
    )


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([outputs[name].astype(np.float64).ravel() for name in ("dx", "dweight")])


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    del case
    x, weight, grad_proj, grad_r, r = (inputs[name].astype(np.float32) for name in INPUTS)
    p = grad_proj[:, : len(weight)]
    dx = grad_r / (r * np.float32(x.shape[1])) * x + p @ weight
    return dx.astype(inputs["x"].dtype), p.T @ x


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    del case
    x, weight, grad_proj, grad_r, r = (inputs[name] for name in INPUTS)
    p, wide = grad_proj[:, : len(weight)], x.float()
    dx = grad_r / (r * x.shape[1]) * wide + p @ weight
    return dx.to(x.dtype), p.mT @ wide


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    del case
    return _jitted()(*(inputs[name] for name in INPUTS))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(x: Any, weight: Any, grad_proj: Any, grad_r: Any, r: Any) -> Any:
        p, wide = grad_proj[:, : len(weight)], x.astype(jnp.float32)
        dx = grad_r / (r * x.shape[1]) * wide + jnp.matmul(p, weight, precision="highest")
        return dx.astype(x.dtype), jnp.matmul(p.T, wide, precision="highest")

    function: Callable[..., Any] = jax.jit(plain)
    return function


class _WithWorkspace:
    """The class form with a workspace of its own, made when it is compiled."""

    def __init__(self, api: Any, like: Any) -> None:
        self._api, self._like, self._workspace = api, like, None

    def compile(self) -> None:
        arrays: Any = importlib.import_module("fe_runtime.arrays")
        self._api.compile()
        framework, device = arrays.detect_framework(self._like), arrays.get_device(self._like)
        self._workspace = arrays.allocate_byte_workspace(self._api.scratch_workspace_bytes(), framework, device)

    def execute(self, **operands: Any) -> Any:
        return self._api.execute(**operands, workspace=self._workspace)


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_gemm").MhcProjectionBackward
    arrays = {name: inputs[name] for name in INPUTS} | {name: outputs[name] for name in ("dx", "dweight")}
    return _WithWorkspace(api(**arrays, **options), inputs["x"])


def _torch_eager(case: Case) -> Callable[[Arrays], Any]:
    return lambda arrays: _plain_torch(case, arrays)


def _case(m: int, n: int, columns: int) -> Case:
    return Case({"M": m, "N": n, "Kc": columns}, "bfloat16", OPTIONS)


MODELS = ((4096, 24, 20480), (8192, 24, 28672), (4096, 24, 16384), (1000, 8, 4096))

MHC_PROJECTION_BACKWARD = Workload(
    operation="fe_gemm.mhc:OPERATION",
    title="mhc_projection_backward",
    wrapper="fe_gemm:mhc_projection_backward",
    summary="grad_r / (r * Kc) * x + P @ weight, and P^T @ x",
    dims=("M", "N", "Kc"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(256, 24, 1024), _case(100, 8, 520), _case(64, 48, 512)),
    bench=tuple(_case(*shape) for shape in MODELS),
    host=_case(16, 24, 512),
    presets={"default": tuple(_case(*shape) for shape in MODELS)},
    peers=(
        Peer("torch", "the plain expression, eagerly", _torch_eager),
        Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
    ),
)
