"""``rms_norm``: RMSNorm with optional weight, bias and residual sum, and its gradient; ``rms_norm_backward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import launch
from .row_operands import EPS, FLOATS, alignment, backward_kernel, copied, some_columns

__all__ = ["BACKWARD", "OPERATION", "rms_norm", "rms_norm_backward", "rms_norm_jax"]


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    residual: Any = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    """Add the residual, if there is one, normalise each row by its root mean square, scale and shift it.

    ``h = x + residual`` (rounded to the dtype of x), ``rstd = 1/sqrt(mean_N(h^2) + eps)``,
    ``out = (rstd*h)*weight + bias``, in fp32, rounded once.

    Parameters
    ----------
    x
        (..., N); bfloat16, float16 or float32; last dimension of stride 1, rows at any stride >= 0.
    weight
        (N,), contiguous; bfloat16, float16 or float32, whatever x is. ``None``: no scaling.
    bias
        (N,), contiguous; dtype of ``weight``, any of the three without one. ``None``: no shift.
    eps
        Added to the mean square; >= 0. A new value never compiles anything.
    residual
        (..., N), dtype of x: the residual stream, which has the dtype of x before and after.
    out_dtype
        ``None`` (the dtype of x), bfloat16, float16 or float32, in any framework's terms.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    array or tuple
        ``out`` (..., N); with a residual ``(out, residual_out)``, where ``residual_out`` is h.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    The norm is that of ``residual_out`` as it is returned, rounded: the value that the next layer adds to and that the
    gradient is computed from, so a recomputation from the stored stream gives the same result.

    Differentiable in x, residual, weight and bias, once, in torch and in JAX. Weight and bias get gradients summed in
    fp32 in an order that depends on the GPU model and the number of rows only: the same bits in every run.
    Deterministic. Arrays whose leading dimensions do not merge into rows of one stride are copied first.

    Examples
    --------
    >>> import numpy as np
    >>> x, stream = np.full((2, 4), 3.0, np.float32), np.ones((2, 4), np.float32)
    >>> out, stream = rms_norm(x, np.full(4, 2, np.float32), eps=0.0, residual=stream)
    >>> float(out[0, 0]), float(stream[0, 0])
    (2.0, 4.0)
    """
    options = {"eps": eps, "out_dtype": out_dtype}
    out, residual_out, _ = OPERATION.outputs((x, weight, bias, residual), options, backend=backend)
    return out if residual is None else (out, residual_out)


def rms_norm_jax(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    residual: Any = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    """Apply :func:`rms_norm` to JAX arrays, eagerly, under ``jit`` and under ``grad``.

    Same formula, dtypes, results and errors; ``eps``, ``out_dtype`` and ``backend`` are static.
    """
    from fe_runtime.jax.entry import entry

    options = {"eps": eps, "out_dtype": out_dtype}
    out, residual_out, _ = entry(OPERATION, (x, weight, bias, residual), options, backend)
    return out if residual is None else (out, residual_out)


def rms_norm_backward(
    dout: Any,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    rstd: Any = None,
    dresidual_out: Any = None,
    backend: str = "auto",
) -> TupleDict:
    """Return the gradients of :func:`rms_norm`, for those who write their own derivative rules.

    ``xh = rstd*x``, ``u = dout*weight``, ``dx = rstd*(u - xh*mean_N(u*xh)) + dresidual_out``,
    ``dweight = sum over rows of dout*xh``, ``dbias = sum over rows of dout``, in fp32, each rounded once.

    Parameters
    ----------
    dout
        (..., N), gradient of the output; bfloat16, float16 or float32.
    x
        (..., N), what was normalised: ``residual_out`` where there was a residual.
    weight, bias
        As given to the forward. The values of the bias do not matter.
    eps
        As given to the forward; only used without ``rstd``.
    rstd
        (...), float32: the last result of ``torch.ops.fe_norm.rms_norm``. ``None``: computed again from x.
    dresidual_out
        (..., N), dtype of x: gradient of ``residual_out``.
    backend
        As for the forward.

    Returns
    -------
    TupleDict
        ``dx`` (..., N), the gradient of x and of the residual, dtype of x; ``dweight`` and ``dbias`` (N,), dtype of
        what they belong to, or ``None``.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract.

    Notes
    -----
    Deterministic; no derivative of its own.
    """
    return BACKWARD((dout, dresidual_out, x, weight, bias, rstd), {"eps": eps}, backend=backend)


def _cut(call: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the columns of a valid call down to none."""
    rows = ("dout", "dresidual_out", "x", "weight", "bias", "residual")
    return {**call, **{name: call[name][..., :0] for name in rows if call.get(name) is not None}}


def _like(name: str, dtype: str | None = None) -> Callable[[Bound], OutputSpec | None]:
    """Return the specification of an output like an input, or of the dtype that an option says; none without it."""

    def spec(bound: Bound) -> OutputSpec | None:
        if not bound.has(name):
            return None
        array = bound.arrays[name]
        return OutputSpec(tuple(array.shape), str(bound.options[dtype]) if dtype else array.dtype)

    return spec


CONTRACT = Contract(
    operation="rms_norm",
    inputs=(
        Input("x", "... N", FLOATS, UNIT_INNER, doc="input"),
        Input("weight", "N", FLOATS, optional=True, doc="scale per column; None: no scaling"),
        Input("bias", "N", FLOATS, optional=True, dtype_of="weight", doc="added per column"),
        Input("residual", "... N", FLOATS, UNIT_INNER, optional=True, dtype_of="x", doc="added to x first"),
    ),
    options=(
        EPS,
        Option(
            "out_dtype",
            "dtype",
            choices=FLOATS,
            invalid=("float64", "float8_e4m3fn", "int8"),
            resolve=lambda bound: bound.dtype("x"),
            doc="output format; None: the dtype of x",
        ),
    ),
    outputs=(
        Output("out", _like("x", "out_dtype"), doc="result"),
        Output("residual_out", _like("residual"), doc="x + residual, rounded: what was normalised"),
        Output("rstd", lambda bound: OutputSpec(bound.batch, "float32"), doc="kept for the gradient"),
    ),
    rules=(some_columns("x", "N", _cut),),
)

BACKWARD_CONTRACT = Contract(
    operation="rms_norm_backward",
    inputs=(
        Input("dout", "... N", FLOATS, UNIT_INNER, doc="gradient of out"),
        Input("dresidual_out", "... N", FLOATS, UNIT_INNER, optional=True, doc="gradient of residual_out"),
        Input("x", "... N", FLOATS, UNIT_INNER, dtype_of="dresidual_out", doc="what was normalised"),
        Input("weight", "N", FLOATS, optional=True, doc="scale per column"),
        Input("bias", "N", FLOATS, optional=True, dtype_of="weight", doc="only its presence and dtype count"),
        Input("rstd", "...", ("float32",), optional=True, doc="of the forward; None: computed again"),
    ),
    options=(EPS,),
    outputs=(
        Output("dx", _like("x"), doc="gradient of x and of the residual"),
        Output("dweight", _like("weight"), doc="gradient of weight"),
        Output("dbias", _like("bias"), doc="gradient of bias"),
    ),
    rules=(some_columns("x", "N", _cut),),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one kernel per row length, dtypes and alignment, for any rows."""
    rows, columns = bound.rows, bound.dim("N")
    problem = launch.Problem(
        columns=columns,
        x_dtype=bound.arrays["x"].dtype,
        out_format=str(bound.options["out_dtype"]),
        weight_dtype=bound.dtype("weight"),
        has_bias=bound.has("bias"),
        bias_dtype=bound.dtype("bias"),
        x_alignment=alignment(bound, "x", "residual"),
        o_alignment=bound.alignments["out"],
        weight_alignment=alignment(bound, "weight", "bias"),
        has_residual=bound.has("residual"),
        has_rstd=True,
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of("fe_norm.rms_norm", "fe_norm.kernels.rms_rows:build", target.arch, **config)
    vectors = dict.fromkeys(("weight", "bias"), (columns,))
    form = Form(
        inputs=tuple(vectors.get(name, (rows, columns)) for name in bound.arrays),
        outputs=((rows, columns), (rows, columns) if problem.has_residual else None, (rows,)),
        scalars=("eps",),
        related=True,
    )
    return Kernel(spec, form, copied(bound, "x", "residual"))


def find_backward_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel of the gradient."""
    arrays = ("dout", "x", "weight", "bias")
    return backward_kernel(bound, target, arrays, activation=None, dresidual="dresidual_out", rstd="rstd")


BACKWARD = Operation(
    "fe_norm",
    BACKWARD_CONTRACT,
    reference="fe_norm.reference.rms_norm:rms_norm_backward",
    find_kernel=find_backward_kernel,
    jax_entry="fe_norm.rms_norm_jax",
)

OPERATION = Operation(
    "fe_norm",
    CONTRACT,
    reference="fe_norm.reference.rms_norm:rms_norm",
    find_kernel=find_kernel,
    gradient=Gradient(
        BACKWARD,
        residuals=(("residual_out", "x"), "weight", "bias", "rstd"),
        wrt=(("x", "residual"), "weight", "bias"),
        outputs=("out", "residual_out"),
    ),
    jax_entry="fe_norm.rms_norm_jax",
)
