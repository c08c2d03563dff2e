"""``vision_rope_backward`` as the ``fe`` command sees it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import half_step
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

from .workload_tail_rope import COPIED

__all__ = ["VISION_ROPE_BACKWARD"]

PRODUCTS = 2.0**-23
"""Bound on what rounding two fp32 products and their sum may change, relative to the products' sizes."""

ORDERS = {"grad_q": (1, 0, 2), "grad_k": (2, 0, 1), "grad_v": (1, 0, 2)}
"""From an array as it is stored, (H, T, D) or (H, D, T), to (T, H, D)."""


def _operands(case: Case) -> Operands:
    tokens, heads, channels = (case.dims[letter] for letter in "THD")
    table = (tokens, 1, channels // 2), "float32"
    gradients = dict.fromkeys(ORDERS, ((tokens, heads, channels), case.dtype))
    return gradients | {"cosine": table, "sine": table}


def _strides(case: Case) -> dict[str, tuple[int, ...]]:
    tokens, _, channels = (case.dims[letter] for letter in "THD")
    rows, columns = (channels, tokens * channels, 1), (1, tokens * channels, tokens)
    return {"grad_q": rows, "grad_k": columns, "grad_v": rows}


def _inputs(case: Case, source: Source) -> Arrays:
    tokens, heads, channels = (case.dims[letter] for letter in "THD")
    stored = {"grad_k": (heads, channels, tokens)}
    gradients = {
        name: _moved(source.normal(stored.get(name, (heads, tokens, channels)), case.dtype), order)
        for name, order in ORDERS.items()
    }
    frequency = 10000.0 ** (-np.arange(channels // 2) / (channels // 2))
    angle = np.arange(tokens)[:, None, None] * 0.25 * frequency
    cosine, sine = (source.array(part(angle).astype(np.float32)) for part in (np.cos, np.sin))
    return gradients | {"cosine": cosine, "sine": sine}


def _moved(array: Any, order: tuple[int, ...]) -> Any:
    """Return a view with its dimensions in another order, in any framework."""
    return array.permute(order) if hasattr(array, "permute") else array.transpose(order)


def _expected(case: Case, inputs: Arrays) -> Expected:
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    c, s = wide["cosine"], wide["sine"]
    values, allowed = [], []
    for name in ("grad_q", "grad_k"):
        a, b = np.split(wide[name], 2, axis=-1)
        arithmetic = PRODUCTS * np.concatenate([abs(a * c) + abs(b * s), abs(b * c) + abs(a * s)], axis=-1)
        values.append(np.concatenate([a * c + b * s, b * c - a * s], axis=-1))
        allowed.append(half_step(np.abs(values[-1]) + arithmetic, "bfloat16") + arithmetic)
    values.append(wide["grad_v"])
    allowed.append(np.full_like(wide["grad_v"], COPIED))
    packed = [np.stack(parts, axis=1).reshape(case.dims["T"], -1) for parts in (values, allowed)]
    return Expected(*packed)


def _decode(case: Case, outputs: Arrays) -> Any:
    return outputs["grad_qkv"].astype(np.float64)


def _plain(xp: Any, wide: Callable[[Any], Any], inputs: Arrays) -> Any:
    """The plain expression in the operators that all frameworks share."""
    c, s = inputs["cosine"], inputs["sine"]
    parts = []
    for name in ("grad_q", "grad_k"):
        x = inputs[name]
        half = x.shape[-1] // 2
        a, b = wide(x[..., :half]), wide(x[..., half:])
        parts.append(xp.concatenate([a * c + b * s, b * c - a * s], -1))
    return parts, inputs["grad_v"]


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    rotated, v = _plain(np, lambda x: x.astype(np.float32), inputs)
    tokens = v.shape[0]
    return np.concatenate([part.astype(v.dtype).reshape(tokens, -1) for part in (*rotated, v)], axis=1)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    torch: Any = importlib.import_module("torch")
    rotated, v = _plain(torch, lambda x: x.float(), inputs)
    return torch.cat([part.to(v.dtype).reshape(v.shape[0], -1) for part in (*rotated, v)], dim=1)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    return _jitted()(dict(inputs))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")

    def plain(inputs: Arrays) -> Any:
        rotated, v = _plain(jax.numpy, lambda x: x.astype("float32"), inputs)
        return jax.numpy.concatenate([part.astype(v.dtype).reshape(v.shape[0], -1) for part in (*rotated, v)], 1)

    function: Callable[..., Any] = jax.jit(plain)
    return function


def _make_class(inputs: Arrays, outputs: Arrays, options: Mapping[str, object]) -> Any:
    api: Any = importlib.import_module("fe_rope").VisionRoPEBackward
    return api(*(inputs[name] for name in (*ORDERS, "cosine", "sine")))


def _case(tokens: int) -> Case:
    return Case({"T": tokens, "H": 16, "D": 64}, "bfloat16")


VISION_ROPE_BACKWARD = Workload(
    operation="fe_rope.vision_rope_backward:OPERATION",
    wrapper="fe_rope:vision_rope_backward_wrapper",
    summary="inverse rotation of dQ and dK, packed with dV",
    dims=("T", "H", "D"),
    operands=_operands,
    strides=_strides,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    make_class=_make_class,
    demo=(_case(256), _case(33)),
    bench=tuple(_case(tokens) for tokens in (65536, 16384, 4096, 1024, 4097)),
    host=_case(8),
    presets={"default": (_case(4096),)},
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)
