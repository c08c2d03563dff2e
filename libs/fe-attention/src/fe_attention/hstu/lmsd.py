"""``hstu_lmsd_forward``: LayerNorm, multiply, SiLU and dropout between the attention and the output projection of HSTU
layers."""

from __future__ import annotations

from typing import Any

from fe_attention.planning import lmsd as launch
from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from .lmsd_backward import BACKWARD, problem_of
from .lmsd_contract import CONTRACT

__all__ = ["OPERATION", "HSTULMSDFwd", "hstu_lmsd_forward", "hstu_lmsd_forward_jax"]


def hstu_lmsd_forward(
    x_tensor: Any,
    u_tensor: Any,
    weight_tensor: Any,
    bias_tensor: Any,
    eps: float = 1e-6,
    dropout_ratio: float = 0.1,
    seed: int = 0,
    stream: Any = None,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Normalise the rows of x, multiply them by the activated u, put u and x before the product, and drop elements.

    ``ln = (x - mean)*rstd*weight + bias``, ``a = u*sigmoid(u)`` or u,
    ``y = [drop2(a) | drop1(x) | drop0(ln*a)]``, the first two if asked for, in fp32, rounded once;
    ``rstd = 1/sqrt(max(mean(x^2) - mean^2, 0) + eps)``, ``drop(z) = z/(1 - p)`` where z is kept and 0 elsewhere.

    Parameters
    ----------
    x_tensor, u_tensor
        (N, D) bfloat16, D a positive multiple of 8, N * D <= 2^31; rows of stride 1 at any distance that is a multiple
        of 8 elements.
    weight_tensor, bias_tensor
        (D,) bfloat16, contiguous.
    eps
        Added to the variance; > 0. A new value never compiles anything.
    dropout_ratio
        Probability p, in [0, 1), with which an element is dropped. It is rounded to float32 first; 0 then means no
        dropout and no mask. Only whether there is dropout matters to a kernel.
    seed
        Signed integer of 64 bits: key of the random numbers.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    apply_u_silu
        Whether u is activated.
    concat_u, concat_x
        Whether the activated u and x come before the product in y.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``y_tensor`` (N, parts * D) bfloat16; ``mean_tensor`` and ``rstd_tensor`` (N,) float32; ``mask_tensor`` (N, D)
        int8, what was kept: bit 0 of the product, 1 of x, 2 of u; or ``None``. Bits of absent parts are 0.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, addresses (multiples of 16 bytes on a GPU) or options break the contract.

    Notes
    -----
    Element (row, column) of plane b (0 product, 1 x, 2 u) is kept if word ``column % 4`` of Philox4x32-10 with counter
    ``(row, column // 4, b, 0)`` and the halves of the seed as key is at least the smallest word w with
    ``f32(f32(w) * 2^-32) > f32(p)``: the same mask on every device and in every framework, whatever N and the flags.
    Dropped elements are selected out, so no NaN passes.

    Differentiable in x, u, weight and bias, once, in torch and in JAX. Deterministic. Relative errors of a kernel: half
    a bf16 step plus 2^-20 or so for y; 1e-5 for mean and rstd, but for rows whose mean exceeds their deviation a lot
    (the variance is the difference of two sums).

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: HSTU LMSD.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> x = np.array([[1, -1] * 4, [3, 1] * 4], ml_dtypes.bfloat16)
    >>> one = np.ones(8, ml_dtypes.bfloat16)
    >>> y, mean, rstd, mask = hstu_lmsd_forward(x, 2 * x, one, 0 * one, dropout_ratio=0.0, apply_u_silu=False)
    >>> y.shape, mean, mask
    ((2, 24), array([0., 2.], dtype=float32), None)
    >>> y[1, 16:18].tolist()
    [6.0, -2.0]
    """
    options = _options(eps, dropout_ratio, seed, apply_u_silu, concat_u, concat_x)
    return OPERATION((x_tensor, u_tensor, weight_tensor, bias_tensor), options, stream=stream, backend=backend)


class HSTULMSDFwd(APIBase):
    """The operation into the caller's outputs; see :func:`hstu_lmsd_forward`.

    The number of rows, their strides and the seed may change between executions.
    """

    def __init__(
        self,
        sample_x: Any,
        sample_u: Any,
        sample_weight: Any,
        sample_bias: Any,
        sample_y: Any,
        sample_mean: Any,
        sample_rstd: Any,
        sample_mask: Any,
        eps: float = 1e-6,
        dropout_ratio: float = 0.1,
        apply_u_silu: bool = True,
        concat_u: bool = True,
        concat_x: bool = True,
        *,
        backend: str = "auto",
    ) -> None:
        inputs = (sample_x, sample_u, sample_weight, sample_bias)
        outputs = (sample_y, sample_mean, sample_rstd, sample_mask)
        options = _options(eps, dropout_ratio, 0, apply_u_silu, concat_u, concat_x)
        super().__init__(OPERATION, inputs, outputs, options, backend)

    def execute(
        self,
        x_tensor: Any,
        u_tensor: Any,
        weight_tensor: Any,
        bias_tensor: Any,
        y_tensor: Any,
        mean_tensor: Any,
        rstd_tensor: Any,
        mask_tensor: Any,
        seed: int,
        current_stream: Any = None,
    ) -> None:
        """Write the results for a seed into the outputs; no allocation, no synchronisation.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand differs from the compiled signature, or an output overlaps another operand.
        """
        arrays = (x_tensor, u_tensor, weight_tensor, bias_tensor)
        outputs = (y_tensor, mean_tensor, rstd_tensor, mask_tensor)
        self._execute(arrays, outputs, current_stream, {"seed": seed})


def hstu_lmsd_forward_jax(
    x: Any,
    u: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float = 1e-6,
    dropout_ratio: float = 0.1,
    seed: int = 0,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    backend: str = "auto",
) -> tuple[Any, Any, Any, Any]:
    """Apply the operation to JAX arrays, eagerly, under ``jit`` and under ``grad``.

    Same formulas, dtypes and errors as :func:`hstu_lmsd_forward`; all options, the seed too, are static.

    Returns
    -------
    tuple
        ``(y, mean, rstd, mask)``; the mask is ``None`` without dropout. Only y has a derivative.
    """
    from fe_runtime.jax.entry import entry

    options = _options(eps, dropout_ratio, seed, apply_u_silu, concat_u, concat_x)
    y, mean, rstd, mask = entry(OPERATION, (x, u, weight, bias), options, backend)
    return y, mean, rstd, mask


def _options(
    eps: float, dropout_ratio: float, seed: int, apply_u_silu: bool, concat_u: bool, concat_x: bool
) -> dict[str, object]:
    return {
        "eps": eps,
        "dropout_ratio": dropout_ratio,
        "seed": seed,
        "apply_u_silu": apply_u_silu,
        "concat_u": concat_u,
        "concat_x": concat_x,
    }


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one for each D and set of flags, for any rows, ratio above 0 and seed."""
    rows, columns = bound.dim("N"), bound.dim("D")
    if columns > launch.MOST_COLUMNS:
        return NoKernel(f"rows have more than {launch.MOST_COLUMNS} columns", "Use shorter rows.")
    problem = launch.Problem(**problem_of(bound))
    config = launch.config(problem, launch.choose(problem, target.arch))
    spec = KernelSpec.of(
        "fe_attention.hstu_lmsd_forward", "fe_attention.kernels.lmsd_forward:build", target.arch, **config
    )
    form = Form(
        inputs=((rows, columns),) * 2 + ((columns,),) * 2,
        outputs=tuple(None if output is None else output.shape for output in bound.outputs),
        scalars=("eps", "dropout_ratio", "seed") if problem.has_dropout else ("eps",),
        related=True,
    )
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_attention",
    CONTRACT,
    reference="fe_attention.reference.lmsd:hstu_lmsd_forward",
    find_kernel=find_kernel,
    gradient=Gradient(
        BACKWARD,
        residuals=(
            "x_tensor",
            "u_tensor",
            "weight_tensor",
            "bias_tensor",
            "mean_tensor",
            "rstd_tensor",
            "mask_tensor",
        ),
        wrt=("x_tensor", "u_tensor", "weight_tensor", "bias_tensor"),
        outputs=("y_tensor",),
        options=("dropout_ratio", "apply_u_silu", "concat_u", "concat_x"),
    ),
    jax_entry="fe_attention.hstu_lmsd_forward_jax",
)
