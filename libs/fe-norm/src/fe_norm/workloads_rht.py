"""What the ``fe`` command runs, checks, times and compiles of ``rmsnorm_rht_amax``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["RMSNORM_RHT_AMAX"]

EPS = 1e-5
BLOCK = 16
FP32_ROUNDINGS = 32
"""Bound on the roundings of the fp32 arithmetic before the store, in units of 2^-24 of the terms of each sum: a sum of
squares in a tree, the root, three products and four stages of sums take about half of it."""


def _operands(case: Case) -> Operands:
    rows, columns = case.dims["M"], case.dims["N"]
    return {"x_tensor": ((rows, columns), case.dtype), "w_tensor": ((columns,), case.dtype)}


def _inputs(case: Case, source: Source) -> Arrays:
    operands = _operands(case)
    return {
        "x_tensor": source.activations(*operands["x_tensor"]),
        "w_tensor": source.weights(*operands["w_tensor"]),
    }


def _group(case: Case) -> int:
    """Return how many rows share a maximum by default."""
    rows = case.dims["M"]
    return next((group for group in (8, 4, 2) if rows % group == 0 and rows // group >= 148), 2 - rows % 2)


def _matrix() -> Any:
    signs = np.array([[1.0]])
    for _ in range(4):
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs / 4


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, and what fp32 arithmetic and one rounding may change.

    Each value is a sum of 16 products; what the arithmetic may change is relative to the sum of their magnitudes.
    """
    x, w = (np.asarray(inputs[name], np.float64) for name in ("x_tensor", "w_tensor"))
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * w
    blocks = y.reshape(y.shape[0], -1, BLOCK)
    values = (blocks @ _matrix()).reshape(y.shape)
    sums = np.abs(blocks).sum(axis=-1, keepdims=True) / 4
    arithmetic = np.broadcast_to(FP32_ROUNDINGS * 2.0**-24 * sums, blocks.shape).reshape(y.shape)
    groups = (y.shape[0] // _group(case), -1)
    amax = np.abs(values).reshape(groups).max(axis=-1)
    off = arithmetic.reshape(groups).max(axis=-1)
    allowed = [allowed_in_dtype(values, case.dtype, arithmetic).ravel(), allowed_in_dtype(amax, "float32", off)]
    return Expected(np.concatenate([values.ravel(), amax]), np.concatenate(allowed))


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([outputs[name].astype(np.float64).ravel() for name in ("o_tensor", "amax_tensor")])


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    x = inputs["x_tensor"].astype(np.float32)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPS)) * inputs["w_tensor"].astype(np.float32)
    rotated = y.reshape(-1, BLOCK) @ _matrix().astype(np.float32)
    amax = np.abs(rotated).reshape(x.shape[0] // _group(case), -1).max(axis=-1)
    return rotated.reshape(x.shape).astype(inputs["x_tensor"].dtype), amax


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    x = inputs["x_tensor"]
    y = torch.nn.functional.rms_norm(x.float(), (case.dims["N"],), inputs["w_tensor"].float(), EPS)
    rotated = y.view(-1, BLOCK) @ torch.tensor(_matrix(), dtype=torch.float32, device=x.device)
    amax = rotated.view(x.shape[0] // _group(case), -1).abs().amax(dim=-1)
    return rotated.view(x.shape).to(x.dtype), amax


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted(_group(case))(inputs["x_tensor"], inputs["w_tensor"])


@functools.cache
def _jitted(group: int) -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(x: Any, w: Any) -> Any:
        wide = x.astype(jnp.float32)
        y = wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS) * w.astype(jnp.float32)
        rotated = jnp.matmul(y.reshape(-1, BLOCK), jnp.asarray(_matrix(), jnp.float32), precision="highest")
        amax = jnp.abs(rotated).reshape(x.shape[0] // group, -1).max(axis=-1)
        return rotated.reshape(x.shape).astype(x.dtype), amax

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    del options
    api: Any = importlib.import_module("fe_norm").RmsNormRhtAmax
    return api(inputs["x_tensor"], inputs["w_tensor"], outputs["o_tensor"], outputs["amax_tensor"])


def _quack_norm(case: Case) -> Callable[[Arrays], Any]:
    del case
    rmsnorm: Any = importlib.import_module("quack").rmsnorm
    return lambda arrays: rmsnorm(arrays["x_tensor"], arrays["w_tensor"], eps=EPS)


PEERS = (
    Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
    Peer("quack-kernels", "norm only", _quack_norm, same_work=False),
)


def _case(rows: int, columns: int, dtype: str = "bfloat16") -> Case:
    return Case({"M": rows, "N": columns}, dtype)


MODELS = ((8192, 4096), (16384, 8192), (16384, 7168), (8192, 16384), (32768, 2048), (8192, 2880), (1001, 5120))

RMSNORM_RHT_AMAX = Workload(
    operation="fe_norm.rmsnorm_rht_amax:OPERATION",
    wrapper="fe_norm:rmsnorm_rht_amax_wrapper",
    summary="H16 @ (RMSNorm(x) * w) / 4 and its largest magnitudes",
    dims=("M", "N"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(1184, 512), _case(301, 2880), _case(1184, 512, "float16"), _case(1184, 512, "float32")),
    bench=(_case(16384, 4096), *(_case(*shape) for shape in MODELS)),
    host=_case(32, 1024),
    presets={"default": tuple(_case(8192, columns) for columns in (2048, 2880, 4096, 5120, 7168, 8192, 16384))},
    peers=PEERS,
)
