"""What the ``fe`` command runs of the CSA compressor and its gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.peers import torch_compiled
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload

__all__ = ["CSA_COMPRESSOR", "CSA_COMPRESSOR_BACKWARD", "lengths_of"]

DIMS = ("T", "B", "D")
ROUNDOFF = 2.0**-24
UNIT = 32 * ROUNDOFF
"""Bound on the fp32 arithmetic of an element, approximate exponentials and quotients included."""


def lengths_of(case: Case) -> list[int]:
    """Return the lengths of a case's sequences: as equal as they can be."""
    tokens, sequences = case.dims["T"], case.dims["B"]
    cuts = [tokens * number // sequences for number in range(sequences + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


def _form(case: Case) -> tuple[int, int]:
    ratio, coff = case.options["ratio"], case.options["coff"]
    assert isinstance(ratio, int)
    assert isinstance(coff, int)
    return ratio, coff


# ---- inputs


def _operands(case: Case) -> Operands:
    ratio, coff = _form(case)
    columns, offsets = coff * case.dims["D"], case.dims["B"] + 1
    return {
        "kv": ((case.dims["T"], columns), "bfloat16"),
        "score": ((case.dims["T"], columns), "bfloat16"),
        "ape": ((ratio, columns), "float32"),
        "cu_seqlens": ((offsets,), "int32"),
        "cu_seqlens_comp": ((offsets,), "int32"),
    }


def _inputs(case: Case, source: Source) -> Arrays:
    (ratio, _), lengths = _form(case), lengths_of(case)
    found = {name: source.normal(*known) for name, known in _operands(case).items() if not name.startswith("cu")}
    starts, blocks = (np.cumsum([0, *of]).astype(np.int32) for of in (lengths, [n // ratio for n in lengths]))
    return {**found, "cu_seqlens": source.array(starts), "cu_seqlens_comp": source.array(blocks)}


def _rows(case: Case) -> int:
    ratio, _ = _form(case)
    return sum(length // ratio for length in lengths_of(case))


def _backward_operands(case: Case) -> Operands:
    return {"grad_out": ((_rows(case), case.dims["D"]), "bfloat16"), **_operands(case)}


def _backward_inputs(case: Case, source: Source) -> Arrays:
    return {"grad_out": source.normal(*_backward_operands(case)["grad_out"]), **_inputs(case, source)}


# ---- the formula, sequence by sequence


def _windows(xp: Any, case: Case, array: Any, fill: float) -> list[Any]:
    """Return the windows of each sequence, (blocks, entries, D); what is before the first block is ``fill``."""
    (ratio, coff), width, start, found = _form(case), case.dims["D"], 0, []
    for length in lengths_of(case):
        blocks = length // ratio
        own = array[start : start + blocks * ratio].reshape(blocks, ratio, coff * width)
        if coff == 2:
            nothing = xp.full((1, ratio, width), fill, own.dtype)
            before = xp.concatenate([nothing, own[:, :, :width]])[:blocks]
            own = xp.concatenate([before, own[:, :, width:]], axis=1)
        found.append(own)
        start += length
    return found


def _biases(xp: Any, case: Case, ape: Any) -> Any:
    """Return the bias of each entry, (entries, D)."""
    (_, coff), width = _form(case), case.dims["D"]
    return xp.concatenate([ape[:, part * width : (part + 1) * width] for part in range(coff)])


def _pooled(xp: Any, case: Case, kv: Any, score: Any, ape: Any) -> tuple[Any, Any, Any]:
    """Return values, weights and distances from the largest score of all windows."""
    values = xp.concatenate(_windows(xp, case, kv, 0.0))
    x = xp.concatenate(_windows(xp, case, score, -float("inf"))) + _biases(xp, case, ape)
    far = x - x.max(axis=1, keepdims=True)
    e = xp.exp(far)
    return values, e / e.sum(axis=1, keepdims=True), far


def _wide(inputs: Arrays) -> list[Any]:
    return [np.asarray(inputs[name], np.float64) for name in ("kv", "score", "ape")]


def _expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the definition in float64; an exponential is the less exact the smaller it is."""
    values, p, far = _pooled(np, case, *_wide(inputs))
    out = (values * p).sum(axis=1)
    spread = 1 + np.where(np.isfinite(far), np.abs(far), 0.0)
    arithmetic = UNIT * (np.abs(values) * p * spread).sum(axis=1) + UNIT * (p * spread).sum(axis=1) * np.abs(out)
    return Expected(out.ravel(), allowed_in_dtype(out, "bfloat16", arithmetic).ravel())


def _backward_expected(case: Case, inputs: Arrays) -> Expected:
    """Evaluate the gradients in float64, and put them where the tokens are."""
    values, p, far = _pooled(np, case, *_wide(inputs))
    go = np.asarray(inputs["grad_out"], np.float64)[:, None]
    spread = 1 + np.where(np.isfinite(far), np.abs(far), 0.0)
    loose = (p * spread).sum(axis=1, keepdims=True)  # of the sum of the exponentials
    y, size = go * values * p, np.abs(go * values) * p * (spread + loose)
    ds, dkv = y - p * y.sum(axis=1, keepdims=True), go * p
    off_ds = UNIT * (size + p * size.sum(axis=1, keepdims=True) + np.abs(p * y.sum(axis=1, keepdims=True)) * spread)
    off_dkv = UNIT * np.abs(go) * p * (spread + loose)
    results = [(*(_at_tokens(case, a) for a in pair), "bfloat16") for pair in ((dkv, off_dkv), (ds, off_ds))]
    rows = values.shape[0] * ROUNDOFF  # whatever the order of the sum over blocks
    results.append(
        (_as_bias(case, ds.sum(axis=0)), _as_bias(case, (off_ds + rows * np.abs(ds)).sum(axis=0)), "float32")
    )
    allowed = [allowed_in_dtype(of, dtype, off).ravel() for of, off, dtype in results]
    return Expected(np.concatenate([of.ravel() for of, _, _ in results]), np.concatenate(allowed))


def _at_tokens(case: Case, entries: Any) -> Any:
    """Return what each column of each token has of the windows, (T, coff * D)."""
    (ratio, coff), width, start, row = _form(case), case.dims["D"], 0, 0
    found = np.zeros((case.dims["T"], coff * width))
    for length in lengths_of(case):
        blocks = length // ratio
        for part in range(coff):
            back = coff - 1 - part
            mine = entries[row + back : row + blocks, part * ratio : (part + 1) * ratio].reshape(-1, width)
            found[start : start + len(mine), part * width : (part + 1) * width] = mine
        start, row = start + length, row + blocks
    return found


def _as_bias(case: Case, entries: Any) -> Any:
    ratio, coff = _form(case)
    return np.concatenate([entries[part * ratio : (part + 1) * ratio] for part in range(coff)], axis=1)


def _decode(case: Case, outputs: Arrays) -> Any:
    del case
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in outputs.values()])


# ---- plain expressions


def _plain_numpy(case: Case, inputs: Arrays) -> Any:
    given = [np.asarray(inputs[name], np.float32) for name in ("kv", "score", "ape")]
    values, p, _ = _pooled(np, case, *given)
    return (values * p).sum(axis=1).astype(inputs["kv"].dtype)


def _plain_jax(case: Case, inputs: Arrays) -> Any:
    jnp: Any = importlib.import_module("jax.numpy")
    given = [inputs[name].astype(jnp.float32) for name in ("kv", "score", "ape")]
    values, p, _ = _pooled(jnp, case, *given)
    return (values * p).sum(axis=1).astype(inputs["kv"].dtype)


def _plain_torch(case: Case, inputs: Arrays) -> Any:
    """Pool all blocks at once; where tails lie between them, gather the blocks first."""
    torch: Any = importlib.import_module("torch")
    (ratio, coff), width, rows = _form(case), case.dims["D"], _rows(case)
    kv, score, comp = inputs["kv"], inputs["score"], inputs["cu_seqlens_comp"]
    if rows * ratio != case.dims["T"]:
        number = torch.arange(rows, device=kv.device)
        segment = torch.searchsorted(comp[1:].long(), number, right=True)
        first = inputs["cu_seqlens"].long()[segment] + (number - comp.long()[segment]) * ratio
        tokens = (first[:, None] + torch.arange(ratio, device=kv.device)).reshape(-1)
        kv, score = kv[tokens], score[tokens]
    values, x = (array.reshape(rows, ratio, coff * width).float() for array in (kv, score))
    x = x + inputs["ape"]
    if coff == 2:
        is_first = torch.zeros(rows, dtype=torch.bool, device=kv.device).index_fill(0, comp[:-1].long(), True)
        before = torch.roll(x[..., :width], 1, 0).masked_fill(is_first[:, None, None], -float("inf"))
        x = torch.cat([before, x[..., width:]], 1)
        values = torch.cat([torch.roll(values[..., :width], 1, 0), values[..., width:]], 1)
    return (values * torch.softmax(x, 1)).sum(1).to(kv.dtype)


def _autograd(case: Case) -> Callable[[Arrays], Any]:
    """Return calls of torch's autograd through the compiled expression, which ran before on a graph that is kept."""
    torch: Any = importlib.import_module("torch")
    settings: Any = importlib.import_module("torch._functorch.config")
    settings.donated_buffer = False
    forward = torch_compiled(_plain_torch)(case)
    graphs: dict[int, tuple[Any, ...]] = {}

    def call(arrays: Arrays) -> Any:
        if id(arrays) not in graphs:
            leaves = {name: arrays[name].detach().requires_grad_() for name in ("kv", "score", "ape")}
            others = {name: arrays[name] for name in ("cu_seqlens", "cu_seqlens_comp")}
            with torch.enable_grad():
                graphs[id(arrays)] = forward({**leaves, **others}), tuple(leaves.values()), arrays
        out, leaves, _ = graphs[id(arrays)]
        return torch.autograd.grad(out, leaves, arrays["grad_out"], retain_graph=True)

    return call


# ---- cases


def _case(tokens: int, sequences: int, width: int, ratio: int = 4, coff: int = 2) -> Case:
    return Case({"T": tokens, "B": sequences, "D": width}, "bfloat16", {"ratio": ratio, "coff": coff})


def _with_rows(case: Case) -> Case:
    """Return the case of the forward: with the rows of its result, so that nothing has to be read."""
    return Case(case.dims, case.dtype, {**case.options, "total_comp": _rows(case)})


_BENCH = tuple(
    _case(tokens, sequences, width, ratio, coff)
    for width, ratio, coff in ((512, 4, 2), (128, 4, 2), (512, 128, 1))
    for tokens, sequences in ((8192, 1), (8192, 16), (65536, 7))
)
_DEMO = (_case(1024, 4, 128), _case(1001, 3, 96), _case(2048, 4, 64, 128, 1), _case(600, 2, 33, 2, 2))
_PRESETS = (_case(8192, 1, 512), _case(8192, 1, 128), _case(8192, 1, 512, 128, 1), _case(8192, 1, 128, 128, 1))
_HOST = _case(64, 1, 128)


CSA_COMPRESSOR = Workload(
    operation="fe_attention.csa.compressor:FORWARD",
    wrapper="fe_attention:csa_compressor_forward_wrapper",
    title="csa_compressor_forward",
    summary="softmax pooling of blocks of packed tokens",
    dims=DIMS,
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=_decode,
    plain={"numpy": _plain_numpy, "torch": _plain_torch, "jax": _plain_jax},
    demo=tuple(map(_with_rows, _DEMO)),
    bench=tuple(map(_with_rows, _BENCH)),
    host=_with_rows(_HOST),
    presets={"default": tuple(map(_with_rows, _PRESETS))},
    peers=(Peer("torch.compile", "the plain expression", torch_compiled(_plain_torch)),),
)

CSA_COMPRESSOR_BACKWARD = Workload(
    operation="fe_attention.csa.compressor:BACKWARD",
    wrapper="fe_attention:csa_compressor_backward_wrapper",
    title="csa_compressor_backward",
    summary="gradients of the pooling",
    dims=DIMS,
    operands=_backward_operands,
    inputs=_backward_inputs,
    expected=_backward_expected,
    decode=_decode,
    plain={},
    demo=_DEMO,
    bench=_BENCH,
    host=_HOST,
    presets={"default": _PRESETS},
    peers=(Peer("torch.compile", "autograd of the plain expression", _autograd),),
)
