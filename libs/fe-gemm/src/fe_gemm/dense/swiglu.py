"""``gemm_swiglu``: gate and up projection of a gated MLP with the SwiGLU activation in the epilogue."""

from __future__ import annotations

from typing import Any

from fe_gemm.workspace_class import WorkspaceAPI
from fe_runtime.contract import Bound
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

from . import contract as common
from .hints import Hints
from .kernel import find_dense
from .swiglu_backward import GRADIENT
from .swiglu_contract import CONTRACT

__all__ = ["OPERATION", "GemmSwiglu", "gemm_swiglu_jax", "gemm_swiglu_wrapper"]


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


HINTS = Hints(
    "gemm_swiglu",
    tile_n=tuple(range(32, 257, 32)),
    default_cluster=lambda rows: (2, 2) if rows == 256 else (1, 1),
    cluster_is_legal=lambda rows, columns: _power_of_two(rows) and _power_of_two(columns) and rows * columns <= 16,
    clusters="have powers of two as extents, with a product of at most 16",
)


def _tile_n(sfa: Any) -> tuple[int, ...]:
    return HINTS.tile_n if sfa is None else (64, 128, 192, 256)


def gemm_swiglu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: Any = "float32",
    c_dtype: Any = "float16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    norm_const_tensor: Any = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    ab12_stages: int | None = 4,
    stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply, then gate each 32 columns of the product by the 32 columns after them.

    ``x = alpha * sum_k A[m, k, l] * B[n, k, l]`` in fp32 from the exact operands, ``AB12 = CAST(x)``. Of each 64
    columns of x the first 32 are ``up``, the last 32 ``gate``: the rows of B are interleaved in blocks of 32.
    ``C = CAST(up * (gate * sigmoid(gate)))`` in fp32, from the x that is not rounded.

    Parameters
    ----------
    a_tensor
        (M, K, L). Without scales float16, bfloat16, float32 (multiplied as TF32 where a kernel does so),
        float8_e4m3fn or float8_e5m2; with scales fp8, or packed FP4 along K (``float4_e2m1fn_x2`` or ``uint8``,
        (M, K/2, L)). K or M contiguous, FP4: K; rows (columns) at any pitch that is a multiple of 16 bytes, K (M) a
        multiple of 16 bytes, the batch outermost. K > 0.
    b_tensor
        (N, K, L), dtype of A, likewise. N a multiple of 64, N > 0.
    alpha
        Factor of the product, rounded to fp32. A new value never compiles anything.
    c_major
        ``"n"`` or ``"m"``: the contiguous dimension of AB12 and C, a multiple of 16 bytes; ``"n"`` for FP4.
    ab12_dtype
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2 (saturating, without a scale). bfloat16 is fast: the
        store of AB12 is most of the traffic.
    c_dtype
        float16 or bfloat16; with scales also float32, and fp8 where the scales are e8m0 with ``sf_vec_size=32``.
    acc_dtype
        float32; or, without scales, for float16 and fp8 operands and a 16-bit AB12, float16: the sum is rounded once to
        fp16 before alpha.
    mma_tiler_mn, cluster_shape_mn, vector_f32, ab12_stages
        Checked, without effect.
    sfa_tensor, sfb_tensor
        Both or none: scales of A and B in the blocked layout for M (N) rows and K columns, of equal dtype: physical
        (L, ceil(M/128), ceil(K/V/4), 32, 4, 4) contiguous, or its logical view. With ``V = sf_vec_size``: fp8 needs
        e8m0 scales and V = 32; FP4 e8m0 and V = 16 or 32, or e4m3 and V = 16. ``uint8`` and ``int8`` are e8m0 bytes.
    norm_const_tensor
        (1,) or with more trailing ones, float32, finite, > 0; needed for an fp8 C, without effect otherwise.
    sf_vec_size
        Elements per scale, of the operands and of C.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``ab12_tensor`` (M, N, L); ``c_tensor`` (M, N/2, L); ``sfc_tensor``, the e8m0 scales of an fp8 C in the blocked
        layout for M rows and N/2 columns (torch: the logical view; else the physical form), else ``None``;
        ``amax_tensor`` (1, 1, 1) float32, the largest magnitude of C before its rounding, for FP4 operands with a
        bfloat16 C, else ``None``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    Differentiable in A and B without scales, for float16, bfloat16 and float32: through C, and through AB12, at the
    stored AB12. NaN propagates. Bit-identical from run to run. JAX arrays: L = 1, row-major operands and results.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with SwiGLU.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.ones((4, 8, 1), np.float16), np.ones((64, 8, 1), np.float16)
    >>> ab12, c, sfc, amax = gemm_swiglu_wrapper(a, b, alpha=0.25)
    >>> float(ab12[0, 0, 0]), float(c[0, 0, 0]), sfc, amax
    (2.0, 3.5234375, None, None)
    """
    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32, ab12_stages, _tile_n(sfa_tensor))
    options = {
        "alpha": alpha,
        "c_major": c_major,
        "ab12_dtype": ab12_dtype,
        "c_dtype": c_dtype,
        "acc_dtype": acc_dtype,
        "sf_vec_size": sf_vec_size,
    }
    arrays = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, norm_const_tensor)
    return OPERATION(arrays, options, stream=stream, backend=backend)


class GemmSwiglu(WorkspaceAPI):
    """Product and SwiGLU into the caller's outputs; see :func:`gemm_swiglu_wrapper`.

    dtypes and major of AB12 and C are those of the samples. ``execute`` multiplies by its own ``alpha``: the
    constructor's has no effect. It raises the maximum that ``amax_tensor`` holds: preset it, to -inf or 0. An fp8 C
    needs ``sfc`` and ``norm_const``; FP4 operands with a bfloat16 C need ``amax``. M may change between executions.

    ``workspace`` of ``execute`` is memory for expanded operands: a contiguous uint8 vector as long as
    ``scratch_workspace_bytes()`` of an object for this M. Executions without one use a buffer of the object, which
    grows with M, and must not run at the same time on several streams.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_ab12: Any,
        sample_c: Any,
        alpha: float = 1.0,
        acc_dtype: Any = "float32",
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = None,
        sample_sfa: Any = None,
        sample_sfb: Any = None,
        sample_amax: Any = None,
        sample_sfc: Any = None,
        sample_norm_const: Any = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        ab12_stages: int | None = 4,
        *,
        backend: str = "auto",
    ) -> None:
        options = {
            "alpha": alpha,
            "c_major": common.sample_major(sample_c),
            "ab12_dtype": common.sample_dtype(sample_ab12, "float32"),
            "c_dtype": common.sample_dtype(sample_c, "float16"),
            "acc_dtype": acc_dtype,
            "sf_vec_size": sf_vec_size,
            "with_amax": sample_amax is not None,
        }
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32, ab12_stages, _tile_n(sample_sfa)
        inputs = (sample_a, sample_b, sample_sfa, sample_sfb, sample_norm_const)
        super().__init__(OPERATION, inputs, (sample_ab12, sample_c, sample_sfc, sample_amax), options, backend)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        ab12_tensor: Any,
        c_tensor: Any,
        sfa_tensor: Any = None,
        sfb_tensor: Any = None,
        amax_tensor: Any = None,
        sfc_tensor: Any = None,
        norm_const_tensor: Any = None,
        alpha: float = 1.0,
        current_stream: Any = None,
        *,
        workspace: Any = None,
    ) -> None:
        """Write AB12, C and what else there is into the caller's outputs; no synchronisation."""
        inputs = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, norm_const_tensor)
        outputs = (ab12_tensor, c_tensor, sfc_tensor, amax_tensor)
        self._execute_in(workspace, inputs, outputs, current_stream, {"alpha": alpha})

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        HINTS.check(*self._hints)


def gemm_swiglu_jax(
    a_tensor: Any,
    b_tensor: Any,
    alpha: float = 1.0,
    ab12_dtype: Any = "float32",
    c_dtype: Any = "float16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    ab12_stages: int | None = 4,
    *,
    norm_const_tensor: Any = None,
    all_outputs: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`gemm_swiglu_wrapper` with L = 1; FP4 operands are ``uint8``. All options
    are static.

    Returns
    -------
    tuple
        ``(ab12, c)``; with ``all_outputs`` ``(ab12, c, sfc, amax)``, ``None`` for what the call does not produce.
    """
    from fe_runtime.jax.entry import entry

    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32, ab12_stages, _tile_n(sfa_tensor))
    options = {
        "alpha": alpha,
        "ab12_dtype": ab12_dtype,
        "c_dtype": c_dtype,
        "acc_dtype": acc_dtype,
        "sf_vec_size": sf_vec_size,
    }
    outputs = entry(OPERATION, (a_tensor, b_tensor, sfa_tensor, sfb_tensor, norm_const_tensor), options, backend)
    return tuple(outputs) if all_outputs else tuple(outputs[:2])


ROLES = {
    "norm_const_tensor": "norm_const",
    "ab12_tensor": "pre",
    "c_tensor": "c",
    "sfc_tensor": "scales",
    "amax_tensor": "amax",
}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors and results, and for the tiles that suit N and K; for any rows."""
    return find_dense(bound, target, CONTRACT.output_names, ROLES, "swiglu")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.swiglu:gemm_swiglu",
    find_kernel=find_kernel,
    gradient=GRADIENT,
    jax_entry="fe_gemm.gemm_swiglu_jax",
)
