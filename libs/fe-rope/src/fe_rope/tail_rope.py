"""``tail_rope``: a copy of an array whose last 64 channels are rotated by prepared tables."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Output, OutputSpec, Rule, merged_strides
from fe_runtime.errors import NotSupportedError
from fe_runtime.gradient import reject_required
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import launch
from .backend import resolved
from .errors import LayoutError

__all__ = ["OPERATION", "TailRoPEForward", "tail_rope", "tail_rope_jax"]

BF16 = ("bfloat16",)


def tail_rope(x: Any, cosine: Any, sine: Any, *, backend: str = "frost", stream: Any = None) -> TupleDict:
    """Copy x, its last 64 channels rotated in neighbouring pairs by the tables of their token.

    ``out[2i] = bf16(fma(a, c, -RN(b*s)))`` and ``out[2i+1] = bf16(fma(b, c, RN(a*s)))`` for the pair ``a, b`` number
    ``i`` of the tail and ``c, s = cosine[t, i], sine[t, i]``, in fp32. All other channels are copied bit for bit.

    Parameters
    ----------
    x
        (T, ..., D), D even and at least 64; bfloat16; last dimension of stride 1.
    cosine, sine
        (T, 32) float32, contiguous, finite: shared by all heads of a token. A negated sine rotates backwards.
    backend
        ``"frost"`` or ``"auto"``: the best there is; ``"reference"``, or a kernel backend such as ``"sm90"``.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).

    Returns
    -------
    TupleDict
        ``out``, shape and dtype of x, contiguous.

    Raises
    ------
    TypeError
        An argument that is no array.
    InvalidArgumentError
        Shapes, dtypes or devices break the contract, or an operand requires a gradient.
    NotSupportedError
        Fewer than two dimensions, an odd D or one below 64, no heads, 2^31 or more channels in a token, or strides
        that are not taken; the last is an ``InvalidArgumentError`` too.

    Notes
    -----
    The result is defined bit for bit, on every backend: each product is rounded once, sums are fused, subnormals and
    signed zeros stay. A new T never compiles anything. Deterministic. If dimensions between the first and the last do
    not merge, x is copied first.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: tail RoPE.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> x = np.ones((2, 3, 128), ml_dtypes.bfloat16)
    >>> out = tail_rope(x, np.zeros((2, 32), np.float32), np.ones((2, 32), np.float32))["out"]
    >>> out[0, 0, 62:66].astype(float).tolist()
    [1.0, 1.0, -1.0, 1.0]
    """
    reject_required("tail_rope", x=x, cosine=cosine, sine=sine)
    return OPERATION((x, cosine, sine), {}, stream=stream, backend=resolved(backend))


class TailRoPEForward(APIBase):
    """Rotate the tail of x into the caller's output; see :func:`tail_rope`.

    The number of tokens may change between executions; everything else is fixed.
    """

    def __init__(self, x: Any, cosine: Any, sine: Any, out: Any, *, backend: str = "frost") -> None:
        reject_required("tail_rope", x=x, cosine=cosine, sine=sine, out=out)
        super().__init__(OPERATION, (x, cosine, sine), (out,), {}, resolved(backend))

    def execute(self, x: Any, cosine: Any, sine: Any, out: Any, *, current_stream: Any = None) -> TupleDict:
        """Write the result into ``out`` and return it; no allocation, no synchronisation."""
        reject_required("tail_rope", x=x, cosine=cosine, sine=sine, out=out)
        self._execute((x, cosine, sine), (out,), current_stream)
        return TupleDict.of(("out",), (out,))

    def scratch_workspace_bytes(self) -> int:
        """Return 0, after :meth:`check_support`."""
        self.check_support()
        return 0


def tail_rope_jax(x: Any, cosine: Any, sine: Any, *, backend: str = "auto") -> Any:
    """Rotate the tail of a JAX array, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`tail_rope`; ``backend`` is static.

    Returns
    -------
    jax.Array
        ``out``.
    """
    from fe_runtime.jax.entry import entry

    return entry(OPERATION, (x, cosine, sine), {}, resolved(backend))


def _heads(bound: Bound) -> int:
    return prod(bound.batch)


def _cut(call: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """Cut x of a valid call, to build one that breaks a rule on its extents."""
    return {**call, "x": call["x"][part]}


CONTRACT = Contract(
    operation="tail_rope",
    inputs=(
        Input("x", "T ... D", BF16, UNIT_INNER, doc="what is rotated"),
        Input("cosine", "T 32", ("float32",), doc="one row for each token"),
        Input("sine", "T 32", ("float32",), doc="one row for each token"),
    ),
    outputs=(Output("out", lambda bound: OutputSpec(bound.given["x"], "bfloat16"), doc="the rotated copy"),),
    rules=(
        Rule(
            "x",
            "have an even number of channels, at least 64",
            holds=lambda bound: bound.dim("D") % 2 == 0 and bound.dim("D") >= launch.TAIL,
            given=lambda bound: f"D = {bound.dim('D')}",
            fix="Pad the channels.",
            error=NotSupportedError,
            violation=lambda call: _cut(call, (..., slice(62))),
        ),
        Rule(
            "x",
            "have at least one head, and fewer than 2^31 channels in a token",
            holds=lambda bound: 0 < _heads(bound) * bound.dim("D") < 2**31,
            given=lambda bound: f"shape {bound.given['x']}",
            fix="Split the heads over several calls.",
            error=NotSupportedError,
            violation=lambda call: _cut(call, (slice(None), slice(0))),
        ),
    ),
    dynamic=("T",),
    errors={"rank": NotSupportedError, "layout": LayoutError},
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one kernel per heads, channels, kind of strides and alignment, for any tokens."""
    x, heads, columns = bound.arrays["x"], _heads(bound), bound.dim("D")
    inner = merged_strides(x.shape[1:], x.stride[1:])
    row_bytes = columns * 2
    problem = launch.Problem(
        heads=heads,
        columns=columns,
        rank=min(x.ndim, 3),
        packed=heads == 1 or inner is None or inner[1] == columns,
        x_alignment=min(16, row_bytes & -row_bytes) if inner is None else bound.alignments["x"],
        out_alignment=bound.alignments["out"],
        table_alignment=min(bound.alignments["cosine"], bound.alignments["sine"]),
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of("fe_rope.tail_rope", "fe_rope.kernels.tail_rope:build", target.arch, **config)
    tokens = bound.dim("T")
    shape = (tokens, columns) if x.ndim == 2 else (tokens, heads, columns)
    form = Form(inputs=(shape, (tokens, 32), (tokens, 32)), outputs=(shape,), related=True)
    return Kernel(spec, form, () if inner is not None else ("x",))


OPERATION = Operation(
    "fe_rope",
    CONTRACT,
    reference="fe_rope.reference.tail_rope:tail_rope",
    find_kernel=find_kernel,
    jax_entry="fe_rope.tail_rope_jax",
    stream_argument="stream",
)
