"""The gate of Engram layers: with its saved state and the gradient from it, and as one differentiable operation."""

from __future__ import annotations

from typing import Any

from fe_attention.implied_outputs import ImpliedOutputsAPI
from fe_attention.workspace import WorkspaceAPI
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.tuple_dict import TupleDict

from . import contract

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GATE",
    "EngramGateSavedBackward",
    "EngramGateSavedForward",
    "engram_gate",
    "engram_gate_jax",
    "engram_gate_saved_backward",
    "engram_gate_saved_backward_jax",
    "engram_gate_saved_forward",
    "engram_gate_saved_forward_jax",
]


def engram_gate_saved_forward(
    x: Any,
    kv: Any,
    weight: Any,
    token_mask: Any,
    *,
    eps: float = 1e-20,
    backend: str = "frost",
    current_stream: Any = None,
) -> TupleDict:
    """Add to each stream of a token the token's value times the stream's gate, and keep what the gradient needs.

    ``rx = 1/sqrt(mean_D(x^2) + eps)``, ``rk`` alike of the key k, ``dot = (sum_D (x*w)*k) * (rx*rk) * D^-1/2``,
    ``gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))``, 0 where the token is masked; ``out = x + gate*v``, in
    fp32, rounded once.

    Parameters
    ----------
    x
        (N, H, D), bfloat16: the streams of each token.
    kv
        (N, (H + 1) * D), bfloat16: a key of each stream, then the value that they share.
    weight
        (H, D), float32: product of the weights of both norms.
    token_mask
        (N,), bool. ``False``: the token's gates are 0.
    eps
        Added to the mean squares; > 0. A new value never compiles anything.
    backend
        ``"frost"`` or ``"auto"``, ``"reference"``, or a kernel backend such as ``"sm90"``.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).

    Returns
    -------
    TupleDict
        ``out`` (N, H, D), bfloat16; ``saved`` (N, H, 4), float32: gate, dot, rx, rk.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, alignment or options break the contract.

    Notes
    -----
    All arrays are contiguous, on a GPU 16-byte aligned. A stream whose gate is 0 passes x on, whatever key and value
    hold. The sign of the gate's root is the sign bit of dot: ``-0.0`` counts as negative. Deterministic. Not
    differentiable, as at the peer: see :func:`engram_gate`.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: Engram saved-state gate.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> x, kv = np.ones((1, 2, 4), ml_dtypes.bfloat16), np.ones((1, 12), ml_dtypes.bfloat16)
    >>> out, saved = engram_gate_saved_forward(x, kv, np.ones((2, 4), np.float32), np.array([True]))
    >>> out.shape, saved[0, 0].astype(float).round(4).tolist()
    ((1, 2, 4), [0.8044, 2.0, 1.0, 1.0])
    """
    return FORWARD((x, kv, weight, token_mask), {"eps": eps}, stream=current_stream, backend=_backend(backend))


def engram_gate_saved_backward(
    x: Any,
    kv: Any,
    weight: Any,
    saved: Any,
    grad_out: Any,
    *,
    backend: str = "frost",
    current_stream: Any = None,
) -> TupleDict:
    """Return the gradients of :func:`engram_gate_saved_forward` from what it saved.

    With g the gradient of ``out``: ``ddot = (sum_D g*v)*gate*(1 - gate)*0.5/root``, 0 where ``|dot| < 1e-6``,
    ``c = ddot*rx*rk*D^-1/2``, ``cx = ddot*dot*rx^2/D``, ``ck = ddot*dot*rk^2/D``; ``dx = g + c*w*k - cx*x``,
    ``dk = c*w*x - ck*k``, ``dv = sum over streams of gate*g``, ``dweight = sum over tokens of c*x*k``.

    Parameters
    ----------
    x, kv, weight
        As given to the forward.
    saved
        (N, H, 4), float32, as the forward returned it. The mask is in it: gate 0.
    grad_out
        (N, H, D), bfloat16: gradient of ``out``.
    backend, current_stream
        As for the forward.

    Returns
    -------
    TupleDict
        ``grad_x`` (N, H, D) and ``grad_kv`` (N, (H + 1) * D), bfloat16, each rounded once; ``grad_weight`` (H, D),
        float32.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract.

    Notes
    -----
    A stream whose gate is 0 passes g on to ``grad_x`` and counts nowhere else, even if its operands hold NaN.
    Deterministic: the order of the sums over tokens depends on the GPU model and the number of tokens only.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: Engram saved-state gate.
    """
    return BACKWARD((grad_out, x, kv, weight, saved), {}, stream=current_stream, backend=_backend(backend))


def engram_gate(x: Any, kv: Any, weight: Any, token_mask: Any, *, eps: float = 1e-20, backend: str = "frost") -> Any:
    """Return ``out`` of :func:`engram_gate_saved_forward`, differentiable in x, kv and weight.

    The state is saved inside: torch's autograd and JAX's ``grad`` call :func:`engram_gate_saved_backward`, once.
    Parameters and errors are those of the forward.
    """
    out, _ = GATE.outputs((x, kv, weight, token_mask), {"eps": eps}, backend=_backend(backend))
    return out


def engram_gate_jax(
    x: Any, kv: Any, weight: Any, token_mask: Any, *, eps: float = 1e-20, backend: str = "frost"
) -> Any:
    """Apply :func:`engram_gate` to JAX arrays, eagerly, under ``jit`` and under ``grad``; options are static."""
    from fe_runtime.jax.entry import entry

    out, _ = entry(GATE, (x, kv, weight, token_mask), {"eps": eps}, _backend(backend))
    return out


def engram_gate_saved_forward_jax(
    x: Any, kv: Any, weight: Any, token_mask: Any, *, eps: float = 1e-20, backend: str = "frost"
) -> tuple[Any, Any]:
    """Apply :func:`engram_gate_saved_forward` to JAX arrays, eagerly or under ``jit``: ``(out, saved)``."""
    from fe_runtime.jax.entry import entry

    out, saved = entry(FORWARD, (x, kv, weight, token_mask), {"eps": eps}, _backend(backend))
    return out, saved


def engram_gate_saved_backward_jax(
    x: Any, kv: Any, weight: Any, saved: Any, grad_out: Any, *, backend: str = "frost"
) -> tuple[Any, Any, Any]:
    """Apply :func:`engram_gate_saved_backward` to JAX arrays: ``(grad_x, grad_kv, grad_weight)``."""
    from fe_runtime.jax.entry import entry

    grad_x, grad_kv, grad_weight = entry(BACKWARD, (grad_out, x, kv, weight, saved), {}, _backend(backend))
    return grad_x, grad_kv, grad_weight


class EngramGateSavedForward(ImpliedOutputsAPI):
    """The gate into the caller's outputs; see :func:`engram_gate_saved_forward`.

    The number of tokens may change between executions; everything else is fixed.
    """

    def __init__(
        self, x: Any, kv: Any, weight: Any, token_mask: Any, *, eps: float = 1e-20, backend: str = "frost"
    ) -> None:
        inputs = (x, kv, weight, token_mask)
        super().__init__(FORWARD, inputs, {"eps": eps}, _backend(backend))

    def execute(
        self,
        x: Any,
        kv: Any,
        weight: Any,
        token_mask: Any,
        out: Any,
        saved: Any,
        *,
        current_stream: Any = None,
    ) -> TupleDict:
        """Write into ``out`` and ``saved``, and return them by name; no synchronisation."""
        self._execute((x, kv, weight, token_mask), (out, saved), current_stream)
        return TupleDict.of(FORWARD.output_names, (out, saved))


class EngramGateSavedBackward(WorkspaceAPI):
    """The gradients into the caller's outputs, with the caller's workspace; see :func:`engram_gate_saved_backward`.

    The number of tokens may change between executions, to any for which the workspace is large enough.
    """

    def __init__(self, x: Any, kv: Any, weight: Any, saved: Any, grad_out: Any, *, backend: str = "frost") -> None:
        inputs = (grad_out, x, kv, weight, saved)
        super().__init__(BACKWARD, inputs, {}, _backend(backend))

    def execute(
        self,
        x: Any,
        kv: Any,
        weight: Any,
        saved: Any,
        grad_out: Any,
        grad_x: Any,
        grad_kv: Any,
        grad_weight: Any,
        workspace: Any,
        *,
        current_stream: Any = None,
    ) -> TupleDict:
        """Write into ``grad_x``, ``grad_kv`` and ``grad_weight``, and return them by name; no synchronisation."""
        outputs = (grad_x, grad_kv, grad_weight)
        self._execute_in(workspace, (grad_out, x, kv, weight, saved), outputs, current_stream)
        return TupleDict.of(BACKWARD.output_names, outputs)


def _backend(backend: str) -> str:
    """Return the backend by our names: the peer's only one, its default, means the best there is."""
    return "auto" if backend == "frost" else backend


FORWARD = Operation(
    "fe_attention",
    contract.FORWARD,
    reference="fe_attention.reference.engram:engram_gate_saved_forward",
    find_kernel=contract.find_kernel,
    jax_entry="fe_attention.engram_gate_saved_forward_jax",
    stream_argument="current_stream",
)

BACKWARD = Operation(
    "fe_attention",
    contract.BACKWARD,
    reference="fe_attention.reference.engram:engram_gate_saved_backward",
    find_kernel=contract.find_backward_kernel,
    jax_entry="fe_attention.engram_gate_saved_backward_jax",
    stream_argument="current_stream",
)

GATE = Operation(
    "fe_attention",
    contract.GATE,
    reference="fe_attention.reference.engram:engram_gate_saved_forward",
    find_kernel=contract.find_kernel,
    gradient=Gradient(BACKWARD, residuals=("x", "kv", "weight", "saved"), wrt=("x", "kv", "weight"), outputs=("out",)),
    jax_entry="fe_attention.engram_gate_jax",
)
