"""``gemm_proj_rope_mxfp8`` as the ``fe`` command sees it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_gemm.planning.proj_rope import BLOCK, HEAD
from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["GEMM_PROJ_ROPE_MXFP8"]

E4M3 = "float8_e4m3fn"
PLAIN = 128
HALF = 32
RESULTS = ("out_fp8_row", "out_scales_row", "out_fp8_col", "out_scales_col")


def _is_scaled(case: Case) -> bool:
    return case.dtype == E4M3


def _operands(case: Case) -> Operands:
    tokens, depth, features = case.dims["T"], case.dims["K"], case.dims["H"] * HEAD
    tables = dict.fromkeys(("cos", "sin"), ((tokens, 2 * HALF), "bfloat16"))
    operands = {"x": ((tokens, depth), case.dtype), "w": ((features, depth), case.dtype), **tables}
    if _is_scaled(case):
        scales = {"x_scale": (tokens, depth // BLOCK), "w_scale": (features, depth // BLOCK)}
        operands |= {name: (shape, "uint8") for name, shape in scales.items()}
    return operands


def _inputs(case: Case, source: Source) -> Arrays:
    operands, scaled = _operands(case), _is_scaled(case)
    tokens, depth = operands["x"][0]
    frequency = 10000.0 ** (-np.arange(HALF) / HALF)
    angle = np.tile(np.arange(tokens)[:, None] * frequency, 2)
    bfloat16: Any = importlib.import_module("ml_dtypes").bfloat16
    arrays = {
        "x": source.normal(*operands["x"], scale=32.0) if scaled else source.activations(*operands["x"]),
        "w": source.normal(*operands["w"], scale=32.0 if scaled else depth**-0.5),
        "cos": source.array(np.cos(angle).astype(bfloat16)),
        "sin": source.array(np.sin(angle).astype(bfloat16)),
    }
    if scaled:
        for seed, (name, middle) in enumerate((("x_scale", 122), ("w_scale", 117))):
            random = np.random.default_rng(seed + tokens)
            arrays[name] = source.array(random.integers(middle - 2, middle + 3, operands[name][0]).astype(np.uint8))
    return arrays


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64, and what rounding may change.

    Sums lose (2^-18 + K 2^-28) of their terms, then Y is rounded to bf16; the code of a value over its scale is off by
    half a step of e4m3.
    """
    x, w = (_dequantised(inputs, name) for name in ("x", "w"))
    cos, sin = (np.asarray(inputs[name], np.float64) for name in ("cos", "sin"))
    acc = x @ w.T
    lost = (2.0**-18 + case.dims["K"] * 2.0**-28) * (np.abs(x) @ np.abs(w).T)
    values = _rotated(np, acc.reshape(len(x), -1, HEAD), cos, sin)
    off = (2.0**-8 * np.abs(acc) + 2 * lost).reshape(values.shape)
    pair = off[..., PLAIN::2] + off[..., PLAIN + 1 :: 2]
    arithmetic = np.concatenate([off[..., :PLAIN], pair, pair], axis=-1)  # |cos| and |sin| are at most 1
    allowed = [_allowed(values, arithmetic, axis) for axis in (2, 0)]
    return Expected(np.stack([values, values]), np.stack(allowed))


def _allowed(values: Any, arithmetic: Any, axis: int) -> Any:
    """Return the largest error of each value in blocks along ``axis``, before which it is off by ``arithmetic``."""
    largest = _by_block(np.abs(values) + arithmetic, axis).max(axis=axis + 1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(largest / 448 * (1 + 2.0**-20), 2.0**-127)))
    codes = half_step(_by_block(np.abs(values) + arithmetic, axis) / scale, E4M3) * scale
    return codes.reshape(values.shape) + arithmetic


def _by_block(values: Any, axis: int) -> Any:
    shape = values.shape
    return values.reshape(*shape[:axis], shape[axis] // BLOCK, BLOCK, *shape[axis + 1 :])


def _dequantised(inputs: Arrays, name: str) -> Any:
    values = np.asarray(inputs[name], np.float64)
    if f"{name}_scale" not in inputs:
        return values
    return values * np.repeat(2.0 ** (inputs[f"{name}_scale"].astype(np.float64) - 127), BLOCK, axis=1)


def _rotated(xp: Any, q: Any, cos: Any, sin: Any) -> Any:
    a, b = q[..., PLAIN::2], q[..., PLAIN + 1 :: 2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = a * cos[..., :HALF] - b * sin[..., :HALF]
    second = b * cos[..., HALF:] + a * sin[..., HALF:]
    return xp.concatenate([q[..., :PLAIN], first, second], axis=-1)


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    row, row_scales, column, column_scales = (outputs[name] for name in RESULTS)
    powers = [2.0 ** (np.asarray(scales, np.float64) - 127) for scales in (row_scales, column_scales)]
    by_row = row.astype(np.float64) * np.repeat(powers[0], BLOCK, axis=2)
    by_column = column.astype(np.float64) * np.repeat(powers[1], BLOCK, axis=0)
    return np.stack([by_row, by_column])


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    x, w = inputs["x"], inputs["w"]
    if _is_scaled(case):
        x, w = (
            (inputs[name].float().unflatten(1, (-1, BLOCK)) * _power(torch, inputs[f"{name}_scale"])[..., None])
            .flatten(1)
            .to(torch.bfloat16)
            for name in ("x", "w")
        )
    q = (x @ w.T).float().unflatten(1, (-1, HEAD))
    v = _rotated(torch, q, inputs["cos"].float(), inputs["sin"].float())
    outputs = []
    for axis in (2, 0):
        blocks = v.unflatten(axis, (-1, BLOCK))
        amax = blocks.abs().amax(dim=axis + 1, keepdim=True)
        byte = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127) + 127
        codes = (blocks * torch.exp2(127 - byte)).clamp(-448, 448).to(torch.float8_e4m3fn)
        outputs += [codes.flatten(axis, axis + 1), byte.squeeze(axis + 1).to(torch.uint8)]
    return tuple(outputs)


def _power(torch: Any, scales: Any) -> Any:
    return torch.exp2(scales.float() - 127)


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    del case
    with np.errstate(divide="ignore"):
        return _plain(np, *(inputs.get(name) for name in ("x", "w", "cos", "sin", "x_scale", "w_scale")))


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    del case
    return _jitted()(*(inputs.get(name) for name in ("x", "w", "cos", "sin", "x_scale", "w_scale")))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    compiled: Callable[..., Any] = jax.jit(functools.partial(_plain, jax.numpy))
    return compiled


def _plain(xp: Any, x: Any, w: Any, cos: Any, sin: Any, x_scale: Any, w_scale: Any) -> Any:
    """The plain expression in numpy's names."""
    types: Any = importlib.import_module("ml_dtypes")
    x, w = (
        array.astype(np.float32)
        if scale is None
        else array.astype(np.float32) * xp.repeat(xp.exp2(scale.astype(np.float32) - 127), BLOCK, axis=1)
        for array, scale in ((x, x_scale), (w, w_scale))
    )
    q = (x @ w.T).astype(types.bfloat16).astype(np.float32).reshape(x.shape[0], -1, HEAD)
    v = _rotated(xp, q, cos.astype(np.float32), sin.astype(np.float32))
    outputs = []
    for axis in (2, 0):
        blocks = _by_block(v, axis)
        amax = xp.abs(blocks).max(axis=axis + 1, keepdims=True)
        byte = xp.ceil(xp.log2(amax / 448)).clip(-127, 127) + 127
        codes = (blocks * xp.exp2(127 - byte)).clip(-448, 448).astype(types.float8_e4m3fn)
        outputs += [codes.reshape(v.shape), byte.squeeze(axis + 1).astype(np.uint8)]
    return tuple(outputs)


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    del options
    ours: Any = importlib.import_module("fe_gemm")
    results = [outputs[name] for name in RESULTS]
    x, w, cos, sin = (inputs[name] for name in ("x", "w", "cos", "sin"))
    if "x_scale" not in inputs:
        return ours.GemmProjRopeMxfp8Bf16In(x, w, cos, sin, *results, w_out_in=True)

    class Renamed(ours.GemmProjRopeMxfp8Mxfp8In):  # type: ignore[misc]
        """Takes the contract's names."""

        def execute(self, x: Any, w: Any, x_scale: Any, w_scale: Any, **others: Any) -> None:
            super().execute(x_code=x, x_scale=x_scale, w_code=w, w_scale=w_scale, **others)

    return Renamed(x, inputs["x_scale"], w, inputs["w_scale"], cos, sin, *results)


def _product(case: Case) -> Callable[[Arrays], Any]:
    if _is_scaled(case):
        raise NotImplementedError("it has no such input format")
    return lambda arrays: arrays["x"] @ arrays["w"].T


def _case(tokens: int, depth: int, heads: int, dtype: str = "bfloat16") -> Case:
    return Case({"T": tokens, "K": depth, "H": heads}, dtype)


MODELS = tuple(_case(tokens, 1536, 128) for tokens in (2048, 4096, 8192))
PARTS = tuple(_case(4096, 1536, heads) for heads in (16, 32, 64))
"""DeepSeek-V3 whole and in parts, Kimi-K2."""

GEMM_PROJ_ROPE_MXFP8 = Workload(
    operation="fe_gemm.dense.proj_rope_mxfp8:OPERATION",
    wrapper="fe_gemm:gemm_proj_rope_mxfp8_wrapper",
    title="gemm_proj_rope_mxfp8",
    summary="projection x w^T, rotation of the last 64 features of each head, MXFP8 by rows and by columns",
    dims=("T", "K", "H"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(160, 96, 3), _case(160, 96, 3, E4M3)),
    bench=(*MODELS, *PARTS, *(_case(tokens, 1536, 128, E4M3) for tokens in (2048, 8192)), _case(160, 96, 3)),
    host=_case(32, 64, 1),
    presets={"default": (_case(4096, 1536, 128), _case(4096, 1536, 128, E4M3))},
    peers=(
        Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),
        Peer("torch", "the product only", _product, same_work=False),
    ),
    flops=lambda case: 2 * case.dims["T"] * case.dims["K"] * case.dims["H"] * HEAD,
)
