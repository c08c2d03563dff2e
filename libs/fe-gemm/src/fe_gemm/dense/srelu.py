"""``gemm_srelu``: block-scaled product with the squared ReLU and a factor for each row in the epilogue."""

from __future__ import annotations

from typing import Any

from fe_gemm.workspace_class import WorkspaceAPI
from fe_runtime.contract import Bound, Contract, Output
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

from . import contract as common
from . import squared_relu
from .kernel import find_dense

__all__ = ["OPERATION", "GemmSrelu", "gemm_srelu_jax", "gemm_srelu_wrapper"]

HINTS = squared_relu.hints("gemm_srelu")


def gemm_srelu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: Any = "bfloat16",
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    norm_const_tensor: Any = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply block-scaled matrices, square what is positive, and multiply each row by its factor.

    ``x = alpha * sum_k A[m, k, l] * B[n, k, l]`` of the dequantised operands in fp32, ``C = CAST(x)``,
    ``D = CAST(relu(x)^2 * prob[m, 0, l])`` from the x that is not rounded.

    Parameters
    ----------
    a_tensor
        (M, K, L): float8_e4m3fn, float8_e5m2, or packed FP4 along K (``float4_e2m1fn_x2`` or ``uint8``, (M, K/2, L)).
        fp8: K or M contiguous; FP4: K. Rows (columns) at any pitch that is a multiple of 16 bytes, K (M) a multiple of
        16 bytes, the batch outermost. K > 0.
    b_tensor
        (N, K, L), dtype of A, likewise. N > 0.
    sfa_tensor, sfb_tensor
        Scales of A and B in the blocked layout for M (N) rows and K columns, of equal dtype: physical
        (L, ceil(M/128), ceil(K/V/4), 32, 4, 4) contiguous, or its logical view. With ``V = sf_vec_size``: fp8 needs
        e8m0 scales and V = 32; FP4 e8m0 and V = 16 or 32, or e4m3 and V = 16. ``uint8`` and ``int8`` are e8m0 bytes.
        Padding has no influence.
    prob_tensor
        (M, 1, L) float32, any strides.
    alpha
        Factor of the product, rounded to fp32. A new value never compiles anything.
    c_major
        ``"n"`` or ``"m"``: the contiguous dimension of C and D, a multiple of 16 bytes.
    c_dtype
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2 (saturating, without a scale).
    d_dtype
        The same; fp8 is quantised in blocks of 32 columns and needs e8m0 scales with ``sf_vec_size=32``.
    acc_dtype
        float32.
    mma_tiler_mn, cluster_shape_mn, vector_f32
        Checked, without effect: tiles of 128 or 256 rows and 64, 128, 192 or 256 columns, clusters of 1, 2 or 4.
    norm_const_tensor
        (1,) or with more trailing ones, float32, finite, > 0; needed for an fp8 D, without effect otherwise.
    sf_vec_size
        Elements per scale, of the operands and of D.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``c_tensor`` and ``d_tensor`` (M, N, L); ``amax_tensor`` (1,) float32, the largest magnitude of D before its
        rounding, for FP4 operands with a D that is not fp8, else ``None``; ``sfd_tensor``, the e8m0 scales of an fp8 D
        in the blocked layout for M rows and N columns (torch: the logical view; else the physical form),
        else ``None``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    The ReLU keeps NaN: one in A, B or a scale makes its results and ``amax`` NaN. Bit-identical from run to run. Not
    differentiable; :func:`fe_gemm.gemm_dsrelu_wrapper` is the backward. JAX arrays: L = 1, row-major operands and
    results.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with squared ReLU.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a = np.ones((16, 64, 1), ml_dtypes.float8_e4m3fn)
    >>> one = np.full((1, 1, 1, 32, 4, 4), 127, np.uint8)
    >>> c, d, amax, sfd = gemm_srelu_wrapper(a, a, one, one, np.full((16, 1, 1), 0.5, np.float32), sf_vec_size=32)
    >>> float(c[0, 0, 0]), float(d[0, 0, 0])
    (64.0, 2048.0)
    """
    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32)
    options = {
        "alpha": alpha,
        "c_major": c_major,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "acc_dtype": acc_dtype,
        "sf_vec_size": sf_vec_size,
    }
    arrays = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
    return OPERATION(arrays, options, stream=stream, backend=backend)


class GemmSrelu(WorkspaceAPI):
    """Block-scaled product and squared ReLU into the caller's outputs; see :func:`gemm_srelu_wrapper`.

    dtypes and major of C and D are those of the samples. An fp8 D needs ``sfd`` and ``norm_const``. ``execute`` raises
    the maximum that ``amax_tensor`` holds: preset it, to -inf or 0. M may change between executions.

    ``workspace`` of ``execute`` is memory for expanded operands: a contiguous uint8 vector as long as
    ``scratch_workspace_bytes()`` of an object for this M. Executions without one use a buffer of the object, which
    grows with M, and must not run at the same time on several streams.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_prob: Any,
        sample_sfd: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        alpha: float = 1.0,
        acc_dtype: Any = "float32",
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        options = {
            "alpha": alpha,
            "c_major": common.sample_major(sample_c),
            "c_dtype": common.sample_dtype(sample_c, "bfloat16"),
            "d_dtype": common.sample_dtype(sample_d, "bfloat16"),
            "acc_dtype": acc_dtype,
            "sf_vec_size": sf_vec_size,
            "with_amax": sample_amax is not None,
        }
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32
        inputs = (sample_a, sample_b, sample_sfa, sample_sfb, sample_prob, sample_norm_const)
        super().__init__(OPERATION, inputs, (sample_c, sample_d, sample_amax, sample_sfd), options, backend)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        prob_tensor: Any,
        sfd_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        alpha: float | None = None,
        current_stream: Any = None,
        *,
        workspace: Any = None,
    ) -> None:
        """Write C, D and what else there is into the caller's outputs; no synchronisation.

        ``alpha=None``: the constructor's.
        """
        inputs = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
        outputs = (c_tensor, d_tensor, amax_tensor, sfd_tensor)
        self._execute_in(workspace, inputs, outputs, current_stream, {} if alpha is None else {"alpha": alpha})

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        HINTS.check(*self._hints)


def gemm_srelu_jax(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
    c_dtype: Any = "bfloat16",
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    *,
    norm_const_tensor: Any = None,
    all_outputs: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`gemm_srelu_wrapper` with L = 1; FP4 operands are ``uint8``. All options
    are static.

    Returns
    -------
    tuple
        ``(c, d)``; with ``all_outputs`` ``(c, d, amax, sfd)``, ``None`` for what the call does not produce.
    """
    from fe_runtime.jax.entry import entry

    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32)
    options = {
        "alpha": alpha,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "acc_dtype": acc_dtype,
        "sf_vec_size": sf_vec_size,
    }
    arrays = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
    outputs = entry(OPERATION, arrays, options, backend)
    return tuple(outputs) if all_outputs else tuple(outputs[:2])


CONTRACT = Contract(
    operation="gemm_srelu",
    inputs=(
        common.operand_a(common.BLOCK_DTYPES),
        common.operand_b(common.BLOCK_DTYPES),
        common.scales_a(),
        common.scales_b(),
        common.PROB,
        common.NORM_CONST,
    ),
    options=(
        common.ALPHA,
        common.major("c_major", "the contiguous dimension of C and D"),
        common.stored_dtype("c_dtype", "bfloat16", squared_relu.STORED, "dtype of C"),
        squared_relu.D_DTYPE,
        common.ACCUMULATOR,
        common.vector_size(16),
        squared_relu.WITH_AMAX,
    ),
    outputs=(
        Output(
            "c_tensor",
            lambda bound: common.matrix(bound, common.text(bound, "c_dtype"), common.text(bound, "c_major")),
            doc="product before the activation",
        ),
        Output(
            "d_tensor",
            lambda bound: common.matrix(bound, common.text(bound, "d_dtype"), common.text(bound, "c_major")),
            doc="squared ReLU of the product times the factors",
        ),
        squared_relu.AMAX,
        squared_relu.SCALES,
    ),
    rules=(*common.EXTENTS, *common.jax_layout("c_major"), *common.BLOCK_FORMAT, *squared_relu.D_RULES),
    dynamic=common.ROWS,
    derived=common.TILES,
)


ROLES = {
    "prob_tensor": "prob",
    "norm_const_tensor": "norm_const",
    "c_tensor": "pre",
    "d_tensor": "c",
    "amax_tensor": "amax",
    "sfd_tensor": "scales",
}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors and results, and for the tiles that suit N and K; for any rows."""
    return find_dense(bound, target, CONTRACT.output_names, ROLES, "srelu")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.srelu:gemm_srelu",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.gemm_srelu_jax",
)
