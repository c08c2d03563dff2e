"""``gemm_proj_rope_mxfp8``: query projection, rotation of the last 64 features of every head, and MXFP8 codes of the
result in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_gemm.planning import proj_rope as launch
from fe_gemm.planning.proj_rope import BLOCK, HEAD
from fe_gemm.workspace_class import WorkspaceAPI
from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

__all__ = [
    "OPERATION",
    "GemmProjRopeMxfp8Bf16In",
    "GemmProjRopeMxfp8Mxfp8In",
    "InputPrecisionError",
    "gemm_proj_rope_mxfp8_jax",
    "gemm_proj_rope_mxfp8_reference",
    "gemm_proj_rope_mxfp8_wrapper",
]

NAME = "gemm_proj_rope_mxfp8"
BF16, E4M3, E8M0 = "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"
ROTATED = 64


class InputPrecisionError(InvalidArgumentError, AssertionError):
    """Dtypes and scales of x and w that do not fit together.

    The peer's wrapper says ``AssertionError`` and its JAX function ``ValueError``: it is both.
    """


class UnsupportedDtypeError(InputPrecisionError):
    """A dtype that the operation does not take; the text says ``unsupported input dtype``, as the peer's does."""

    def __init__(self, message: str) -> None:
        marked = message if _UNSUPPORTED in message else message.replace("; got ", f" ({_UNSUPPORTED}); got ", 1)
        super().__init__(marked)


_UNSUPPORTED = "unsupported input dtype"


def gemm_proj_rope_mxfp8_wrapper(
    x: Any,
    w: Any,
    cos: Any,
    sin: Any,
    x_scale: Any = None,
    w_scale: Any = None,
    w_out_in: bool = True,
    stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Project, rotate the last 64 features of each head of 192, and quantise to MXFP8 by rows and by columns.

    ``Y = bf16(x w^T)``, ``q`` its features of a head: ``v[f] = q[f]`` for ``f < 128``,
    ``v[128+j] = q[128+2j] cos[j] - q[129+2j] sin[j]``, ``v[160+j] = q[129+2j] cos[32+j] + q[128+2j] sin[32+j]`` for
    ``j < 32``, rounded once, to fp32. Blocks of 32 features of a token, and of 32 tokens at a feature, each have the
    scale ``2^(byte-127)``, the least power of two ``>= RN(amax * RN(1/448))``, and codes ``e4m3(v / scale)``.

    Parameters
    ----------
    x
        (T, K): bfloat16, K a multiple of 8, or float8_e4m3fn, K a multiple of 32. T is a multiple of 32.
    w
        (N, K), or (K, N) without ``w_out_in``; dtype of x. N = 192 H, H heads.
    cos, sin
        (T, 64) bfloat16. The two halves of a row belong to the two outputs of each pair.
    x_scale, w_scale
        For float8_e4m3fn, and only then: e8m0 scales of 32 consecutive inputs, (T, K/32), and (N, K/32) or, without
        ``w_out_in``, (K/32, N); uint8, int8 or float8_e8m0fnu.
    w_out_in
        Whether rows of w are output features.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``out_fp8_row`` (T, H, 192) float8_e4m3fn, ``out_scales_row`` (T, H, 6) uint8; ``out_fp8_col`` (T, H, 192)
        float8_e4m3fn, ``out_scales_col`` (T/32, H, 192) uint8.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InputPrecisionError
        Dtypes and scales of x and w that do not fit together: a ``ValueError`` and an ``AssertionError``.
    InvalidArgumentError
        Shapes, strides, devices or addresses break the contract: all arrays are row-major, and on a GPU start at
        multiples of 16 bytes (scales: anywhere, but the class's own row scales at an even address).

    Notes
    -----
    Sums are in fp32. Where bf16 holds them, as for small integers, the result is defined bit for bit. A block of zeros
    has scale byte 0. NaN does not count in its block's scale, and becomes NaN. Deterministic; not differentiable. A new
    T never compiles anything.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: projection with RoPE and MXFP8 output.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> bf16 = ml_dtypes.bfloat16
    >>> x, w = np.ones((32, 8), bf16), np.ones((192, 8), bf16)
    >>> cos, sin = np.ones((32, 64), bf16), np.zeros((32, 64), bf16)
    >>> row, row_scales, column, column_scales = gemm_proj_rope_mxfp8_wrapper(x, w, cos, sin)
    >>> float(row[0, 0, 0]), int(row_scales[0, 0, 0]), column_scales.shape
    (256.0, 122, (1, 1, 192))
    """
    arrays, options = (x, w, cos, sin, x_scale, w_scale), {"w_out_in": w_out_in}
    return OPERATION(arrays, options, stream=stream, backend=backend)


class GemmProjRopeMxfp8Bf16In(APIBase):
    """The operation on bfloat16 inputs, into the caller's outputs; see :func:`gemm_proj_rope_mxfp8_wrapper`.

    Here rows of w are input features unless ``w_out_in`` is set. The number of tokens may change between executions.
    """

    def __init__(
        self,
        sample_x: Any,
        sample_w: Any,
        sample_cos: Any,
        sample_sin: Any,
        sample_out_fp8_row: Any,
        sample_out_scales_row: Any,
        sample_out_fp8_col: Any,
        sample_out_scales_col: Any,
        w_out_in: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        inputs = (sample_x, sample_w, sample_cos, sample_sin, None, None)
        outputs = (sample_out_fp8_row, sample_out_scales_row, sample_out_fp8_col, sample_out_scales_col)
        super().__init__(OPERATION, inputs, outputs, {"w_out_in": w_out_in}, backend)

    def execute(
        self,
        x: Any,
        w: Any,
        cos: Any,
        sin: Any,
        out_fp8_row: Any,
        out_scales_row: Any,
        out_fp8_col: Any,
        out_scales_col: Any,
        current_stream: Any = None,
    ) -> None:
        """Write the result into the four outputs; no synchronisation."""
        outputs = (out_fp8_row, out_scales_row, out_fp8_col, out_scales_col)
        self._execute((x, w, cos, sin, None, None), outputs, current_stream)


class GemmProjRopeMxfp8Mxfp8In(WorkspaceAPI):
    """The operation on MXFP8 inputs, into the caller's outputs; see :func:`gemm_proj_rope_mxfp8_wrapper`.

    Rows of w are output features. The number of tokens may change between executions.
    ``workspace`` of ``execute`` is memory for expanded operands: a contiguous uint8 vector as long as
    ``scratch_workspace_bytes()`` of an object for this number of tokens. Executions without one use a buffer of the
    object, which grows with it, and must not run at the same time on several streams.
    """

    rows = ("T", "x")

    def __init__(
        self,
        sample_x_code: Any,
        sample_x_scale: Any,
        sample_w_code: Any,
        sample_w_scale: Any,
        sample_cos: Any,
        sample_sin: Any,
        sample_out_fp8_row: Any,
        sample_out_scales_row: Any,
        sample_out_fp8_col: Any,
        sample_out_scales_col: Any,
        *,
        backend: str = "auto",
    ) -> None:
        inputs = (sample_x_code, sample_w_code, sample_cos, sample_sin, sample_x_scale, sample_w_scale)
        outputs = (sample_out_fp8_row, sample_out_scales_row, sample_out_fp8_col, sample_out_scales_col)
        super().__init__(OPERATION, inputs, outputs, {"w_out_in": True}, backend)

    def execute(
        self,
        x_code: Any,
        x_scale: Any,
        w_code: Any,
        w_scale: Any,
        cos: Any,
        sin: Any,
        out_fp8_row: Any,
        out_scales_row: Any,
        out_fp8_col: Any,
        out_scales_col: Any,
        current_stream: Any = None,
        *,
        workspace: Any = None,
    ) -> None:
        """Write the result into the four outputs; no synchronisation."""
        outputs = (out_fp8_row, out_scales_row, out_fp8_col, out_scales_col)
        self._execute_in(workspace, (x_code, w_code, cos, sin, x_scale, w_scale), outputs, current_stream)


def gemm_proj_rope_mxfp8_jax(
    x: Any, w: Any, cos: Any, sin: Any, x_scale: Any = None, w_scale: Any = None, *, backend: str = "auto"
) -> tuple[Any, Any, Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``; w is (N, K).

    Same formula, dtypes and errors as :func:`gemm_proj_rope_mxfp8_wrapper`.

    Returns
    -------
    tuple
        ``(out_fp8_row, out_scales_row, out_fp8_col, out_scales_col)``.
    """
    from fe_runtime.jax.entry import entry

    row, row_scales, column, column_scales = entry(
        OPERATION, (x, w, cos, sin, x_scale, w_scale), {"w_out_in": True}, backend
    )
    return row, row_scales, column, column_scales


def gemm_proj_rope_mxfp8_reference(
    x: Any, w: Any, cos: Any, sin: Any, w_out_in: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Evaluate the formula of :func:`gemm_proj_rope_mxfp8_wrapper` for bfloat16 inputs in plain array operations.

    Parameters
    ----------
    x, w, cos, sin
        As there, on any device; here w is (K, N) unless ``w_out_in`` is set.
    w_out_in
        Whether rows of w are output features.

    Returns
    -------
    tuple
        ``(out_fp8_row, out_scales_row, out_fp8_col, out_scales_col)``.

    Raises
    ------
    TypeError, InvalidArgumentError
        As there.

    Notes
    -----
    With the bf16 rounding of Y, and byte 0 for blocks of zeros, as the operation itself.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: projection with RoPE and MXFP8 output.
    """
    arrays, options = (x, w, cos, sin, None, None), {"w_out_in": w_out_in}
    row, row_scales, column, column_scales = OPERATION.outputs(arrays, options, backend="reference")
    return row, row_scales, column, column_scales


def _is_out_in(bound: Bound) -> bool:
    return bound.options["w_out_in"] is True


def _features(bound: Bound) -> int:
    """Return N."""
    return bound.dim("R") if _is_out_in(bound) else bound.dim("C")


def _heads(bound: Bound) -> int:
    return _features(bound) // HEAD


def _is_scaled(bound: Bound) -> bool:
    return bound.dtype("x") == E4M3


def _scales_given(bound: Bound) -> str:
    return " and ".join(name for name in ("x_scale", "w_scale") if bound.has(name)) or "no scales"


def _depth_step(bound: Bound) -> int:
    return BLOCK if _is_scaled(bound) else 8


def _blocks(extent: int) -> int:
    return extent // BLOCK


def _scales(name: str, shape: str, doc: str) -> Input:
    bytes_too = {"uint8": E8M0, "int8": E8M0}
    return Input(name, shape, (E8M0,), optional=True, dtype_aliases=bytes_too, doc=f"{doc}; bytes mean e8m0")


def _cut(call: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Cut arrays of a valid call, to build one that breaks a rule."""
    return {**call, **{name: call[name][part] for name, part in parts.items()}}


def _with_fp8_weight(call: Mapping[str, Any]) -> dict[str, Any]:
    import ml_dtypes

    w = call["w"]
    other = ml_dtypes.float8_e4m3fn if w.dtype.name == BF16 else ml_dtypes.bfloat16
    return {**call, "w": w.astype(other)}


def _with_other_scales(call: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    if call["x_scale"] is not None:
        return {**call, "x_scale": None}
    shape = (call["x"].shape[0], _blocks(call["x"].shape[1]))
    return {**call, "x_scale": np.full(shape, 127, np.uint8)}


CONTRACT = Contract(
    operation=NAME,
    inputs=(
        Input("x", "T K", (BF16, E4M3), alignment=16, doc="tokens"),
        Input("w", "R C", (BF16, E4M3), alignment=16, doc="weight: (N, K), or (K, N) without w_out_in; N = 192 H"),
        Input("cos", f"T {ROTATED}", (BF16,), alignment=16, doc="cosines"),
        Input("sin", f"T {ROTATED}", (BF16,), alignment=16, doc="sines"),
        _scales("x_scale", "T S", "scales of x, S = K/32"),
        _scales("w_scale", "U V", "scales of w: (N, K/32), or (K/32, N)"),
    ),
    options=(Option("w_out_in", bool, True, doc="whether rows of w are output features"),),
    outputs=(
        Output(
            "out_fp8_row",
            lambda bound: OutputSpec((bound.dim("T"), _heads(bound), HEAD), E4M3, alignment=16),
            doc="codes in blocks of 32 features",
        ),
        Output(
            "out_scales_row",
            lambda bound: OutputSpec((bound.dim("T"), _heads(bound), _blocks(HEAD)), "uint8", alignment=2),
            doc="their scales, e8m0",
        ),
        Output(
            "out_fp8_col",
            lambda bound: OutputSpec((bound.dim("T"), _heads(bound), HEAD), E4M3, alignment=16),
            doc="codes in blocks of 32 tokens",
        ),
        Output(
            "out_scales_col",
            lambda bound: OutputSpec((_blocks(bound.dim("T")), _heads(bound), HEAD), "uint8", alignment=8),
            doc="their scales, e8m0",
        ),
    ),
    rules=(
        Rule(
            "w",
            "share a dtype with x",
            holds=lambda bound: bound.dtype("x") == bound.dtype("w"),
            given=lambda bound: f"{bound.dtype('w')} with x of {bound.dtype('x')}",
            fix="Convert one of them.",
            error=InputPrecisionError,
            violation=_with_fp8_weight,
        ),
        Rule(
            "x_scale",
            "be None, like w_scale: bfloat16 inputs must not be given MXFP8 scales",
            holds=lambda bound: _is_scaled(bound) or not (bound.has("x_scale") or bound.has("w_scale")),
            given=_scales_given,
            fix="Drop them, or pass float8_e4m3fn codes.",
            error=InputPrecisionError,
            violation=_with_other_scales,
        ),
        Rule(
            "x_scale",
            "be given, like w_scale: float8_e4m3fn inputs require x_scale and w_scale",
            holds=lambda bound: not _is_scaled(bound) or (bound.has("x_scale") and bound.has("w_scale")),
            given=_scales_given,
            fix="Pass both; the class for them is GemmProjRopeMxfp8Mxfp8In.",
            error=InputPrecisionError,
        ),
        Rule(
            "w",
            "have a positive multiple of 192 output features",
            holds=lambda bound: _features(bound) > 0 and _features(bound) % HEAD == 0,
            given=lambda bound: f"shape {bound.given['w']} with w_out_in={bound.options['w_out_in']}",
            fix="Rows of w are output features if w_out_in is true, columns otherwise.",
            violation=lambda call: _cut(call, w=slice(191) if call["w_out_in"] else (slice(None), slice(184))),
        ),
        Rule(
            "x",
            "have a positive multiple of 8 columns in bfloat16, of 32 in float8_e4m3fn",
            holds=lambda bound: bound.dim("K") > 0 and bound.dim("K") % _depth_step(bound) == 0,
            given=lambda bound: f"shape {bound.given['x']} of {bound.dtype('x')}",
            fix="Pad x and w with zeros.",
            violation=lambda call: _cut(
                call, x=(slice(None), slice(-1)), w=(slice(None), slice(-1)) if call["w_out_in"] else slice(-1)
            ),
        ),
        Rule(
            "x",
            "have a multiple of 32 rows",
            holds=lambda bound: bound.dim("T") % BLOCK == 0,
            given=lambda bound: f"shape {bound.given['x']}",
            fix="Pad the tokens.",
            violation=lambda call: _cut(
                call,
                x=slice(-1),
                cos=slice(-1),
                sin=slice(-1),
                **({} if call["x_scale"] is None else {"x_scale": slice(-1)}),
            ),
        ),
    ),
    derived={
        "R": lambda bound: bound.dim("R") if _is_out_in(bound) else bound.dim("K"),
        "C": lambda bound: bound.dim("K") if _is_out_in(bound) else bound.dim("C"),
        "S": lambda bound: _blocks(bound.dim("K")),
        "U": lambda bound: _features(bound) if _is_out_in(bound) else _blocks(bound.dim("K")),
        "V": lambda bound: _blocks(bound.dim("K")) if _is_out_in(bound) else _features(bound),
    },
    dynamic=("T",),
    errors={"dtype": UnsupportedDtypeError},
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for each kind of input and layout of w, for any extents."""
    if target.capability[0] != 9:
        reason = "its kernel is for compute capability 9.0"
        return NoKernel(reason, "Use a Hopper GPU.", ((9, 0),))
    tokens, depth, features = bound.dim("T"), bound.dim("K"), _features(bound)
    scaled = _is_scaled(bound)
    problem = launch.Problem("k" if _is_out_in(bound) else "n", scaled)
    how = launch.choose(problem, features // HEAD, depth, target.arch)
    config = launch.config(problem, how, target.sm_count)
    place = "fe_gemm.kernels.sm90.proj_rope_mxfp8:build"
    spec = KernelSpec.of(f"fe_gemm.{NAME}", place, target.arch, **config)
    weight, table = bound.given["w"], bound.given["cos"]
    scales = (bound.given["x_scale"], bound.given["w_scale"]) if scaled else (None, None)
    codes = (tokens, features)
    form = Form(
        inputs=((tokens, depth), weight, table, table, *scales),
        outputs=(codes, (tokens, features // BLOCK), codes, (_blocks(tokens), features)),
        scratch=(((tokens, depth), BF16), (weight, BF16)) if scaled else (),
    )
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.proj_rope_mxfp8:gemm_proj_rope_mxfp8",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.gemm_proj_rope_mxfp8_jax",
)
