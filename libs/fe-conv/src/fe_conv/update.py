"""``causal_conv1d_update``: the causal convolution of one new token, or a few, and the update of its state in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fe_runtime import KernelSpec
from fe_runtime.contract import ANY_LAYOUT, Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.dtypes import bits
from fe_runtime.errors import DtypeError, InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.strides import has_distinct_elements
from fe_runtime.values import Read

from . import launch_update

__all__ = ["OPERATION", "causal_conv1d_update", "causal_conv1d_update_jax"]

FLOATS = ("bfloat16", "float16", "float32")


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    backend: str = "auto",
) -> Any:
    """Convolve the newest token of each row with its history, and move the history on in place.

    ``hist = concat(conv_state[s], x[n])``, ``out[n] = act(sum_j weight[:,j] * hist[:, L+1-W+j] + bias)``,
    ``conv_state[s] = hist[:, -L:]`` with ``s = conv_state_indices[n]``; fp32, oldest tap first, bias last, rounded
    once.

    Parameters
    ----------
    x
        (N, D), one token per row, or (N, D, K): K consecutive ones. bfloat16, float16 or float32; any strides.
    conv_state
        (S, D, L), L >= W-1, dtype of x; any positive strides. Written in place, bit by bit.
    weight
        (D, W), oldest tap first; dtype of x, or float32.
    bias
        (D,), dtype of x or of ``weight``; ``None``: no bias.
    activation
        ``None`` or ``"identity"``; ``"silu"`` or ``"swish"``: ``z / (1 + exp(-z))``.
    cache_seqlens
        (N,) int32. ``None``: the last places of a slot hold its history. Given, a slot is a ring: the new tokens go
        to the places from ``cache_seqlens[n] mod L`` on, and the history lies before them.
    conv_state_indices
        (N,) int32: the slot of each row, in any order, -1 for a padding row, whose output is 0 and which has no slot.
        ``None``: row ``n`` has slot ``n``.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    array
        Shape and dtype of x, contiguous.

    Raises
    ------
    TypeError
        An argument of the wrong kind, or a dtype that the table above does not list.
    InvalidArgumentError
        Shapes, strides, devices or options break the contract; ``conv_state`` shares memory with another operand; JAX
        arrays, which cannot be written: use :func:`causal_conv1d_update_jax`. On the CPU, and in checked mode on a GPU:
        an index that names no slot, or a slot named twice.
    RuntimeError
        Grad mode is on and an operand requires a gradient: the operation is for inference.

    Notes
    -----
    On a GPU an index that names no slot is padding. Rows that name the same slot run side by side: each channel of the
    slot, and their results, may then be those of any order of these rows. Nothing else is read or written, and without
    such rows every result is the same bit by bit each time. Usable in CUDA graphs after one call.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: causal convolution, decode step.

    Examples
    --------
    >>> import numpy as np
    >>> state, weight = np.array([[[1.0, 2.0, 3.0]]], np.float32), np.ones((1, 4), np.float32)
    >>> causal_conv1d_update(np.array([[4.0]], np.float32), state, weight).tolist(), state.tolist()
    ([[10.0]], [[[2.0, 3.0, 4.0]]])
    """
    arrays = (x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    return OPERATION.outputs(arrays, {"activation": activation}, backend=backend)[0]


def causal_conv1d_update_jax(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``; nothing is written in place.

    Same formula, dtypes and errors as :func:`causal_conv1d_update`; ``activation`` and ``backend`` are static.

    Returns
    -------
    tuple
        ``(out, new_conv_state)``. The kernel updates the state where it lies: donate ``conv_state`` to the jitted
        function around the call, or XLA copies it first.
    """
    from fe_runtime.jax.entry import entry

    arrays = (x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    out, state = entry(OPERATION, arrays, {"activation": activation}, backend)
    return out, state


def check_values(bound: Bound, read: Read) -> None:
    """Raise ``InvalidArgumentError`` for an index that names no slot, and for a slot that is named twice."""
    if not bound.has("conv_state_indices"):
        return
    indices, slots = read("conv_state_indices"), bound.dim("S")
    wrong = indices[(indices < -1) | (indices >= slots)]
    if wrong.size:
        rule, fix = f"name slots 0 to {slots - 1}, or -1 for padding", "Correct the indices."
        raise _bad_indices(bound, rule, f"the value {wrong[0]}", fix)
    named, times = np.unique(indices[indices >= 0], return_counts=True)
    if (times > 1).any():
        twice = named[times > 1][0]
        raise _bad_indices(bound, "name no slot twice", f"the slot {twice} twice", "Give each row a slot of its own.")


def _bad_indices(bound: Bound, rule: str, given: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(explain(bound.operation, "conv_state_indices", rule, given, fix))


def _is_weight_dtype(bound: Bound) -> bool:
    return bound.dtype("weight") in (bound.dtype("x"), "float32")


def _is_bias_dtype(bound: Bound) -> bool:
    return bound.dtype("bias") in (None, bound.dtype("x"), bound.dtype("weight"))


def _changed(**arrays: Any) -> Any:
    """Return a function that changes some arrays of a valid call, to break a rule: name to function of the array."""

    def change(call: Mapping[str, Any]) -> dict[str, Any]:
        return {**call, **{name: function(call[name]) for name, function in arrays.items()}}

    return change


CONTRACT = Contract(
    operation="causal_conv1d_update",
    inputs=(
        Input("x", "N D ...", FLOATS, ANY_LAYOUT, doc="new tokens: (N, D), or (N, D, K) for K consecutive ones"),
        Input("conv_state", "S D L", FLOATS, ANY_LAYOUT, dtype_of="x", mutated=True, doc="the last L tokens of a slot"),
        Input("weight", "D W", FLOATS, ANY_LAYOUT, doc="filter, oldest tap first"),
        Input("bias", "D", FLOATS, ANY_LAYOUT, optional=True, doc="added last"),
        Input("cache_seqlens", "N", ("int32",), ANY_LAYOUT, optional=True, doc="a slot is a ring: where to write"),
        Input("conv_state_indices", "N", ("int32",), ANY_LAYOUT, optional=True, doc="slot of each row; -1: padding"),
    ),
    options=(
        Option(
            "activation",
            str,
            choices=("identity", "silu"),
            aliases={"swish": "silu"},
            invalid=("relu", "SiLU", ""),
            resolve=lambda _bound: "identity",
            doc="applied to the sum; None: identity",
        ),
    ),
    outputs=(Output("out", lambda bound: OutputSpec(bound.given["x"], str(bound.dtype("x"))), doc="result"),),
    rules=(
        Rule(
            "x",
            "have shape (N, D) or (N, D, K)",
            holds=lambda bound: len(bound.batch) <= 1,
            given=lambda bound: f"shape {bound.given['x']}",
            fix="Merge the dimensions of tokens.",
            violation=_changed(x=lambda x: x.reshape(*x.shape, *[1] * (4 - x.ndim))),
        ),
        Rule(
            "x",
            "have at least one channel",
            holds=lambda bound: bound.dim("D") > 0,
            given=lambda bound: f"shape {bound.given['x']}",
            fix="Skip the call.",
            violation=_changed(
                x=lambda x: x[:, :0],
                conv_state=lambda state: state[:, :0],
                weight=lambda weight: weight[:0],
                bias=lambda bias: bias[:0],
            ),
        ),
        Rule(
            "weight",
            "have at least one tap",
            holds=lambda bound: bound.dim("W") > 0,
            given=lambda bound: f"shape {bound.given['weight']}",
            fix="A filter of width 1 multiplies the newest token alone.",
            violation=_changed(weight=lambda weight: weight[:, :0]),
        ),
        Rule(
            "conv_state",
            "have L >= W - 1 places",
            holds=lambda bound: bound.dim("L") >= bound.dim("W") - 1,
            given=lambda bound: f"L = {bound.dim('L')} with W = {bound.dim('W')}",
            fix="Allocate it with shape (S, D, W - 1) or longer.",
            violation=_changed(conv_state=lambda state: state[:, :, :1]),
        ),
        Rule(
            "conv_state",
            "have at least one place where cache_seqlens is given",
            holds=lambda bound: bound.dim("L") > 0 or not bound.has("cache_seqlens"),
            given=lambda bound: f"shape {bound.given['conv_state']}",
            fix="Leave cache_seqlens out: a filter of width 1 has no history.",
            violation=_changed(conv_state=lambda state: state[:, :, :0], weight=lambda weight: weight[:, :1]),
        ),
        Rule(
            "conv_state",
            "have at least one slot",
            holds=lambda bound: bound.dim("S") > 0,
            given=lambda bound: f"shape {bound.given['conv_state']}",
            fix="Pass -1 as the index of rows without a slot.",
            violation=_changed(conv_state=lambda state: state[:0]),
        ),
        Rule(
            "conv_state",
            "have a slot for each row where there are no conv_state_indices",
            holds=lambda bound: bound.has("conv_state_indices") or bound.dim("S") >= bound.dim("N"),
            given=lambda bound: f"S = {bound.dim('S')} with N = {bound.dim('N')}",
            fix="Pass conv_state_indices, or a larger state.",
            violation=_changed(conv_state=lambda state: state[:1], conv_state_indices=lambda _indices: None),
        ),
        Rule(
            "conv_state",
            "have positive strides and no element in two places, since it is written",
            holds=lambda bound: has_distinct_elements(
                bound.arrays["conv_state"].shape, bound.arrays["conv_state"].stride
            ),
            given=lambda bound: f"strides {tuple(bound.arrays['conv_state'].stride)}",
            fix="Pass a contiguous copy.",
            violation=_changed(conv_state=lambda state: state[:, ::-1]),
        ),
        Rule(
            "weight",
            "have the dtype of x or float32",
            holds=_is_weight_dtype,
            given=lambda bound: bound.dtype("weight"),
            fix="Convert it.",
            error=DtypeError,
            violation=_changed(weight=lambda weight: weight.astype(np.float16)),
        ),
        Rule(
            "bias",
            "have the dtype of x or of weight",
            holds=_is_bias_dtype,
            given=lambda bound: bound.dtype("bias"),
            fix="Convert it.",
            error=DtypeError,
            violation=_changed(bias=lambda bias: bias.astype(np.float16)),
        ),
    ),
    dynamic=("N", "S", "..."),
    errors={"dtype": DtypeError},
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: the fast one where the layout allows it, whatever the numbers of rows and slots."""
    if bound.dim("W") > launch_update.MAX_WIDTH:
        return NoKernel(f"the filter has more than {launch_update.MAX_WIDTH} taps")
    problem = _problem(bound)
    how = launch_update.choose(problem, target.arch)
    if not launch_update.is_valid(problem, how, target.arch):
        problem = launch_update.general(problem)
        how = launch_update.choose(problem, target.arch)
    builder, config = "fe_conv.kernels.update:build", launch_update.config(problem, how)
    spec = KernelSpec.of("fe_conv.causal_conv1d_update", builder, target.arch, **config)
    inputs = tuple(bound.given.get(name) for name in CONTRACT.input_names)
    return Kernel(spec, Form(inputs, (bound.given["x"],)))


def _problem(bound: Bound) -> launch_update.Problem:
    layout, aligned, channels = _layout(bound), bound.alignments, bound.dim("D")
    problem = launch_update.Problem(
        dtype=str(bound.dtype("x")),
        width=bound.dim("W"),
        activation=str(bound.options["activation"]),
        weight_dtype=str(bound.dtype("weight")),
        bias_dtype=bound.dtype("bias"),
        indexed=bound.has("conv_state_indices"),
        ring=bound.has("cache_seqlens"),
        tokens=bool(bound.batch),
        layout=layout,
        length=bound.dim("L"),
        channels=min(8, channels & -channels),
        x_alignment=aligned["x"],
        state_alignment=_slot_alignment(bound) if layout == "row" else aligned["conv_state"],
        weight_alignment=aligned["weight"],
        bias_alignment=aligned.get("bias", 16),
        out_alignment=aligned["out"],
    )
    return problem if problem.is_fast else launch_update.general(problem)


def _slot_alignment(bound: Bound) -> int:
    """Return the largest power of two up to 16 that divides, in bytes, the start of every slot of a row layout."""
    state = bound.arrays["conv_state"]
    step = state.stride[0] * bits(state.dtype) // 8
    return min(bound.pointers["conv_state"], step & -step) if step else bound.pointers["conv_state"]


def _layout(bound: Bound) -> str:
    """Return how the state of neighbouring channels lies; ``"any"`` where the other operands are not side by side."""
    x, state, weight, bias = *(bound.arrays[name] for name in ("x", "conv_state", "weight")), bound.arrays.get("bias")
    side_by_side = (
        x.ndim == 2
        and x.stride[1] == 1
        and tuple(weight.stride) == (weight.shape[1], 1)
        and (bias is None or bias.stride[0] == 1)
    )
    if not side_by_side or bound.has("cache_seqlens"):
        return "any"
    if tuple(state.stride[1:]) == (state.shape[2], 1):
        return "row"
    return "plane" if state.stride[1] == 1 else "any"


OPERATION = Operation(
    "fe_conv",
    CONTRACT,
    reference="fe_conv.reference.update:causal_conv1d_update",
    find_kernel=find_kernel,
    inference_only=True,
    check_values=check_values,
    jax_entry="fe_conv.causal_conv1d_update_jax",
)
