"""``gemm_amax``: product of block-scaled matrices that also returns the largest magnitude of the result."""

from __future__ import annotations

from typing import Any

from fe_gemm.workspace_class import WorkspaceAPI
from fe_runtime.contract import Bound, Contract, Output, OutputSpec, Rule
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

from . import contract as common
from .hints import Hints
from .kernel import find_dense

__all__ = ["OPERATION", "GemmAmax", "gemm_amax_jax", "gemm_amax_wrapper"]

HINTS = Hints("gemm_amax", tile_n=(128, 256), default_cluster=lambda rows: (1, 1))
DTYPES = (*common.WIDE, *common.FP8, *common.PACKED)


def gemm_amax_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    c_major: str = "n",
    c_dtype: Any = "float32",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = (1, 1),
    sf_vec_size: int = 32,
    stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply block-scaled matrices and find the largest magnitude of the result.

    ``acc[m, n, l] = sum_k A[m, k, l] * B[n, k, l]`` of the dequantised operands in fp32, ``C = CAST(acc)``,
    ``amax = max |acc|``.

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
    c_major
        ``"n"`` or ``"m"``: the contiguous dimension of C, a multiple of 16 bytes.
    c_dtype
        float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, or, for FP4 operands and n-major C, packed FP4
        (``float4_e2m1fn_x2``, or ``uint8`` for the container). Saturating for fp8 and FP4.
    acc_dtype
        float32.
    mma_tiler_mn, cluster_shape_mn
        Checked, without effect: tiles of 128 or 256, clusters of 1, 2 or 4, even rows of a cluster for 256.
    sf_vec_size
        Elements per scale.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``c_tensor`` (M, N, L), packed FP4 (M, N/2, L); ``amax_tensor`` (1, 1, 1) float32, -inf without elements.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices or options break the contract.

    Notes
    -----
    A NaN in A, B or a scale makes its results and ``amax`` NaN. Bit-identical from run to run. Not
    differentiable: torch records no gradient for the results, and does not refuse.
    JAX arrays: L = 1, row-major operands and results.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: GEMM with amax.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a = np.ones((128, 64, 1), ml_dtypes.float8_e4m3fn)
    >>> one = np.full((1, 1, 1, 32, 4, 4), 127, np.uint8)
    >>> c, amax = gemm_amax_wrapper(a, a, one, one)
    >>> float(c[0, 0, 0]), float(amax[0, 0, 0])
    (64.0, 64.0)
    """
    HINTS.check(mma_tiler_mn, cluster_shape_mn)
    options = {"c_major": c_major, "c_dtype": c_dtype, "acc_dtype": acc_dtype, "sf_vec_size": sf_vec_size}
    return OPERATION((a_tensor, b_tensor, sfa_tensor, sfb_tensor), options, stream=stream, backend=backend)


class GemmAmax(WorkspaceAPI):
    """Block-scaled product and maximum into the caller's outputs; see :func:`gemm_amax_wrapper`.

    dtype and major of C are those of the sample. ``execute`` raises the maximum that ``amax_tensor`` holds: preset it,
    to -inf or 0 (a NaN stays if its sign is positive). It may have any number of trailing ones. M may change between
    executions.

    ``workspace`` of ``execute`` is memory for expanded operands: a contiguous uint8 vector as long as
    ``scratch_workspace_bytes()`` of an object for this M. Executions without one use a buffer of the object, which
    grows with M, and must not run at the same time on several streams.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_c: Any,
        sample_amax: Any,
        acc_dtype: Any = "float32",
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = (1, 1),
        sf_vec_size: int = 32,
        *,
        backend: str = "auto",
    ) -> None:
        options = {
            "c_major": common.sample_major(sample_c),
            "c_dtype": common.sample_dtype(sample_c, "float32"),
            "acc_dtype": acc_dtype,
            "sf_vec_size": sf_vec_size,
        }
        self._hints = mma_tiler_mn, cluster_shape_mn
        inputs = (sample_a, sample_b, sample_sfa, sample_sfb)
        super().__init__(OPERATION, inputs, (sample_c, sample_amax), options, backend)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        c_tensor: Any,
        amax_tensor: Any,
        current_stream: Any = None,
        *,
        workspace: Any = None,
    ) -> None:
        """Write the product into ``c_tensor`` and raise ``amax_tensor``; no synchronisation."""
        inputs = (a_tensor, b_tensor, sfa_tensor, sfb_tensor)
        self._execute_in(workspace, inputs, (c_tensor, amax_tensor), current_stream)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        HINTS.check(*self._hints)


def gemm_amax_jax(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    c_dtype: Any = "float32",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = (1, 1),
    sf_vec_size: int = 32,
    *,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`gemm_amax_wrapper` with L = 1; FP4 operands and results are ``uint8``. All
    options are static.

    Returns
    -------
    tuple
        ``(c, amax)``.
    """
    from fe_runtime.jax.entry import entry

    HINTS.check(mma_tiler_mn, cluster_shape_mn)
    options = {"c_dtype": c_dtype, "acc_dtype": acc_dtype, "sf_vec_size": sf_vec_size}
    c, amax = entry(OPERATION, (a_tensor, b_tensor, sfa_tensor, sfb_tensor), options, backend)
    return c, amax


def _amax(bound: Bound) -> OutputSpec | None:
    return common.maximum(bound, (1, 1, 1))


def _packs(bound: Bound) -> bool:
    return common.text(bound, "c_dtype") in common.PACKED


CONTRACT = Contract(
    operation="gemm_amax",
    inputs=(
        common.operand_a(common.BLOCK_DTYPES),
        common.operand_b(common.BLOCK_DTYPES),
        common.scales_a(),
        common.scales_b(),
    ),
    options=(
        common.major("c_major", "the contiguous dimension of C"),
        common.stored_dtype("c_dtype", "float32", DTYPES, "dtype of C"),
        common.ACCUMULATOR,
        common.vector_size(32),
    ),
    outputs=(
        Output(
            "c_tensor",
            lambda bound: common.matrix(bound, common.text(bound, "c_dtype"), common.text(bound, "c_major")),
            doc="product",
        ),
        Output("amax_tensor", _amax, doc="largest magnitude before the rounding of C"),
    ),
    rules=(
        *common.EXTENTS,
        *common.jax_layout("c_major"),
        *common.BLOCK_FORMAT,
        Rule(
            "c_dtype",
            "be packed FP4 for FP4 operands only",
            holds=lambda bound: not _packs(bound) or bound.dtype("a_tensor") == common.FP4,
            given=lambda bound: f"{common.text(bound, 'c_dtype')} for {bound.dtype('a_tensor')}",
            fix="Pass another c_dtype.",
        ),
        Rule(
            "c_major",
            'be "n" for packed FP4',
            holds=lambda bound: not _packs(bound) or bound.options["c_major"] == "n",
            given=lambda bound: repr(bound.options["c_major"]),
            fix="Pairs lie along N.",
        ),
        Rule(
            "b_tensor",
            "have an even N for a packed FP4 result",
            holds=lambda bound: not _packs(bound) or bound.dim("N") % 2 == 0,
            given=lambda bound: f"N = {bound.dim('N')}",
            fix="Pad the rows of B.",
        ),
    ),
    dynamic=common.ROWS,
    derived=common.TILES,
)


ROLES = {"c_tensor": "c", "amax_tensor": "amax"}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors and results, and for the tiles that suit N and K; for any rows."""
    return find_dense(bound, target, CONTRACT.output_names, ROLES)


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.amax:gemm_amax",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.gemm_amax_jax",
)
