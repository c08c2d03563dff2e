"""``rmsnorm_silu``: RMSNorm, scale, optional bias and SiLU in one pass over each row, with 16/32-bit, FP8 or NVFP4
output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import describe
from fe_runtime.contract import (
    UNIT_INNER,
    Bound,
    Contract,
    Input,
    Option,
    Output,
    OutputSpec,
    Rule,
    merged_strides,
)
from fe_runtime.dtypes import bits
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import launch

__all__ = ["OPERATION", "RmsNormSilu", "fused_rmsnorm_silu", "rmsnorm_silu_jax", "rmsnorm_silu_wrapper"]

FLOATS = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"
NVFP4 = "float4_e2m1fn_x2"
BLOCK = 16
"""Channels that share one NVFP4 scale."""


def rmsnorm_silu_wrapper(
    x_tensor: Any,
    w_tensor: Any,
    eps: float = 1e-5,
    bias_tensor: Any = None,
    out_dtype: Any = None,
    scale_tensor: Any = None,
    current_stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Apply RMSNorm, scale, bias and SiLU to each row.

    ``rstd = 1/sqrt(mean_C(x^2) + eps)``, ``z = (rstd*x)*w + b``, ``o = z/(1 + exp(-z))``, all in fp32, rounded once.

    Parameters
    ----------
    x_tensor
        (..., C); bfloat16, float16 or float32; last dimension of stride 1, rows at any stride.
    w_tensor
        (C,) or (1, C, 1, 1), contiguous; bfloat16, float16 or float32, whatever x is. ``None``: no scaling.
    eps
        Added to the mean square; >= 0. A new value never compiles anything.
    bias_tensor
        (C,), dtype of ``w_tensor``; added before SiLU.
    out_dtype
        ``None`` (the dtype of x), bfloat16, float16, float32, float8_e4m3fn, or ``"nvfp4"``, in any framework's terms.
    scale_tensor
        (1,), float32, on the device: multiplies the result before the FP8 rounding. FP8 output only.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``o_tensor`` (..., C), or packed pairs (..., C/2) for NVFP4 (``float4_e2m1fn_x2`` in torch, ``uint8``
        elsewhere; even channel in the low nibble); ``sf_tensor`` (..., C/16) float8_e4m3fn for NVFP4, else ``None``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract; NVFP4 needs C to be a multiple of 16.
    RuntimeError
        A gradient is required: the operation is for inference.

    Notes
    -----
    FP8 saturates at +-448 and keeps NaN. NVFP4 blocks of 16 channels store ``sf = e4m3(max|y|/6)`` and codes
    ``e2m1(y/q)`` with the unrounded ``q``; a block with ``max|y| <= 6*2^-10`` stores ``sf = 0`` and dequantises to 0.
    Deterministic. If the leading dimensions of x do not merge into rows of one stride, x is copied first.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU.

    Examples
    --------
    >>> import numpy as np
    >>> o, sf = rmsnorm_silu_wrapper(np.ones((2, 8), np.float32), np.full(8, 2, np.float32), eps=0.0)
    >>> o.shape, float(o[0, 0].round(4)), sf
    ((2, 8), 1.7616, None)
    """
    return OPERATION(
        (x_tensor, w_tensor, bias_tensor, scale_tensor),
        {"eps": eps, "out_dtype": out_dtype},
        stream=current_stream,
        backend=backend,
    )


class RmsNormSilu(APIBase):
    """RMSNorm, scale, bias and SiLU into the caller's outputs; see :func:`rmsnorm_silu_wrapper`.

    The output format is that of ``sample_o``: an array of packed bytes (``uint8`` or ``float4_e2m1fn_x2``) means
    NVFP4 and needs ``sample_sf``. The number of rows may change between executions; everything else is fixed.
    """

    def __init__(
        self,
        sample_x: Any,
        sample_w: Any,
        sample_o: Any,
        sample_sf: Any = None,
        eps: float = 1e-5,
        sample_bias: Any = None,
        sample_scale: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            OPERATION,
            (sample_x, sample_w, sample_bias, sample_scale),
            (sample_o, sample_sf),
            {"eps": eps, "out_dtype": _format_of(sample_o)},
            backend,
        )

    def execute(
        self,
        x_tensor: Any,
        w_tensor: Any,
        o_tensor: Any,
        sf_tensor: Any = None,
        bias_tensor: Any = None,
        scale_tensor: Any = None,
        current_stream: Any = None,
    ) -> None:
        """Write the result into ``o_tensor`` (and ``sf_tensor``); no allocation, no synchronisation."""
        self._execute((x_tensor, w_tensor, bias_tensor, scale_tensor), (o_tensor, sf_tensor), current_stream)


def rmsnorm_silu_jax(
    x: Any,
    w: Any,
    bias: Any = None,
    scale: Any = None,
    *,
    eps: float = 1e-5,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    """Apply RMSNorm, scale, bias and SiLU to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`rmsnorm_silu_wrapper`; ``eps``, ``out_dtype`` and ``backend`` are static.

    Returns
    -------
    jax.Array or tuple
        ``o``; ``(o, sf)`` for ``out_dtype="nvfp4"``, with the packed codes as ``uint8``.
    """
    from fe_runtime.jax.entry import entry

    o, sf = entry(OPERATION, (x, w, bias, scale), {"eps": eps, "out_dtype": out_dtype}, backend)
    return o if sf is None else (o, sf)


def fused_rmsnorm_silu(
    input: Any,
    weight: Any,
    eps: float = 1e-6,
    out: Any = None,
    block_scale: Any = None,
) -> Any:
    """Apply the operation under the signature of other serving stacks; the dtype of ``out`` selects the format.

    Returns
    -------
    array or tuple
        ``out``, written in place, or a new array when it is ``None``; ``(out, block_scale)`` for NVFP4.

    Raises
    ------
    InvalidArgumentError
        ``block_scale`` without ``out``, and as :func:`rmsnorm_silu_wrapper`.
    """
    if out is None:
        if block_scale is not None:
            rule, fix = "be None without out", "Pass both for NVFP4, or call rmsnorm_silu_wrapper."
            raise InvalidArgumentError(explain("fused_rmsnorm_silu", "block_scale", rule, "an array", fix))
        return rmsnorm_silu_wrapper(input, weight, eps)["o_tensor"]
    RmsNormSilu(input, weight, out, block_scale, eps)(input, weight, out, block_scale)
    return out if block_scale is None else (out, block_scale)


def _format_of(sample_o: Any) -> str | None:
    """Return the ``out_dtype`` that an output array stands for; ``None`` for one that the class will refuse."""
    try:
        dtype = describe(sample_o).dtype
    except (TypeError, ValueError):
        return None
    return "nvfp4" if dtype in ("uint8", "float4_e2m1fn") else dtype if dtype in (*FLOATS, FP8) else None


def _o_spec(bound: Bound) -> OutputSpec:
    dtype, columns = str(bound.options["out_dtype"]), bound.dim("C")
    if dtype != NVFP4:
        return OutputSpec((*bound.batch, columns), dtype)
    # torch alone has a dtype for packed pairs.
    return OutputSpec((*bound.batch, columns // 2), NVFP4 if bound.framework in ("torch", "descriptor") else "uint8")


def _sf_spec(bound: Bound) -> OutputSpec | None:
    if bound.options["out_dtype"] != NVFP4:
        return None
    return OutputSpec((*bound.batch, bound.dim("C") // BLOCK), FP8)


def _narrowed(call: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """Cut the channels of a valid call, to build one that breaks a rule on their number."""
    cut = {name: call[name][..., :columns] for name in ("x_tensor", "w_tensor", "bias_tensor")}
    return {**call, **cut}


CONTRACT = Contract(
    operation="rmsnorm_silu",
    inputs=(
        Input("x_tensor", "... C", FLOATS, UNIT_INNER, doc="input"),
        Input("w_tensor", "C", FLOATS, also=("1 C 1 1",), optional=True, doc="scale per channel; None: no scaling"),
        Input("bias_tensor", "C", FLOATS, optional=True, dtype_of="w_tensor", doc="added before SiLU"),
        Input("scale_tensor", "1", ("float32",), optional=True, doc="multiplies the result; FP8 output only"),
    ),
    options=(
        Option(
            "eps",
            float,
            1e-5,
            holds=lambda eps: isinstance(eps, float) and 0 <= eps < float("inf"),
            rule="be a finite number >= 0",
            invalid=(-1.0, float("nan"), float("inf")),
            runtime=True,
            doc="added to the mean square",
        ),
        Option(
            "out_dtype",
            "dtype",
            choices=(*FLOATS, FP8, NVFP4),
            aliases={"nvfp4": NVFP4, "float4_e2m1fn": NVFP4},
            invalid=("float64", "float8_e5m2", "int8"),
            resolve=lambda bound: bound.dtype("x_tensor"),
            doc="output format; None: the dtype of x",
        ),
    ),
    outputs=(
        Output("o_tensor", _o_spec, doc="result"),
        Output("sf_tensor", _sf_spec, doc="NVFP4 block scales"),
    ),
    rules=(
        Rule(
            "x_tensor",
            "have at least one column",
            holds=lambda bound: bound.dim("C") > 0,
            given=lambda bound: f"shape {bound.given['x_tensor']}",
            fix="The mean square of an empty row is undefined.",
            violation=lambda call: _narrowed(call, 0),
        ),
        Rule(
            "x_tensor",
            "have a multiple of 16 columns for NVFP4",
            holds=lambda bound: bound.options["out_dtype"] != NVFP4 or bound.dim("C") % BLOCK == 0,
            given=lambda bound: f"C = {bound.dim('C')}",
            fix="Pad the channels or choose another out_dtype.",
            violation=lambda call: {**_narrowed(call, 24), "out_dtype": "nvfp4", "scale_tensor": None},
        ),
        Rule(
            "scale_tensor",
            "be None unless out_dtype is float8_e4m3fn",
            holds=lambda bound: not bound.has("scale_tensor") or bound.options["out_dtype"] == FP8,
            given=lambda bound: f"a scale with out_dtype {bound.options['out_dtype']}",
            fix="Drop it or choose the FP8 output.",
            violation=lambda call: {**call, "out_dtype": "bfloat16"},
        ),
    ),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one kernel per row length, dtypes, output format and alignment, for any rows."""
    x, columns, out_dtype = bound.arrays["x_tensor"], bound.dim("C"), str(bound.options["out_dtype"])
    copied = merged_strides(x.shape, x.stride) is None
    row_bytes = columns * bits(x.dtype) // 8
    aligned = bound.alignments
    problem = launch.Problem(
        columns=columns,
        x_dtype=x.dtype,
        out_format="nvfp4" if out_dtype == NVFP4 else out_dtype,
        weight_dtype=bound.dtype("w_tensor"),
        has_bias=bound.has("bias_tensor"),
        bias_dtype=bound.dtype("bias_tensor"),
        has_scale=bound.has("scale_tensor"),
        x_alignment=min(16, row_bytes & -row_bytes) if copied else aligned["x_tensor"],
        o_alignment=aligned["o_tensor"],
        weight_alignment=min(aligned.get("w_tensor", 16), aligned.get("bias_tensor", 16)),
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of("fe_norm.rmsnorm_silu", "fe_norm.kernels.rmsnorm_silu:build", target.arch, **config)
    return Kernel(spec, _kernel_form(bound), ("x_tensor",) if copied else ())


def _kernel_form(bound: Bound) -> Form:
    rows, columns = bound.rows, bound.dim("C")
    vector = (columns,)
    return Form(
        inputs=(
            (rows, columns),
            vector if bound.has("w_tensor") else None,
            vector if bound.has("bias_tensor") else None,
            (1,) if bound.has("scale_tensor") else None,
        ),
        outputs=tuple(None if spec is None else (rows, spec.shape[-1]) for spec in bound.outputs),
        scalars=("eps",),
        related=True,
    )


OPERATION = Operation(
    "fe_norm",
    CONTRACT,
    reference="fe_norm.reference.rmsnorm_silu:rmsnorm_silu",
    find_kernel=find_kernel,
    inference_only=True,
    jax_entry="fe_norm.rmsnorm_silu_jax",
    stream_argument="current_stream",
)
