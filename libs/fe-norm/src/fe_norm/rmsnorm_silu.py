"""``rmsnorm_silu``: RMSNorm, scale, optional bias and SiLU in one pass over each row, with 16/32-bit, FP8 or NVFP4
output, and its gradient."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import describe
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import launch
from .row_operands import EPS, FLOATS, alignment, backward_kernel, copied, some_columns

__all__ = [
    "BACKWARD",
    "OPERATION",
    "RmsNormSilu",
    "fused_rmsnorm_silu",
    "rmsnorm_silu_backward",
    "rmsnorm_silu_jax",
    "rmsnorm_silu_wrapper",
]

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
        (..., C); bfloat16, float16 or float32; last dimension of stride 1, rows at any stride >= 0.
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
        A gradient is required of FP8 or NVFP4 output, which is for inference.

    Notes
    -----
    With 16- or 32-bit output differentiable in x, w and bias, once, in torch and in JAX; see
    :func:`rmsnorm_silu_backward`.

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
    """Apply RMSNorm, scale, bias and SiLU to JAX arrays, eagerly, under ``jit`` and under ``grad``.

    Same formula, dtypes, derivative and errors as :func:`rmsnorm_silu_wrapper`; ``eps``, ``out_dtype`` and ``backend``
    are static.

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
    RuntimeError
        A gradient is required and ``out`` given: what is written in place has no derivative.
    """
    if out is None:
        if block_scale is not None:
            rule, fix = "be None without out", "Pass both for NVFP4, or call rmsnorm_silu_wrapper."
            raise InvalidArgumentError(explain("fused_rmsnorm_silu", "block_scale", rule, "an array", fix))
        return rmsnorm_silu_wrapper(input, weight, eps)["o_tensor"]
    _refuse_gradient(input=input, weight=weight, out=out)
    RmsNormSilu(input, weight, out, block_scale, eps)(input, weight, out, block_scale)
    return out if block_scale is None else (out, block_scale)


def rmsnorm_silu_backward(
    do_tensor: Any,
    x_tensor: Any,
    w_tensor: Any = None,
    bias_tensor: Any = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Return the gradients of :func:`rmsnorm_silu_wrapper`, for those who write their own derivative rules.

    With ``rstd`` and ``z`` as there, ``s = 1/(1 + exp(-z))``, ``u0 = do*s*(1 + z*(1 - s))``, ``u = u0*w`` and
    ``xh = rstd*x``: ``dx = rstd*(u - xh*mean_C(u*xh))``, ``dw = sum over rows of u0*xh``,
    ``db = sum over rows of u0``, in fp32, each rounded once.

    Parameters
    ----------
    do_tensor
        (..., C), gradient of the output; bfloat16, float16 or float32.
    x_tensor, w_tensor, bias_tensor, eps
        As given to the forward.
    backend
        As for the forward.

    Returns
    -------
    TupleDict
        ``dx_tensor`` (..., C), ``dw_tensor`` and ``dbias_tensor`` (C,), each of the dtype of what it belongs to;
        ``None`` for what is absent.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract.

    Notes
    -----
    Sums over rows have a fixed order, which depends on the GPU model and the number of rows only. Deterministic; no
    derivative of its own.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: RMSNorm + SiLU, differentiated.
    """
    return BACKWARD((do_tensor, x_tensor, w_tensor, bias_tensor), {"eps": eps}, backend=backend)


def _refuse_gradient(**arrays: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False):
            rule = "not require a gradient where out is given: what is written in place has no derivative"
            fix = "Leave out out, or call it under torch.no_grad()."
            raise RuntimeError(explain("fused_rmsnorm_silu", name, rule, "requires_grad=True", fix))


def _is_quantised(options: Mapping[str, object]) -> bool:
    """Whether the options, in any spelling, ask for FP8 or NVFP4 output; an invalid dtype is none of these."""
    dtype = options.get("out_dtype")
    if dtype is None or dtype == "nvfp4":
        return dtype is not None
    try:
        return canonical_dtype(dtype).startswith("float4") or canonical_dtype(dtype) == FP8
    except ValueError:
        return False


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
    rows = ("do_tensor", "x_tensor", "w_tensor", "bias_tensor")
    return {**call, **{name: call[name][..., :columns] for name in rows if name in call}}


CONTRACT = Contract(
    operation="rmsnorm_silu",
    inputs=(
        Input("x_tensor", "... C", FLOATS, UNIT_INNER, doc="input"),
        Input("w_tensor", "C", FLOATS, also=("1 C 1 1",), optional=True, doc="scale per channel; None: no scaling"),
        Input("bias_tensor", "C", FLOATS, optional=True, dtype_of="w_tensor", doc="added before SiLU"),
        Input("scale_tensor", "1", ("float32",), optional=True, doc="multiplies the result; FP8 output only"),
    ),
    options=(
        EPS,
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
        some_columns("x_tensor", "C", lambda call: _narrowed(call, 0)),
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
    columns, out_dtype = bound.dim("C"), str(bound.options["out_dtype"])
    problem = launch.Problem(
        columns=columns,
        x_dtype=bound.arrays["x_tensor"].dtype,
        out_format="nvfp4" if out_dtype == NVFP4 else out_dtype,
        weight_dtype=bound.dtype("w_tensor"),
        has_bias=bound.has("bias_tensor"),
        bias_dtype=bound.dtype("bias_tensor"),
        has_scale=bound.has("scale_tensor"),
        x_alignment=alignment(bound, "x_tensor"),
        o_alignment=bound.alignments["o_tensor"],
        weight_alignment=alignment(bound, "w_tensor", "bias_tensor"),
        activation="silu",
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of("fe_norm.rmsnorm_silu", "fe_norm.kernels.rms_rows:build", target.arch, **config)
    return Kernel(spec, _kernel_form(bound), copied(bound, "x_tensor"))


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


BACKWARD_CONTRACT = Contract(
    operation="rmsnorm_silu_backward",
    inputs=(
        Input("do_tensor", "... C", FLOATS, UNIT_INNER, doc="gradient of the output"),
        Input("x_tensor", "... C", FLOATS, UNIT_INNER, doc="input"),
        Input("w_tensor", "C", FLOATS, also=("1 C 1 1",), optional=True, doc="scale per channel"),
        Input("bias_tensor", "C", FLOATS, optional=True, dtype_of="w_tensor", doc="added before SiLU"),
    ),
    options=(EPS,),
    outputs=(
        Output("dx_tensor", lambda bound: _like(bound, "x_tensor"), doc="gradient of x"),
        Output("dw_tensor", lambda bound: _like(bound, "w_tensor"), doc="gradient of w"),
        Output("dbias_tensor", lambda bound: _like(bound, "bias_tensor"), doc="gradient of bias"),
    ),
    rules=(some_columns("x_tensor", "C", lambda call: _narrowed(call, 0)),),
)


def find_backward_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel of the gradient."""
    arrays = ("do_tensor", "x_tensor", "w_tensor", "bias_tensor")
    return backward_kernel(bound, target, arrays, activation="silu")


def _like(bound: Bound, name: str) -> OutputSpec | None:
    array = bound.arrays.get(name)
    return None if array is None else OutputSpec(tuple(array.shape), array.dtype)


BACKWARD = Operation(
    "fe_norm",
    BACKWARD_CONTRACT,
    reference="fe_norm.reference.rmsnorm_silu:rmsnorm_silu_backward",
    find_kernel=find_backward_kernel,
    jax_entry="fe_norm.rmsnorm_silu_jax",
)

OPERATION = Operation(
    "fe_norm",
    CONTRACT,
    reference="fe_norm.reference.rmsnorm_silu:rmsnorm_silu",
    find_kernel=find_kernel,
    gradient=Gradient(
        BACKWARD,
        residuals=("x_tensor", "w_tensor", "bias_tensor"),
        wrt=("x_tensor", "w_tensor", "bias_tensor"),
        outputs=("o_tensor",),
        options=("eps",),
    ),
    inference_only=_is_quantised,
    jax_entry="fe_norm.rmsnorm_silu_jax",
    stream_argument="current_stream",
)
