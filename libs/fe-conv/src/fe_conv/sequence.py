"""``causal_conv1d``: the causal depthwise convolution of whole sequences, with its gradient."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from fe_runtime.arrays import describe, detect_framework, is_numpy_array, is_torch_tensor, is_tracer, overlap
from fe_runtime.contract import UNIT_INNER, Bound
from fe_runtime.contract.bind import is_writable
from fe_runtime.errors import DtypeError, InvalidArgumentError, explain
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.strides import has_distinct_elements
from fe_runtime.tensor_desc import TensorDesc

from . import launch
from .sequence_contract import backward_contract, check_offsets, forward_contract

__all__ = [
    "BACKWARD",
    "CHANNEL_LAST",
    "CHANNEL_LAST_BACKWARD",
    "OPERATION",
    "causal_conv1d",
    "causal_conv1d_jax",
    "causal_conv1d_last_route",
]


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    backend: str = "auto",
) -> Any:
    """Convolve each channel with its own filter, causally, within each sequence.

    ``h = concat(initial_states or zeros, x)`` of a sequence, ``z[d,t] = sum_j weight[d,j]*h[d,t+j] + bias[d]`` with
    ``j = 0..W-1``, ``y = z`` or ``z*sigmoid(z)``: in fp32 (fp64 for fp64 input), oldest tap first, rounded once.

    Parameters
    ----------
    x
        (B, D, T), any strides; bfloat16, float16, float32 or float64. Fastest: tokens or channels of stride 1.
    weight
        (D, W), W >= 2; dtype of x, or float32 with bfloat16 x. ``weight[:, W-1]`` meets the current token.
    bias
        (D,), dtype of x; or ``None``.
    activation
        ``None`` or ``"identity"``; ``"silu"`` or ``"swish"``.
    seq_idx
        (B, T) int32: a tap counts only if its token has the label of the current one. A negative label means padding:
        output 0, no gradient.
    cu_seqlens
        (N+1,) int32 or int64, on the device: B is 1, sequence ``n`` is ``[cu_seqlens[n], cu_seqlens[n+1])``. Members
        may be empty; tokens outside of all of them give 0.
    initial_states
        (B, D, W-1), with cu_seqlens (N, D, W-1); any strides, dtype of x.
    return_final_states
        Also return the last W-1 entries of each ``h``, copied bit for bit.
    final_states_out
        Where to write them; then this very array is returned. Any strides; shares no memory with the inputs.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    array or tuple
        ``y`` in the shape, dtype and memory format of x; ``(y, final_states)`` with ``return_final_states``. New
        states have the channels innermost: strides ``((W-1)*D, 1, D)``.

    Raises
    ------
    TypeError
        An argument of the wrong kind; as ``DtypeError``: dtypes that do not agree.
    InvalidArgumentError
        Shapes, devices or options that break the contract; ``final_states_out`` overlaps an input.
    NotSupportedError
        Another activation, ``seq_idx`` with ``initial_states``, or a backend without a kernel for the call.

    Notes
    -----
    Differentiable once, in x, weight, bias and initial_states; every result and gradient is the same bit by bit each
    time. A new length, batch or content of ``cu_seqlens`` never compiles anything. Offsets that decrease or leave the
    tokens raise on the CPU and in checked mode (``FE_CHECK_DEVICE_VALUES=1``); otherwise results are finite garbage,
    and nothing outside the arrays is touched.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: causal_conv1d.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.arange(4.0).reshape(1, 1, 4), np.array([[1.0, 10.0]])
    >>> causal_conv1d(x, weight)
    array([[[ 0., 10., 21., 32.]]])
    >>> y, states = causal_conv1d(x, weight, cu_seqlens=np.array([0, 2, 4]), return_final_states=True)
    >>> y.ravel().tolist(), states.ravel().tolist()
    ([0.0, 10.0, 20.0, 32.0], [1.0, 3.0])
    """
    if final_states_out is not None and return_final_states is False:
        rule, fix = "be None without return_final_states=True", "Set return_final_states=True."
        raise InvalidArgumentError(explain("causal_conv1d", "final_states_out", rule, "an array", fix))
    channel_last = _is_channel_last(x)
    operation = CHANNEL_LAST if channel_last else OPERATION
    arrays = (
        _with_unit_inner(x.swapaxes(1, 2) if channel_last else x),
        _contiguous(weight),
        _contiguous(bias),
        _contiguous(seq_idx),
        _contiguous(cu_seqlens),
        initial_states,
    )
    options = {"activation": activation, "return_final_states": return_final_states}
    inputs = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "initial_states": initial_states}
    if final_states_out is not None and not _is_compiling():  # the compiler hides addresses: it gets the copy's checks
        _check_destination(final_states_out, operation.bind(arrays, options), inputs)
    y, final = operation.outputs(arrays, options, backend=backend)
    if not _is_compiling():
        _remember(operation, arrays, options, backend, y)
    y = _in_format_of(x, y, channel_last)
    if final is None:
        return y
    final = final.swapaxes(1, 2)
    if final_states_out is None:
        return y, final
    return y, _write(final_states_out, final)


def causal_conv1d_jax(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    channel_last: bool = False,
    backend: str = "auto",
) -> Any:
    """Convolve each channel of a JAX array with its own filter, eagerly or under ``jit`` and ``grad``.

    Same formula, dtypes and errors as :func:`causal_conv1d`. Static: ``activation``, ``return_final_states``,
    ``channel_last``, ``backend`` and which arrays are given.

    Parameters
    ----------
    channel_last
        x and y are (B, T, D) instead of (B, D, T); the states are (B or N, D, W-1) either way.

    Returns
    -------
    jax.Array or tuple
        ``y``, or ``(y, final_states)``.
    """
    from fe_runtime.jax.entry import entry

    if not isinstance(channel_last, bool):
        given = f"{type(channel_last).__name__} {channel_last!r}"
        raise TypeError(explain("causal_conv1d", "channel_last", "be a Python bool", given, "Make it static."))
    operation = CHANNEL_LAST if channel_last else OPERATION
    arrays = (x, weight, bias, seq_idx, cu_seqlens, initial_states)
    options = {"activation": activation, "return_final_states": return_final_states}
    y, final = entry(operation, arrays, options, backend)
    return y if final is None else (y, final.swapaxes(1, 2))


def causal_conv1d_last_route() -> str | None:
    """Return how the last eager call of :func:`causal_conv1d` ran, for tests and diagnosis.

    Returns
    -------
    str or None
        ``"native-autograd"`` or ``"native-inference"``: a kernel, with or without a recorded gradient; ``"generic"``:
        the reference; ``None``: there was no call. Compiling and tracing leave it as it is.
    """
    if _last is None:
        return None
    operation, known, options, backend, has_gradient = _last
    arrays = [None if a is None else a if isinstance(a, TensorDesc) else _description(*a) for a in known]
    if operation.plan(operation.bind(arrays, options), backend).kernel is None:
        return "generic"
    return "native-autograd" if has_gradient else "native-inference"


def _gradient(backward: Operation) -> Gradient:
    inputs = ("x", "weight", "bias", "seq_idx", "cu_seqlens", "initial_states")
    return Gradient(
        backward,
        residuals=inputs,
        wrt=("x", "weight", "bias", "initial_states"),
        outputs=("y", "final_states"),
        options=("activation",),
    )


BACKWARD = Operation(
    "fe_conv",
    backward_contract(channel_last=False),
    reference="fe_conv.reference.causal_conv1d:causal_conv1d_backward",
    find_kernel=lambda bound, target: launch.backward_kernel(bound, launch.CHANNEL_FIRST, target),
)

OPERATION = Operation(
    "fe_conv",
    forward_contract(channel_last=False),
    reference="fe_conv.reference.causal_conv1d:causal_conv1d",
    find_kernel=lambda bound, target: launch.forward_kernel(bound, launch.CHANNEL_FIRST, target),
    gradient=_gradient(BACKWARD),
    jax_entry="fe_conv.causal_conv1d_jax",
    check_values=check_offsets,
)

CHANNEL_LAST_BACKWARD = Operation(
    "fe_conv",
    backward_contract(channel_last=True),
    reference="fe_conv.reference.causal_conv1d:causal_conv1d_channel_last_backward",
    find_kernel=lambda bound, target: launch.backward_kernel(bound, launch.CHANNEL_LAST, target),
)

CHANNEL_LAST = Operation(
    "fe_conv",
    forward_contract(channel_last=True),
    reference="fe_conv.reference.causal_conv1d:causal_conv1d_channel_last",
    find_kernel=lambda bound, target: launch.forward_kernel(bound, launch.CHANNEL_LAST, target),
    gradient=_gradient(CHANNEL_LAST_BACKWARD),
    jax_entry="fe_conv.causal_conv1d_jax",
    check_values=check_offsets,
)

_Array = TensorDesc | tuple[Any, Any, Any, Any] | None
_last: tuple[Operation, list[_Array], Mapping[str, object], str, bool] | None = None


def _remember(operation: Operation, arrays: Any, options: Mapping[str, object], backend: str, y: Any) -> None:
    """Keep the metadata of a call, from which its route follows when somebody asks."""
    global _last
    if is_torch_tensor(y):
        known: list[_Array] = [None if a is None else (a.dtype, a.shape, a.stride(), a.device) for a in arrays]
        _last = operation, known, options, backend, y.requires_grad
    elif not is_tracer(y):
        _last = operation, [None if a is None else describe(a) for a in arrays], options, backend, False


def _description(dtype: Any, shape: Any, stride: Any, device: Any) -> TensorDesc:
    return TensorDesc.of(dtype, tuple(shape), stride, device=device)


def _is_compiling() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def _is_channel_last(x: Any) -> bool:
    """Return whether the channels of (B, D, T) are to be the inner dimension: of unit stride, or closer to it."""
    stride = _strides(x)
    if stride is None:
        return False
    _, channels, length = x.shape
    tokens_inside, channels_inside = stride[2] == 1 or length == 1, stride[1] == 1 or channels == 1
    if tokens_inside and channels_inside:
        return bool(length == 1)
    return channels_inside or not (tokens_inside or stride[2] < stride[1])


def _strides(x: Any) -> tuple[int, ...] | None:
    """Return the strides of an array of three dimensions; ``None`` if it is none, or has none."""
    if is_torch_tensor(x) and x.dim() == 3:
        return x.stride()  # type: ignore[no-any-return]
    if is_numpy_array(x) and x.ndim == 3:
        return tuple(step // x.itemsize for step in x.strides)
    return None


def _with_unit_inner(x: Any) -> Any:
    if is_torch_tensor(x):
        return x if x.dim() != 3 or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
    stride = _strides(x)
    return x if stride is None or UNIT_INNER.holds(x.shape, stride) else np.ascontiguousarray(x)


def _contiguous(array: Any) -> Any:
    if is_torch_tensor(array):
        return array.contiguous()
    return np.ascontiguousarray(array) if is_numpy_array(array) and array.ndim else array


def _in_format_of(x: Any, y: Any, channel_last: bool) -> Any:
    """Return y (B, D, T) with the strides of ``empty_like(x)``, from y in the layout of its operation."""
    stride = _strides(x)
    if stride is None:
        return y.swapaxes(1, 2) if channel_last else y
    batch, channels, length = x.shape
    if channel_last:
        y = y.reshape(x.shape) if length == 1 and stride[2] == 1 else y.swapaxes(1, 2)
    elif channels == 1 and stride[1] == 1:
        y = y.reshape(batch, length, 1).swapaxes(1, 2)
    if batch == 1 or not 0 < stride[0] < max(stride[1], stride[2]):
        return y
    if is_torch_tensor(x):  # the batch is not outermost
        return sys.modules["torch"].empty_like(x).copy_(y)
    result = np.empty_like(x)
    result[...] = y
    return result


def _write(out: Any, final: Any) -> Any:
    """Copy the final states into the caller's array and return that."""
    if is_torch_tensor(out):
        return out.copy_(final)
    out[...] = final
    return out


def _check_destination(out: Any, bound: Bound, inputs: Mapping[str, Any]) -> None:
    """Check the caller's array for the final states, before anything is computed."""

    def check(holds: bool, rule: str, given: object, error: type[Exception] = InvalidArgumentError) -> None:
        if not holds:
            fix = "Leave it out for a new array."
            raise error(explain("causal_conv1d", "final_states_out", rule, given, fix))

    kind = type(out).__name__
    check(hasattr(out, "shape") and hasattr(out, "dtype"), "be an array", kind, TypeError)
    check(bound.framework != "jax", "be None for JAX arrays", kind)
    check(detect_framework(out) == bound.framework, f"come from the framework of x ({bound.framework})", kind)
    found, final = describe(out, "final_states_out"), bound.outputs[1]
    assert final is not None
    rows, taps, channels = final.shape
    shape = (rows, channels, taps)
    check(tuple(found.shape) == shape, f"have shape {shape}", f"shape {tuple(found.shape)}")
    check(found.dtype == final.dtype, f"have the dtype of x ({final.dtype})", found.dtype, DtypeError)
    check(found.device == bound.device, f"be on the device of x ({bound.device})", found.device)
    check(is_writable(out), "be writable", "a read-only array")
    check(
        has_distinct_elements(found.shape, found.stride),
        "hold every element apart from the others",
        f"strides {tuple(found.stride)}",
    )
    for name, array in inputs.items():
        if array is not None:
            check(not overlap(out, array), f"share no memory with {name}", "the same memory")
