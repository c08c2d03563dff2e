"""``rope_qdq_inplace``: rotate the last 64 channels, then quantise and dequantise all of them in groups, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound, Contract, Input, Layout, Option, Rule, Sample, merged_strides
from fe_runtime.dtypes import bits
from fe_runtime.errors import InvalidArgumentError, NotCompiledError, NotSupportedError, explain
from fe_runtime.gradient import reject_required
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict, register_pytrees
from fe_runtime.values import Read

from . import launch
from .backend import resolved

__all__ = ["OPERATION", "RopeQDQInplace", "rope_qdq_inplace", "rope_qdq_jax"]

NAME = "rope_qdq_inplace"
MODES = (("fp4", 32, "ue8m0"), ("fp8", 32, "ue8m0"), ("fp4", 16, "e4m3"))
"""Element, channels of a group, format of its scale."""


def rope_qdq_inplace(
    x: Any,
    cache: Any,
    positions: Any,
    *,
    quantization: str,
    backend: str = "frost",
    stream: Any = None,
    group_size: int = 32,
    scale_format: str = "ue8m0",
) -> TupleDict:
    """Rotate the last 64 channels of x, then quantise and dequantise all channels in groups, in place.

    Rotation as in :func:`fe_rope.tail_rope`, by ``cache[position]``, rounded to bfloat16. Then ``x = bf16(q * s)``,
    ``q = RN(clamp(x / s, -limit, limit))`` in E2M1 (limit 6) or E4M3 (limit 448), with one scale ``s`` a group:
    ``ue8m0``, the least power of two ``>= RN(max(amax, floor) * RN(1/limit))``, or ``e4m3(max(amax, floor) / limit)``.

    Parameters
    ----------
    x
        bfloat16, written in place; D a multiple of the group and at least 64, of stride 1. For "fp4" in groups of 32
        (N, H, D), otherwise (..., D).
    cache
        (P, 64) float32, contiguous, P > 0: 32 cosines, then 32 sines for each position.
    positions
        int32 or int64, contiguous. For "fp4" in groups of 32 (N,), shared by the heads; otherwise one for each row of
        D channels, (R,). Values in [0, P).
    quantization, group_size, scale_format
        ``"fp4", 32, "ue8m0"`` (floor 6*2^-126), ``"fp8", 32, "ue8m0"`` (floor 1e-4) or ``"fp4", 16, "e4m3"``
        (floor 6*2^-9).
    backend
        ``"frost"`` or ``"auto"``: the best there is; ``"reference"``, or a kernel backend such as ``"sm90"``.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).

    Returns
    -------
    TupleDict
        ``out``, which is x itself.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, dtypes, devices or options break the contract; x shares memory with another operand; an operand
        requires a gradient; JAX arrays, which cannot be written: use :func:`rope_qdq_jax`. On the CPU, and in checked
        mode on a GPU: a position outside the cache.
    NotSupportedError
        Strides that are not taken.

    Notes
    -----
    The result is defined bit for bit, on every backend; subnormals and signed zeros stay. A position outside the cache
    is clamped. A NaN stays and does not count in its group; an infinite value counts as the largest finite one and
    becomes ``limit * s``. New extents, other than H and D, never compile anything. Deterministic. For (..., D) a
    kernel needs leading dimensions that merge into rows of one stride; others run the reference.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: tail RoPE with quantise-dequantise.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> x = np.full((1, 1, 64), 1.1, ml_dtypes.bfloat16)
    >>> cache = np.concatenate([np.ones((4, 32)), np.zeros((4, 32))], axis=1).astype(np.float32)
    >>> out = rope_qdq_inplace(x, cache, np.array([3]), quantization="fp4")["out"]
    >>> out is x, float(x[0, 0, 0])
    (True, 1.0)
    """
    reject_required(NAME, x=x, cache=cache, positions=positions)
    options = _options(quantization, group_size, scale_format)
    OPERATION.outputs((x, cache, positions), options, stream=stream, backend=resolved(backend))
    register_pytrees()
    return TupleDict.of(("out",), (x,))


class RopeQDQInplace(APIBase):
    """Rotate, quantise and dequantise in place; see :func:`rope_qdq_inplace`.

    Rows, positions in the cache and the alignment of x may change between executions; heads and everything else are
    fixed.
    """

    def __init__(
        self,
        x: Any,
        cache: Any,
        positions: Any,
        *,
        quantization: str,
        backend: str = "frost",
        group_size: int = 32,
        scale_format: str = "ue8m0",
    ) -> None:
        reject_required(NAME, x=x, cache=cache, positions=positions)
        options = _options(quantization, group_size, scale_format)
        super().__init__(OPERATION, (x, cache, positions), (), options, resolved(backend))
        self._unaligned: APIBase | None = None

    def compile(self) -> None:
        """Build the kernel, and the one for arrays that are less aligned than the samples; later calls do nothing."""
        super().compile()
        if self._unaligned is not None or self._check()[1].kernel is None:
            return
        present = [known for known in self._inputs if known is not None]
        least = [Sample(known.desc, known.framework, bits(known.desc.dtype) // 8) for known in present]
        unaligned = APIBase(OPERATION, least, (), self._options, self._backend)
        with suppress(NotCompiledError):  # where compiling is forbidden, arrays have to be as aligned as the samples
            unaligned.compile()
            self._unaligned = unaligned

    def execute(self, x: Any, cache: Any, positions: Any, *, current_stream: Any = None) -> TupleDict:
        """Write the result into x and return it; no allocation, no synchronisation."""
        reject_required(NAME, x=x, cache=cache, positions=positions)
        self._execute((x, cache, positions), (), current_stream)
        return TupleDict.of(("out",), (x,))

    def scratch_workspace_bytes(self) -> int:
        """Return 0, after :meth:`check_support`."""
        self.check_support()
        return 0

    def _admit(
        self, arrays: Sequence[Any], outputs: Sequence[Any], run: Callable[..., object], stream: object, *others: Any
    ) -> Callable[..., None]:
        compiled, live = self._check()[0], OPERATION.bind(arrays, self._options)
        _check_heads(compiled, live)
        worse = any(live.alignments[name] < known for name, known in compiled.alignments.items())
        if worse and self._unaligned is not None and self._unaligned._compiled is not None:
            return self._unaligned._admit(arrays, outputs, self._unaligned._compiled, stream, *others)
        return super()._admit(arrays, outputs, run, stream, *others)


def rope_qdq_jax(
    x: Any,
    cache: Any,
    positions: Any,
    *,
    quantization: str,
    group_size: int = 32,
    scale_format: str = "ue8m0",
    backend: str = "auto",
) -> Any:
    """Return the new x for JAX arrays, eagerly or under ``jit``; nothing is written in place.

    Same formula, dtypes and errors as :func:`rope_qdq_inplace`; all options are static.

    Returns
    -------
    jax.Array
        ``out``. The kernel works where x lies: donate x to the jitted function around the call, or XLA copies it
        first.
    """
    from fe_runtime.jax.entry import entry

    options = _options(quantization, group_size, scale_format)
    return entry(OPERATION, (x, cache, positions), options, resolved(backend))


def _options(quantization: str, group_size: int, scale_format: str) -> dict[str, object]:
    if type(group_size) is not int:
        rule = "be a plain int, 16 or 32"
        text = explain(NAME, "group_size", rule, f"{type(group_size).__name__} {group_size!r}")
        raise InvalidArgumentError(text)
    return {"quantization": quantization, "group_size": group_size, "scale_format": scale_format}


def _mode(bound: Bound) -> tuple[object, object, object]:
    return bound.options["quantization"], bound.options["group_size"], bound.options["scale_format"]


def _shares_positions(bound: Bound) -> bool:
    """Whether x is (N, H, D) and its heads share a position."""
    return _mode(bound) == MODES[0]


def _group(bound: Bound) -> int:
    return int(bound.options["group_size"])  # type: ignore[call-overload, no-any-return]


def _position_count(bound: Bound) -> int:
    return bound.batch[0] if _shares_positions(bound) else bound.rows


def _check_heads(compiled: Bound, live: Bound) -> None:
    """Raise if the number of heads is not the compiled one: the contract fixes it where heads share positions."""
    if _shares_positions(compiled) and compiled.batch[1] != live.batch[1]:
        rule, fix = (
            f"have the compiled number of heads, {compiled.batch[1]}",
            "Build another object from a sample like it.",
        )
        raise InvalidArgumentError(explain(NAME, "x", rule, f"shape {live.given['x']}", fix))


def _check_positions(bound: Bound, read: Read) -> None:
    positions, limit = read("positions"), bound.dim("P")
    outside = (positions < 0) | (positions >= limit)
    if outside.any():
        row = int(outside.argmax())
        rule = f"hold values in [0, P) = [0, {limit})"
        fix = "Enlarge the cache or correct the positions."
        raise InvalidArgumentError(explain(NAME, "positions", rule, f"{positions[row]} at {row}", fix))


def _cut(call: Mapping[str, Any], name: str, part: Any) -> dict[str, Any]:
    """Cut an array of a valid call, to build one that breaks a rule on its extents."""
    return {**call, name: call[name][part]}


def _are_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the last dimension has stride 1 and no element is reached twice: the others step over what is inside."""
    if 0 in shape or not shape:
        return True
    span = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent > 1 and step < span:
            return False
        span += (extent - 1) * step
    return shape[-1] == 1 or stride[-1] == 1


APART = Layout(
    "apart",
    "have a last dimension of stride 1 and rows that do not overlap",
    "Pass an array of its own memory, whose last dimension is contiguous.",
    _are_apart,
)

CONTRACT = Contract(
    operation=NAME,
    inputs=(
        Input("x", "... D", ("bfloat16",), APART, mutated=True, doc="what is rotated and requantised, in place"),
        Input("cache", "P 64", ("float32",), doc="32 cosines, then 32 sines for each position"),
        Input("positions", "R", ("int32", "int64"), doc="row of the cache for each token or row"),
    ),
    options=(
        Option("quantization", str, "fp4", choices=("fp4", "fp8"), doc="element: E2M1 or E4M3"),
        Option("group_size", int, 32, choices=(16, 32), doc="channels that share a scale"),
        Option("scale_format", str, "ue8m0", choices=("ue8m0", "e4m3"), doc="power of two, or E4M3"),
    ),
    outputs=(),
    rules=(
        Rule(
            "quantization",
            "be, with group_size and scale_format, one of " + ", ".join(map(str, MODES)),
            holds=lambda bound: _mode(bound) in MODES,
            given=lambda bound: str(_mode(bound)),
            fix="Only these have a definition.",
            violation=lambda call: {**call, "quantization": "fp8", "group_size": 16},
        ),
        Rule(
            "x",
            "have whole groups of channels, at least 64 channels",
            holds=lambda bound: bound.dim("D") % _group(bound) == 0 and bound.dim("D") >= launch.TAIL,
            given=lambda bound: f"D = {bound.dim('D')} with groups of {_group(bound)}",
            fix="Pad the channels.",
            violation=lambda call: _cut(call, "x", (..., slice(72))),
        ),
        Rule(
            "x",
            "have shape (N, H, D) with H >= 1 for fp4 in groups of 32, otherwise at least two dimensions",
            holds=lambda bound: (
                len(bound.batch) == 2 and bound.batch[1] > 0 if _shares_positions(bound) else len(bound.batch) > 0
            ),
            given=lambda bound: f"shape {bound.given['x']}",
            fix="Reshape it.",
            violation=lambda call: _cut(call, "x", (slice(None), 0)),
        ),
        Rule(
            "positions",
            "hold one position for each token or row of x",
            holds=lambda bound: bound.dim("R") == _position_count(bound),
            given=lambda bound: f"{bound.dim('R')} positions for x of shape {bound.given['x']}",
            fix="Heads share a position for fp4 in groups of 32; otherwise each row has its own.",
            violation=lambda call: _cut(call, "positions", slice(-1)),
        ),
        Rule(
            "cache",
            "have at least one row",
            holds=lambda bound: bound.dim("P") > 0,
            given=lambda bound: f"shape {bound.given['cache']}",
            fix="Positions choose its rows.",
            violation=lambda call: _cut(call, "cache", slice(0)),
        ),
    ),
    dynamic=("...", "P", "R"),
    errors={"layout": NotSupportedError},
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one for each mode, heads, channels, strides and alignment, for any rows."""
    x, columns = bound.arrays["x"], bound.dim("D")
    tokens, heads = bound.batch if _shares_positions(bound) else (bound.rows, 1)
    if not _shares_positions(bound) and merged_strides(x.shape, x.stride) is None:
        reason = "the leading dimensions of x do not merge into rows of one stride"
        return NoKernel(reason, "Pass a contiguous x, or one call for each first index.")
    quantization, group_size, scale_format = _mode(bound)
    problem = launch.Problem(
        heads=heads,
        columns=columns,
        rank=3 if _shares_positions(bound) else 2,
        packed=heads == 1 or x.stride[1] == columns,
        x_alignment=bound.alignments["x"],
        out_alignment=bound.alignments["x"],
        table_alignment=bound.alignments["cache"],
        mode=f"{quantization}/{group_size}/{scale_format}",
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    config["position_dtype"] = bound.dtype("positions")
    spec = KernelSpec.of("fe_rope.rope_qdq_inplace", "fe_rope.kernels.rope_qdq:build", target.arch, **config)
    shape = bound.given["x"] if _shares_positions(bound) else (tokens, columns)
    form = Form(inputs=(shape, bound.given["cache"], (tokens,)), outputs=(), related=True)
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_rope",
    CONTRACT,
    reference="fe_rope.reference.rope_qdq:rope_qdq_inplace",
    find_kernel=find_kernel,
    check_values=_check_positions,
    jax_entry="fe_rope.rope_qdq_jax",
    stream_argument="stream",
)
