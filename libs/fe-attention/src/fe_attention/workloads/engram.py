"""What the ``fe`` command runs of the Engram gate and its gradient."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["ENGRAM_GATE", "ENGRAM_GATE_BACKWARD"]

DIMS = ("N", "H", "D")
EPS = 1e-20
FLOOR = 1e-6
ROUNDOFF = 2.0**-24
UNIT = 32 * ROUNDOFF
"""Bound on the fp32 arithmetic of an element, sums over a stream in a tree and approximate roots included."""


# ---- forward


def _operands(case: Case) -> Operands:
    tokens, streams, width = case.dims.values()
    return {
        "x": ((tokens, streams, width), "bfloat16"),
        "kv": ((tokens, (streams + 1) * width), "bfloat16"),
        "weight": ((streams, width), "float32"),
        "token_mask": ((tokens,), "bool"),
    }


def _inputs(case: Case, source: Source) -> Arrays:
    found = {name: source.normal(*known) for name, known in _operands(case).items() if name != "token_mask"}
    return {**found, "token_mask": source.array(np.arange(case.dims["N"]) % 16 != 15)}


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64. Where dot is almost 0 its sign is open."""
    del case
    x, key, value, w = _wide(inputs)
    open_ = np.asarray(inputs["token_mask"])[:, None]
    width = x.shape[-1]
    rx, rk = (1 / np.sqrt((a * a).mean(axis=-1) + EPS) for a in (x, key))
    terms = x * w * key
    scale = rx * rk / np.sqrt(width)
    dot = terms.sum(axis=-1) * scale
    off = UNIT * (np.abs(dot) + np.abs(terms).sum(axis=-1) * scale)
    root = np.sqrt(np.maximum(np.abs(dot), FLOOR))
    gate = 1 / (1 + np.exp(-np.copysign(root, dot))) * open_
    off_gate = 0.25 * np.where(off < np.abs(dot), off / root, 2 * np.sqrt(FLOOR + off)) * open_ + UNIT * gate
    out = x + gate[..., None] * value
    arithmetic = off_gate[..., None] * np.abs(value) + UNIT * (np.abs(x) + np.abs(out))
    saved = np.stack([gate, dot, rx, rk], axis=-1)
    off_saved = np.stack([off_gate, off, UNIT * rx, UNIT * rk], axis=-1)
    allowed = (allowed_in_dtype(out, "bfloat16", arithmetic), allowed_in_dtype(saved, "float32", off_saved))
    return Expected(_flat(out, saved), _flat(*allowed))


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return _flat(*outputs.values())


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    del case
    x, key, value, w = (array.astype(np.float32) for array in _split(inputs))
    rx, rk = (1 / np.sqrt((a * a).mean(axis=-1) + np.float32(EPS)) for a in (x, key))
    dot = (x * w * key).sum(axis=-1) * (rx * rk) * np.float32(x.shape[-1] ** -0.5)
    root = np.copysign(np.sqrt(np.maximum(np.abs(dot), np.float32(FLOOR))), dot)
    gate = np.where(inputs["token_mask"][:, None], 1 / (1 + np.exp(-root)), np.float32(0))
    return (x + gate[..., None] * value).astype(inputs["x"].dtype), np.stack([gate, dot, rx, rk], axis=-1)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    del case
    torch: Any = importlib.import_module("torch")
    x, key, value, w = (array.float() for array in _split(inputs))
    rx, rk = ((a.square().mean(-1) + EPS).rsqrt() for a in (x, key))
    dot = (x * w * key).sum(-1) * (rx * rk) * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(FLOOR).sqrt(), dot))
    gate = torch.where(inputs["token_mask"][:, None], gate, 0.0)
    return (x + gate[..., None] * value).to(inputs["x"].dtype), torch.stack([gate, dot, rx, rk], -1)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    del case
    return _jitted()(dict(inputs))


@functools.cache
def _jitted() -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def plain(inputs: Arrays) -> Any:
        x, key, value, w = (array.astype(jnp.float32) for array in _split(inputs))
        rx, rk = (1 / jnp.sqrt((a * a).mean(axis=-1) + EPS) for a in (x, key))
        dot = (x * w * key).sum(axis=-1) * (rx * rk) * x.shape[-1] ** -0.5
        gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), FLOOR)), dot))
        gate = jnp.where(inputs["token_mask"][:, None], gate, 0.0)
        return (x + gate[..., None] * value).astype(inputs["x"].dtype), jnp.stack([gate, dot, rx, rk], axis=-1)

    compiled: Callable[..., Any] = jax.jit(plain)
    return compiled


# ---- gradient


def _backward_operands(case: Case) -> Operands:
    found = dict(_operands(case))
    del found["token_mask"]
    return {"grad_out": found["x"], **found, "saved": ((case.dims["N"], case.dims["H"], 4), "float32")}


def _backward_inputs(case: Case, source: Source) -> Arrays:
    operands = _backward_operands(case)
    found = {name: source.normal(*known) for name, known in operands.items() if name != "saved"}
    return {**found, "saved": source.normal(*operands["saved"], scale=0.1) + 0.5}


def _backward_expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the gradients in float64; the errors are those of the sums of g*v, and of each product and sum."""
    x, key, value, w = _wide(inputs)
    g = np.asarray(inputs["grad_out"], np.float64)
    gate, dot, rx, rk = np.moveaxis(np.asarray(inputs["saved"], np.float64), -1, 0)[..., None]
    width = x.shape[-1]
    slope = gate * (1 - gate) * 0.5 / np.sqrt(np.maximum(np.abs(dot), FLOOR)) * (np.abs(dot) >= FLOOR)
    terms = g * value
    ddot = terms.sum(axis=-1, keepdims=True) * slope
    off = UNIT * (np.abs(ddot) + np.abs(terms).sum(axis=-1, keepdims=True) * np.abs(slope))
    factors = (rx * rk / np.sqrt(width), dot * rx**2 / width, dot * rk**2 / width)
    (c, cx, ck), (off_c, off_cx, off_ck) = ([of * f for f in factors] for of in (ddot, off))
    x_, k_, w_ = (np.abs(array) for array in (x, key, w))
    dx, off_dx = g + c * w * key - cx * x, np.abs(off_c) * w_ * k_ + np.abs(off_cx) * x_
    dk, off_dk = c * w * x - ck * key, np.abs(off_c) * w_ * x_ + np.abs(off_ck) * k_
    dv, off_dv = (gate * g).sum(axis=1), UNIT * np.abs(gate * g).sum(axis=1)
    dw = (c * x * key).sum(axis=0)
    off_dw = (np.abs(off_c) * x_ * k_ + (UNIT + case.dims["N"] * ROUNDOFF) * np.abs(c) * x_ * k_).sum(axis=0)
    off_dx = off_dx + UNIT * (np.abs(g) + np.abs(c * w * key) + np.abs(cx * x))
    off_dk = off_dk + UNIT * (np.abs(c * w * x) + np.abs(ck * key))
    dkv = np.concatenate([dk.reshape(dk.shape[0], -1), dv], axis=-1)
    off_dkv = np.concatenate([off_dk.reshape(dk.shape[0], -1), off_dv], axis=-1)
    allowed = (
        allowed_in_dtype(dx, "bfloat16", off_dx),
        allowed_in_dtype(dkv, "bfloat16", off_dkv),
        allowed_in_dtype(dw, "float32", off_dw),
    )
    return Expected(_flat(dx, dkv, dw), _flat(*allowed))


def _autograd(case: Case) -> Callable[[Arrays], Any]:
    """Return calls of torch's autograd through the compiled expression, which ran before on a graph that is kept."""
    torch: Any = importlib.import_module("torch")
    settings: Any = importlib.import_module("torch._functorch.config")
    settings.donated_buffer = False
    forward = torch_compiled(_plain_torch)(case)
    graphs: dict[int, tuple[Any, ...]] = {}

    def call(arrays: Arrays) -> Any:
        if id(arrays) not in graphs:
            leaves = {name: arrays[name].detach().requires_grad_() for name in ("x", "kv", "weight")}
            mask = torch.ones(case.dims["N"], dtype=torch.bool, device=arrays["x"].device)
            with torch.enable_grad():
                out, _ = forward({**leaves, "token_mask": mask})
            graphs[id(arrays)] = out, tuple(leaves.values()), arrays
        out, leaves, _ = graphs[id(arrays)]
        return torch.autograd.grad(out, leaves, arrays["grad_out"], retain_graph=True)

    return call


# ---- both


def _split(inputs: Arrays) -> tuple[Any, Any, Any, Any]:
    """Return x, the keys, the value and the weight so that they multiply."""
    x, kv = inputs["x"], inputs["kv"]
    tokens, streams, width = x.shape
    keys = kv[:, : streams * width].reshape(tokens, streams, width)
    return x, keys, kv[:, None, streams * width :], inputs["weight"]


def _wide(inputs: Arrays) -> list[Any]:
    return [np.asarray(array, np.float64) for array in _split(inputs)]


def _flat(*arrays: Any) -> Any:
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])


def _forward_class(inputs: Arrays, _outputs: Arrays, options: Any) -> Any:
    gate: Any = importlib.import_module("fe_attention")
    return gate.EngramGateSavedForward(*inputs.values(), **options)


def _case(tokens: int, width: int = 5120, streams: int = 4) -> Case:
    return Case({"N": tokens, "H": streams, "D": width}, "bfloat16")


_BENCH = (_case(4096), _case(8192), _case(1))
_PRESETS = {"default": (_case(4096), _case(4096, 7168), _case(4096, 4096), _case(4096, 2048))}
_DEMO = (_case(64, 1024), _case(64, 333), _case(1, 5120), _case(32, 512, 2))

ENGRAM_GATE = Workload(
    operation="fe_attention.engram.gate:FORWARD",
    wrapper="fe_attention:engram_gate_saved_forward",
    title="engram_gate_saved_forward",
    summary="x + sigmoid(root of the normed dot of x and key) * value",
    dims=DIMS,
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    demo=_DEMO,
    bench=_BENCH,
    host=_case(8, 512),
    presets=_PRESETS,
    make_class=_forward_class,
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)

ENGRAM_GATE_BACKWARD = Workload(
    operation="fe_attention.engram.gate:BACKWARD",
    wrapper="fe_attention:engram_gate_saved_backward",
    title="engram_gate_saved_backward",
    summary="gradients of the Engram gate from its saved state",
    dims=DIMS,
    operands=_backward_operands,
    inputs=_backward_inputs,
    expected=_backward_expected,
    decode=_decode,
    plain={},
    demo=_DEMO,
    bench=_BENCH[:2],
    host=_case(8, 512),
    presets=_PRESETS,
    peers=(Peer("torch.compile", "autograd of the plain expression", _autograd),),
)
