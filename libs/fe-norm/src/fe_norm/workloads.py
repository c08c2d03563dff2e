"""What the ``fe`` command runs, checks, times and compiles of this library."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_blocks, allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from .workloads_pad import RMSNORM_SILU_PAD
from .workloads_rht import RMSNORM_RHT_AMAX
from .workloads_rms_norm import RMS_NORM, RMS_NORM_BACKWARD, RMSNORM_SILU_BACKWARD

__all__ = ["RMSNORM_SILU", "WORKLOADS"]

EPS = 1e-5
BLOCK = 16
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP32_ROUNDINGS = 32
"""Bound on the roundings of the fp32 arithmetic before the store, in units of 2^-24: a sum of squares in a tree, the
root, three products, the exponential and the division take about half of it."""

VIDEO_VAE_CHANNELS = (64, 96, 128, 160, 256, 320, 384, 512, 640, 1024)
VIDEO_VAE_ROWS = 399360


def _operands(case: Case) -> Operands:
    rows, columns = case.dims["T"], case.dims["C"]
    operands = {"x_tensor": ((rows, columns), case.dtype), "w_tensor": ((columns,), case.dtype)}
    return operands | dict.fromkeys(case.optional, ((columns,), case.dtype))


def _inputs(case: Case, source: Source) -> Arrays:
    operands = _operands(case)
    arrays = {
        "x_tensor": source.activations(*operands["x_tensor"]),
        "w_tensor": source.weights(*operands["w_tensor"]),
    }
    if "bias_tensor" in operands:
        arrays["bias_tensor"] = source.normal(*operands["bias_tensor"], scale=0.3)
    return arrays


def _output_dtype(case: Case) -> str:
    return str(case.options.get("out_dtype", case.dtype))


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, and what fp32 arithmetic and one rounding may change.

    A relative error ``e`` of ``z`` moves ``y = z/(1+exp(-z))`` by ``e*|z*dy/dz|``, with
    ``dy/dz = s*(1 + z*(1-s))`` and ``s`` the sigmoid; ``y`` has further roundings of its own.
    """
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    x = wide["x_tensor"]
    z = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) / x.shape[-1] + EPS) * wide["w_tensor"]
    scaled = np.abs(z)
    if "bias_tensor" in wide:
        z = z + wide["bias_tensor"]
        scaled = scaled + np.abs(z)
    s = np.exp(-np.logaddexp(0, -z))
    y = z * s
    arithmetic = FP32_ROUNDINGS * 2.0**-24 * (np.abs(y) + scaled * np.abs(s * (1 + z * (1 - s))))
    arithmetic += scaled * 2.0**-126  # the exponential may underflow
    if _output_dtype(case) == "nvfp4":
        return Expected(y, allowed_in_blocks(y, arithmetic, BLOCK))
    return Expected(y, allowed_in_dtype(y, _output_dtype(case), arithmetic))


def _decode(case: Case, outputs: Arrays) -> Any:
    o = outputs["o_tensor"]
    if _output_dtype(case) != "nvfp4":
        return o.astype(np.float64)
    codes = np.stack([o & 15, o >> 4], axis=-1).reshape(*o.shape[:-1], -1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    values = np.where(codes & 8, -magnitudes, magnitudes).reshape(*o.shape[:-1], -1, BLOCK)
    return (values * outputs["sf_tensor"].astype(np.float64)[..., None]).reshape(codes.shape)


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    x = inputs["x_tensor"].astype(np.float32)
    z = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPS)) * inputs["w_tensor"].astype(np.float32)
    if "bias_tensor" in inputs:
        z = z + inputs["bias_tensor"].astype(np.float32)
    y = z / (1 + np.exp(-z))
    dtype = _output_dtype(case)
    if dtype == "nvfp4":
        return _plain_nvfp4(y, _ml_dtype)
    return y.clip(-448, 448).astype(_ml_dtype(dtype)) if dtype == "float8_e4m3fn" else y.astype(_ml_dtype(dtype))


def _plain_nvfp4(y: Any, dtype_of: Callable[[str], Any]) -> Any:
    blocks = y.reshape(y.shape[0], -1, BLOCK)
    q = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(6), np.finfo(np.float32).tiny)
    codes = (blocks / q).astype(dtype_of("float4_e2m1fn")).view(np.uint8).reshape(y.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, q[..., 0].clip(max=448).astype(dtype_of("float8_e4m3fn"))


def _ml_dtype(name: str) -> Any:
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), name, name))


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    functional = torch.nn.functional
    y = functional.rms_norm(inputs["x_tensor"], (case.dims["C"],), inputs["w_tensor"], EPS)
    y = functional.silu(y + inputs["bias_tensor"] if "bias_tensor" in inputs else y)
    dtype = _output_dtype(case)
    if dtype == "nvfp4":
        return _plain_nvfp4_torch(torch, y.float())
    return y.clamp(-448, 448).to(torch.float8_e4m3fn) if dtype == "float8_e4m3fn" else y.to(getattr(torch, dtype))


def _plain_nvfp4_torch(torch: Any, y: Any) -> Any:
    blocks = y.view(y.shape[0], -1, BLOCK)
    q = blocks.abs().amax(dim=-1, keepdim=True).div(6).clamp(min=2.0**-126)
    steps = torch.tensor(E2M1_THRESHOLDS, device=y.device)
    scaled = (blocks / q).view(y.shape)
    codes = torch.bucketize(scaled.abs(), steps).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return codes[:, ::2] | codes[:, 1::2] << 4, q[..., 0].clamp(max=448).to(torch.float8_e4m3fn)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    function = _jitted(_output_dtype(case))
    return function(inputs["x_tensor"], inputs["w_tensor"], inputs.get("bias_tensor"))


@functools.cache
def _jitted(dtype: str) -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(x: Any, w: Any, bias: Any) -> Any:
        wide = x.astype(jnp.float32)
        z = wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS) * w.astype(jnp.float32)
        y = jax.nn.silu(z if bias is None else z + bias.astype(jnp.float32))
        if dtype == "nvfp4":
            return _plain_nvfp4_jax(jnp, y)
        return (y.clip(-448, 448) if dtype == "float8_e4m3fn" else y).astype(dtype)

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


def _plain_nvfp4_jax(jnp: Any, y: Any) -> Any:
    blocks = y.reshape(y.shape[0], -1, BLOCK)
    q = jnp.maximum(jnp.abs(blocks).max(axis=-1, keepdims=True) / 6, 2.0**-126)
    scaled = (blocks / q).reshape(y.shape)
    codes = jnp.searchsorted(jnp.array(E2M1_THRESHOLDS), jnp.abs(scaled)).astype(jnp.uint8)
    codes |= jnp.signbit(scaled).astype(jnp.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, jnp.minimum(q[..., 0], 448).astype(jnp.float8_e4m3fn)


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_norm").RmsNormSilu
    return api(
        inputs["x_tensor"],
        inputs["w_tensor"],
        outputs["o_tensor"],
        outputs["sf_tensor"],
        sample_bias=inputs.get("bias_tensor"),
    )


def _liger(case: Case) -> Callable[[Arrays], Any]:
    _require_same_dtype(case)
    function: Any = importlib.import_module("liger_kernel.ops").LigerRMSNormFunction
    return lambda arrays: function.apply(arrays["x_tensor"], arrays["w_tensor"], EPS)


def _quack(case: Case) -> Callable[[Arrays], Any]:
    _require_same_dtype(case)
    rmsnorm: Any = importlib.import_module("quack").rmsnorm
    return lambda arrays: rmsnorm(arrays["x_tensor"], arrays["w_tensor"], eps=EPS)


def _then_silu(make_norm: Callable[[Case], Callable[[Arrays], Any]]) -> Callable[[Case], Callable[[Arrays], Any]]:
    def make(case: Case) -> Callable[[Arrays], Any]:
        norm, silu = make_norm(case), importlib.import_module("torch").nn.functional.silu
        return lambda arrays: silu(norm(arrays))

    return make


def _require_same_dtype(case: Case) -> None:
    if _output_dtype(case) != case.dtype or case.optional:
        raise NotImplementedError("it has no such output format")


PEERS = (
    Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
    Peer("liger-kernel", "norm, then torch silu", _then_silu(_liger)),
    Peer("liger-kernel", "norm only", _liger, same_work=False),
    Peer("quack-kernels", "norm, then torch silu", _then_silu(_quack)),
    Peer("quack-kernels", "norm only", _quack, same_work=False),
)


def _case(rows: int, columns: int, dtype: str = "bfloat16", out_dtype: str = "", bias: bool = False) -> Case:
    options = {"out_dtype": out_dtype} if out_dtype else {}
    return Case({"T": rows, "C": columns}, dtype, options, ("bias_tensor",) if bias else ())


FORMATS = ("", "float8_e4m3fn", "nvfp4")

RMSNORM_SILU = Workload(
    operation="fe_norm.rmsnorm_silu:OPERATION",
    wrapper="fe_norm:rmsnorm_silu_wrapper",
    summary="SiLU(RMSNorm(x) * w + b)",
    dims=("T", "C"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(
        _case(1560, 1024),
        _case(6240, 384),
        _case(24960, 64),
        _case(1560, 1024, bias=True),
        _case(1560, 1024, "float16"),
        _case(1560, 1024, "float32"),
        *(_case(1560, 1024, out_dtype=out_dtype) for out_dtype in FORMATS[1:]),
    ),
    bench=(
        _case(16384, 8192),
        _case(1048576, 128),
        *(_case(VIDEO_VAE_ROWS, columns, out_dtype=out) for columns in (64, 128, 320, 1024) for out in FORMATS),
    ),
    host=_case(32, 1024),
    presets={
        "default": (
            *(_case(4096, columns) for columns in (1024, 2048, 4096, 5120, 8192)),
            *(_case(VIDEO_VAE_ROWS, columns) for columns in VIDEO_VAE_CHANNELS),
        ),
        "low-precision": tuple(
            _case(VIDEO_VAE_ROWS, columns, out_dtype=out) for columns in VIDEO_VAE_CHANNELS for out in FORMATS[1:]
        ),
    },
    peers=PEERS,
)

WORKLOADS = (
    RMS_NORM,
    RMS_NORM_BACKWARD,
    RMSNORM_SILU,
    RMSNORM_SILU_BACKWARD,
    RMSNORM_RHT_AMAX,
    RMSNORM_SILU_PAD,
)
