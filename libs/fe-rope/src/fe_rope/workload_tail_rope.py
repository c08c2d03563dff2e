"""``tail_rope`` as the ``fe`` command sees it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from .launch import TAIL

__all__ = ["COPIED", "TAIL_ROPE", "rotated", "rotated_exactly"]

COPIED = 2.0**-200
"""What is allowed to a value that is copied: nothing, but a number to divide by."""

PRODUCTS = 2.0**-23
"""Bound on what rounding two fp32 products and their sum may change, relative to the products' sizes."""


def rotated(xp: Any, tail: Any, cosine: Any, sine: Any) -> Any:
    """Return the plain expression of the rotation for fp32 channels (..., 64), in any framework's operators."""
    a, b = tail[..., 0::2], tail[..., 1::2]
    return xp.stack([a * cosine - b * sine, b * cosine + a * sine], -1).reshape(tail.shape)


def rotated_exactly(x: Any, cosine: Any, sine: Any) -> tuple[Any, Any]:
    """Return x (T, ..., D) rotated in float64, and what rounding to bf16 may change."""
    wide = np.asarray(x, np.float64)
    cosine, sine = (
        np.asarray(table, np.float64).reshape(table.shape[0], *(1,) * (x.ndim - 2), -1) for table in (cosine, sine)
    )
    tail = wide[..., -TAIL:]
    a, b = tail[..., 0::2], tail[..., 1::2]
    terms = np.stack([np.abs(a * cosine) + np.abs(b * sine), np.abs(b * cosine) + np.abs(a * sine)], -1)
    values = np.stack([a * cosine - b * sine, b * cosine + a * sine], -1)
    arithmetic = PRODUCTS * terms
    allowed = half_step(np.abs(values) + arithmetic, "bfloat16") + arithmetic
    out = np.concatenate([wide[..., :-TAIL], values.reshape(tail.shape)], axis=-1)
    copied = np.full_like(wide[..., :-TAIL], COPIED)
    return out, np.concatenate([copied, allowed.reshape(tail.shape)], axis=-1)


def _operands(case: Case) -> Operands:
    tokens, heads, channels = (case.dims[letter] for letter in "THD")
    table = (tokens, TAIL // 2), "float32"
    return {"x": ((tokens, heads, channels), case.dtype), "cosine": table, "sine": table}


def _inputs(case: Case, source: Source) -> Arrays:
    cosine, sine = _angles(source, case.dims["T"])
    return {"x": source.activations(*_operands(case)["x"]), "cosine": cosine, "sine": sine}


def _angles(source: Source, rows: int) -> tuple[Any, Any]:
    """Return cosines and sines (rows, 32) of rotary angles for places spread over a long context."""
    frequency = 10000.0 ** (-np.arange(TAIL // 2) / (TAIL // 2))
    angle = (np.arange(rows)[:, None] * 7.0) * frequency
    return source.array(np.cos(angle).astype(np.float32)), source.array(np.sin(angle).astype(np.float32))


def _expected(case: Case, inputs: Arrays) -> Expected:
    return Expected(*rotated_exactly(inputs["x"], inputs["cosine"], inputs["sine"]))


def _decode(case: Case, outputs: Arrays) -> Any:
    return outputs["out"].astype(np.float64)


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    x = inputs["x"]
    cosine, sine = inputs["cosine"][:, None], inputs["sine"][:, None]
    tail = rotated(np, x[..., -TAIL:].astype(np.float32), cosine, sine)
    return np.concatenate([x[..., :-TAIL], tail.astype(x.dtype)], axis=-1)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    x = inputs["x"]
    cosine, sine = inputs["cosine"][:, None], inputs["sine"][:, None]
    tail = rotated(torch, x[..., -TAIL:].float(), cosine, sine)
    return torch.cat([x[..., :-TAIL], tail.to(x.dtype)], dim=-1)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted()(inputs["x"], inputs["cosine"], inputs["sine"])


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")

    def plain(x: Any, cosine: Any, sine: Any) -> Any:
        tail = rotated(jax.numpy, x[..., -TAIL:].astype("float32"), cosine[:, None], sine[:, None])
        return jax.numpy.concatenate([x[..., :-TAIL], tail.astype(x.dtype)], axis=-1)

    function: Callable[..., Any] = jax.jit(plain)
    return function


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_rope").TailRoPEForward
    return api(inputs["x"], inputs["cosine"], inputs["sine"], outputs["out"])


def _case(tokens: int, heads: int, channels: int) -> Case:
    return Case({"T": tokens, "H": heads, "D": channels}, "bfloat16")


TAIL_ROPE = Workload(
    operation="fe_rope.tail_rope:OPERATION",
    wrapper="fe_rope:tail_rope",
    summary="rotation of the last 64 channels by tables",
    dims=("T", "H", "D"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(64, 16, 512), _case(512, 1, 512), _case(257, 32, 128)),
    bench=(
        _case(8192, 64, 512),
        _case(4096, 64, 512),
        _case(16384, 64, 512),
        _case(4096, 1, 512),
        _case(16384, 32, 128),
        _case(257, 32, 128),
    ),
    host=_case(16, 1, 512),
    presets={"default": tuple(_case(4096, *shape) for shape in ((64, 512), (1, 512), (32, 128), (1, 128)))},
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)
