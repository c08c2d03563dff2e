"""The gated MLP of Llama-like models on ``gemm_swiglu``, and the form of the weights that it needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from fe_gemm import gemm_swiglu_jax, gemm_swiglu_wrapper
from fe_runtime.arrays import detect_framework, is_torch_tensor
from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["interleave_gate_up", "split_gate_up", "swiglu_mlp", "swiglu_mlp_interleaved"]

BLOCK = 32
"""Rows of up that are followed by as many of gate."""
ALIGNMENT = 16
"""Bytes of which the length of a row of x is a multiple."""


def swiglu_mlp(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    """Apply a gated MLP: ``(silu(x w_gate^T) * (x w_up^T)) w_down^T``.

    Parameters
    ----------
    x
        (..., K), any leading dimensions; bfloat16, float16 or float32; torch, JAX or numpy. K a multiple of 8 in
        16 bits.
    w_gate, w_up
        (F, K), dtype of x; any F > 0.
    w_down
        (O, F), dtype of x.

    Returns
    -------
    array
        (..., O), dtype of x.

    Raises
    ------
    InvalidArgumentError
        Shapes or dtypes do not fit together.

    Notes
    -----
    In 16 bits ``gemm_swiglu`` makes the hidden activations, rounded once from sums and activation in fp32; the last
    product is the framework's. float32 has no kernel: all three products are the framework's.

    In 16 bits each call interleaves ``w_gate`` and ``w_up`` into a new array, which reads and writes 2 F K values, and
    their gradients back: little beside the product for thousands of rows of x, more than the product for a few. Nothing
    is kept from call to call, since no framework tells reliably that a weight has not been written to. To save it, keep
    the weights interleaved: :func:`interleave_gate_up` once, then :func:`swiglu_mlp_interleaved`.

    Differentiable once in all four arrays, in torch and in JAX; works under ``torch.compile(fullgraph=True)`` and
    ``jax.jit``. Deterministic where the framework's products are.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((2, 3, 8), np.float32), np.full((64, 8), 0.25, np.float32)
    >>> swiglu_mlp(x, w, w, np.ones((4, 64), np.float32)).shape
    (2, 3, 4)
    """
    _check(x, {"w_gate": w_gate, "w_up": w_up}, w_down, "swiglu_mlp")
    if not _is_half(x):
        hidden = _silu(x @ w_gate.T) * (x @ w_up.T)
        return hidden @ w_down.T
    return _fused(x, interleave_gate_up(w_gate, w_up), w_down)


def swiglu_mlp_interleaved(x: Any, w_gate_up: Any, w_down: Any) -> Any:
    """Apply :func:`swiglu_mlp` with gate and up in one weight, as :func:`interleave_gate_up` returns it.

    Parameters
    ----------
    x
        (..., K), as for :func:`swiglu_mlp`.
    w_gate_up
        (2 P, K) with P = F rounded up to a multiple of 32: of every 64 rows, 32 of up, then 32 of gate.
    w_down
        (O, F).

    Returns
    -------
    array
        (..., O), dtype of x.

    Raises
    ------
    InvalidArgumentError
        Shapes or dtypes do not fit together.

    Notes
    -----
    Otherwise like :func:`swiglu_mlp`. Rows beyond F have no effect and get gradients of zero.
    """
    _check(x, {"w_gate_up": w_gate_up}, w_down, "swiglu_mlp_interleaved")
    if _is_half(x):
        return _fused(x, w_gate_up, w_down)
    return swiglu_mlp(x, *split_gate_up(w_gate_up, w_down.shape[1]), w_down)


def interleave_gate_up(w_gate: Any, w_up: Any) -> Any:
    """Return gate and up as one weight for ``gemm_swiglu``: of every 64 rows, 32 of up, then 32 of gate.

    Parameters
    ----------
    w_gate, w_up
        (F, ...), of one dtype; torch, JAX or numpy.

    Returns
    -------
    array
        (2 P, ...), P = F rounded up to a multiple of 32; missing rows are zero.

    Raises
    ------
    InvalidArgumentError
        The shapes or dtypes differ, or there are no rows.

    Notes
    -----
    A copy, differentiable in both. :func:`split_gate_up` is its inverse.

    Examples
    --------
    >>> import numpy as np
    >>> gate, up = np.zeros((40, 8), np.float32), np.ones((40, 8), np.float32)
    >>> w = interleave_gate_up(gate, up)
    >>> w.shape, w[:, 0].reshape(4, 32).mean(1).tolist()
    ((128, 8), [1.0, 0.0, 0.25, 0.0])
    """
    if w_gate.shape != w_up.shape or w_gate.dtype != w_up.dtype:
        given = f"{tuple(w_up.shape)} of {w_up.dtype}"
        raise _error("interleave_gate_up", "w_up", f"be {tuple(w_gate.shape)} of {w_gate.dtype}, like w_gate", given)
    if w_gate.ndim < 1 or w_gate.shape[0] < 1:
        raise _error("interleave_gate_up", "w_gate", "have rows", f"shape {tuple(w_gate.shape)}")
    missing = -w_gate.shape[0] % BLOCK
    gate, up = (_with_rows(w, missing).reshape((-1, BLOCK, *w.shape[1:])) for w in (w_gate, w_up))
    return _stacked(up, gate).reshape((-1, *w_gate.shape[1:]))


def split_gate_up(w_gate_up: Any, features: int | None = None) -> tuple[Any, Any]:
    """Return ``(w_gate, w_up)`` of an interleaved weight, or of its gradient.

    Parameters
    ----------
    w_gate_up
        (2 P, ...), P a multiple of 32; torch, JAX or numpy.
    features
        How many rows gate and up have; ``None``: P.

    Returns
    -------
    tuple
        (F, ...) each; copies, differentiable.

    Raises
    ------
    InvalidArgumentError
        The rows are no multiple of 64, or there are fewer than ``features``.
    """
    rows = w_gate_up.shape[0] if w_gate_up.ndim else 0
    if rows < 1 or rows % (2 * BLOCK):
        rule = f"have a multiple of {2 * BLOCK} rows"
        raise _error("split_gate_up", "w_gate_up", rule, f"shape {tuple(w_gate_up.shape)}")
    count = rows // 2 if features is None else features
    if not 0 < count <= rows // 2:
        raise _error("split_gate_up", "features", f"lie between 1 and {rows // 2}", count)
    rest = w_gate_up.shape[1:]
    pairs = w_gate_up.reshape((-1, 2, BLOCK, *rest))
    up, gate = (pairs[:, number].reshape((-1, *rest))[:count] for number in range(2))
    return gate, up


def _fused(x: Any, w_gate_up: Any, w_down: Any) -> Any:
    """Return the MLP of 16-bit arrays that fit together."""
    rows = _contiguous(x.reshape((-1, x.shape[-1])))
    product: Any = gemm_swiglu_jax if _is_jax(x) else gemm_swiglu_wrapper
    options = {"ab12_dtype": x.dtype, "c_dtype": x.dtype}
    _, hidden, *_ = product(rows[:, :, None], w_gate_up[:, :, None], **options)
    result = _down(hidden[:, : w_down.shape[1], 0], w_down)
    return result.reshape((*x.shape[:-1], w_down.shape[0]))


def _check(x: Any, weights: dict[str, Any], w_down: Any, operation: str) -> None:
    """Raise unless all arrays fit together."""
    for name, array in {"x": x, **weights, "w_down": w_down}.items():
        if array.ndim < 1 or (name != "x" and array.ndim != 2) or 0 in array.shape[-1 if name == "x" else 0 :]:
            rule = "have a last dimension" if name == "x" else "be a matrix"
            raise _error(operation, name, rule, f"shape {tuple(array.shape)}")
        if array.dtype != x.dtype:
            raise _error(operation, name, f"be of {x.dtype}, like x", array.dtype, "Convert it.")
    width, features = x.shape[-1], w_down.shape[1]
    rows = -(-features // BLOCK) * 2 * BLOCK if "w_gate_up" in weights else features
    for name, array in weights.items():
        if tuple(array.shape) != (rows, width):
            fix = "Its rows follow from w_down, its columns from x."
            raise _error(operation, name, f"have shape {(rows, width)}", tuple(array.shape), fix)
    if x.dtype.itemsize not in (2, 4):
        raise _error(operation, "x", "be bfloat16, float16 or float32", x.dtype, "Convert it.")
    if _is_half(x) and width * x.dtype.itemsize % ALIGNMENT:
        rule = f"have a multiple of {ALIGNMENT // x.dtype.itemsize} as last dimension"
        raise _error(operation, "x", rule, width, "Pad x and the weights with zeros.")


def _error(operation: str, argument: str, rule: str, given: object, fix: str = "") -> InvalidArgumentError:
    return InvalidArgumentError(explain(operation, argument, rule, given, fix))


def _is_half(x: Any) -> bool:
    return bool(x.dtype.itemsize == 2)


def _with_rows(w: Any, count: int) -> Any:
    """Return an array with so many rows of zeros below it."""
    if count == 0:
        return w
    if is_torch_tensor(w):
        return _torch().cat((w, w.new_zeros((count, *w.shape[1:]))))
    xp = _array_module(w)
    return xp.concatenate((w, xp.zeros((count, *w.shape[1:]), w.dtype)))


def _stacked(first: Any, second: Any) -> Any:
    return (_torch() if is_torch_tensor(first) else _array_module(first)).stack((first, second), 1)


def _contiguous(x: Any) -> Any:
    if is_torch_tensor(x):
        return x.contiguous()
    return x if _is_jax(x) else np.ascontiguousarray(x)


def _silu(gate: Any) -> Any:
    if is_torch_tensor(gate):
        return _torch().nn.functional.silu(gate)
    half = gate * 0.5
    return half + half * _array_module(gate).tanh(half)  # no overflow


def _down(hidden: Any, weight: Any) -> Any:
    """Return ``hidden weight^T``, summed in fp32."""
    if is_torch_tensor(hidden):
        return _torch().nn.functional.linear(hidden, weight)
    if _is_jax(hidden):
        return hidden @ weight.T
    return (hidden.astype(np.float32) @ weight.astype(np.float32).T).astype(hidden.dtype)


def _is_jax(x: Any) -> bool:
    return detect_framework(x) == "jax"  # torch is asked first: torch.compile cannot trace the question for jax


def _array_module(x: Any) -> Any:
    """Return the module of a JAX or numpy array's functions."""
    if not _is_jax(x):
        return np
    import jax.numpy

    return jax.numpy


def _torch() -> Any:
    import torch  # a statement: torch.compile traces it, a call of importlib it does not

    return torch
