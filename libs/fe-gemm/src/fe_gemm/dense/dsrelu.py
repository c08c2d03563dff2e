"""``gemm_dsrelu``: backward of the squared ReLU on a block-scaled product that is computed again."""

from __future__ import annotations

from typing import Any

from fe_gemm.workspace_class import WorkspaceAPI
from fe_runtime.contract import Bound, Contract, Layout, Output, OutputSpec
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.strides import has_distinct_elements
from fe_runtime.tuple_dict import TupleDict

from . import contract as common
from . import squared_relu
from .kernel import find_dense

__all__ = ["OPERATION", "GemmDsrelu", "gemm_dsrelu_jax", "gemm_dsrelu_wrapper"]

HINTS = squared_relu.hints("gemm_dsrelu")


def gemm_dsrelu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
    d_major: str = "n",
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
    """Compute the product again and carry the gradient C back through squared ReLU and factors.

    ``G = alpha * sum_k A[m, k, l] * B[n, k, l]`` of the dequantised operands in fp32,
    ``D = CAST((relu(G) * 2) * (C * prob[m, 0, l]))``, ``dprob[m, 0, l] = sum_n relu(G)^2 * C``.

    Parameters
    ----------
    a_tensor
        (M, K, L): float8_e4m3fn, float8_e5m2, or packed FP4 along K (``float4_e2m1fn_x2`` or ``uint8``, (M, K/2, L)).
        fp8: K or M contiguous; FP4: K. Rows (columns) at any pitch that is a multiple of 16 bytes, K (M) a multiple of
        16 bytes, the batch outermost. K > 0.
    b_tensor
        (N, K, L), dtype of A, likewise. N > 0.
    c_tensor
        (M, N, L) float32, float16 or bfloat16, contiguous along the dimension that ``d_major`` names, with a pitch that
        is a multiple of 16 bytes: the gradient of the forward's D.
    sfa_tensor, sfb_tensor
        Scales of A and B in the blocked layout for M (N) rows and K columns, of equal dtype: physical
        (L, ceil(M/128), ceil(K/V/4), 32, 4, 4) contiguous, or its logical view. With ``V = sf_vec_size``: fp8 needs
        e8m0 scales and V = 32; FP4 e8m0 and V = 16 or 32, or e4m3 and V = 16. ``uint8`` and ``int8`` are e8m0 bytes.
        Padding has no influence.
    prob_tensor
        (M, 1, L) float32, any strides.
    alpha
        Factor of the product, rounded to fp32. A new value never compiles anything.
    d_major
        ``"n"`` or ``"m"``: the contiguous dimension of C and D, a multiple of 16 bytes.
    d_dtype
        float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; fp8 is quantised in blocks of 32 columns and needs
        e8m0 scales with ``sf_vec_size=32``.
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
        ``d_tensor`` (M, N, L); ``dprob_tensor`` (M, 1, L) float32, contiguous; ``amax_tensor`` (1,) float32, the
        largest magnitude of D before its rounding, for FP4 operands with a D that is not fp8, else ``None``;
        ``sfd_tensor``, the e8m0 scales of an fp8 D in the blocked layout for M rows and N columns (torch: the
        logical view; else the physical form), else ``None``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    ``relu`` is strict, and keeps NaN. ``dprob`` does not contain ``prob``; its sums have a fixed order: bit-identical
    from run to run. Not differentiable: torch records no gradient for the results, and does not refuse. JAX arrays:
    L = 1, row-major operands and results.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of GEMM with squared ReLU.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a = np.ones((16, 64, 1), ml_dtypes.float8_e4m3fn)
    >>> one = np.full((1, 1, 1, 32, 4, 4), 127, np.uint8)
    >>> c, prob = np.ones((16, 16, 1), np.float32), np.full((16, 1, 1), 0.5, np.float32)
    >>> d, dprob, amax, sfd = gemm_dsrelu_wrapper(a, a, c, one, one, prob, sf_vec_size=32)
    >>> float(d[0, 0, 0]), float(dprob[0, 0, 0])
    (64.0, 65536.0)
    """
    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32)
    options = {
        "alpha": alpha,
        "d_major": d_major,
        "d_dtype": d_dtype,
        "acc_dtype": acc_dtype,
        "sf_vec_size": sf_vec_size,
    }
    arrays = (a_tensor, b_tensor, c_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
    return OPERATION(arrays, options, stream=stream, backend=backend)


class GemmDsrelu(WorkspaceAPI):
    """Backward of the squared ReLU into the caller's outputs; see :func:`gemm_dsrelu_wrapper`.

    dtype and major of D are those of the sample. An fp8 D needs ``sfd`` and ``norm_const``. ``execute`` adds to what
    ``dprob_tensor`` holds, which may have any strides without overlap: zero it before the first call. It raises the
    maximum that ``amax_tensor`` holds: preset it, to -inf or 0.

    M may change between executions. Those without a ``workspace`` share a buffer of the object: their M is at most the
    sample's, and they must not run at the same time on several streams.
    """

    grows = False

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d: Any,
        sample_dprob: Any,
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
            "d_major": common.sample_major(sample_d),
            "d_dtype": common.sample_dtype(sample_d, "bfloat16"),
            "acc_dtype": acc_dtype,
            "sf_vec_size": sf_vec_size,
            "with_amax": sample_amax is not None,
        }
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32
        inputs = (sample_a, sample_b, sample_c, sample_sfa, sample_sfb, sample_prob, sample_norm_const)
        outputs = (sample_d, sample_dprob, sample_amax, sample_sfd)
        super().__init__(OPERATION, inputs, outputs, options, backend)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        dprob_tensor: Any,
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
        """Write D, add to ``dprob``, and fill what else there is of the caller's outputs; no synchronisation.

        ``alpha=None``: the constructor's. ``workspace``: a contiguous uint8 vector, 16-byte aligned on a GPU, that no
        other execution uses at the same time; as long as ``scratch_workspace_bytes()`` of an object for this M. JAX
        arrays need none.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand is not as compiled, the workspace does not do, or M exceeds the sample's without one.
        """
        inputs = (a_tensor, b_tensor, c_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
        outputs = (d_tensor, dprob_tensor, amax_tensor, sfd_tensor)
        runtime = {} if alpha is None else {"alpha": alpha}
        self._execute_in(workspace, inputs, outputs, current_stream, runtime)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        HINTS.check(*self._hints)


def gemm_dsrelu_jax(
    a_tensor: Any,
    b_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
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

    Same formula, dtypes and errors as :func:`gemm_dsrelu_wrapper` with L = 1; FP4 operands are ``uint8``. All options
    are static.

    Returns
    -------
    tuple
        ``(d, dprob)``; with ``all_outputs`` ``(d, dprob, amax, sfd)``, ``None`` for what the call does not produce.
    """
    from fe_runtime.jax.entry import entry

    HINTS.check(mma_tiler_mn, cluster_shape_mn, vector_f32)
    options = {"alpha": alpha, "d_dtype": d_dtype, "acc_dtype": acc_dtype, "sf_vec_size": sf_vec_size}
    arrays = (a_tensor, b_tensor, c_tensor, sfa_tensor, sfb_tensor, prob_tensor, norm_const_tensor)
    outputs = entry(OPERATION, arrays, options, backend)
    return tuple(outputs) if all_outputs else tuple(outputs[:2])


DISTINCT = Layout(
    "distinct",
    "have positive strides by which no two elements share memory",
    "Pass a contiguous array.",
    has_distinct_elements,
)


def _dprob(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("M"), 1, bound.dim("L")), "float32", accumulate="add", layout=DISTINCT)


CONTRACT = Contract(
    operation="gemm_dsrelu",
    inputs=(
        common.operand_a(common.BLOCK_DTYPES),
        common.operand_b(common.BLOCK_DTYPES),
        common.input_matrix("c_tensor", "M N L", common.WIDE, doc="gradient of the forward's result"),
        common.scales_a(),
        common.scales_b(),
        common.PROB,
        common.NORM_CONST,
    ),
    options=(
        common.ALPHA,
        common.major("d_major", "the contiguous dimension of C and D"),
        squared_relu.D_DTYPE,
        common.ACCUMULATOR,
        common.vector_size(16),
        squared_relu.WITH_AMAX,
    ),
    outputs=(
        Output(
            "d_tensor",
            lambda bound: common.matrix(bound, common.text(bound, "d_dtype"), common.text(bound, "d_major")),
            doc="gradient of the product",
        ),
        Output("dprob_tensor", _dprob, doc="gradient of the factors"),
        squared_relu.AMAX,
        squared_relu.SCALES,
    ),
    rules=(
        *common.EXTENTS,
        *common.jax_layout("d_major"),
        common.same_major("c_tensor", "d_major"),
        *common.BLOCK_FORMAT,
        *squared_relu.D_RULES,
    ),
    dynamic=common.ROWS,
    derived=common.TILES,
)


ROLES = {
    "c_tensor": "upstream",
    "prob_tensor": "prob",
    "norm_const_tensor": "norm_const",
    "d_tensor": "c",
    "dprob_tensor": "dprob",
    "amax_tensor": "amax",
    "sfd_tensor": "scales",
}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors and results, and for the tiles that suit N and K; for any rows."""
    return find_dense(bound, target, CONTRACT.output_names, ROLES, "dsrelu")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.dsrelu:gemm_dsrelu",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.gemm_dsrelu_jax",
)
