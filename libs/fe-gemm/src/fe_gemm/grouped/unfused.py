"""``grouped_gemm``: bf16 products of groups of rows with their experts' weights, with bias or row factors."""

from __future__ import annotations

from typing import Any

from fe_gemm.dense.contract import sample_dtype
from fe_runtime.contract import Bound, Contract, Option, Output, OutputSpec, Rule, Sample
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict, register_pytrees

from . import forms
from . import vocabulary as common
from .grouped_class import GroupedAPI, Weights, check_buffer
from .hints import Hints
from .kernel import find_grouped

__all__ = ["OPERATION", "GroupedGemm", "grouped_gemm_jax", "grouped_gemm_wrapper"]

HINTS = Hints("grouped_gemm", tile_n=tuple(range(32, 257, 32)))


def grouped_gemm_wrapper(
    a_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    b_tensor: Any = None,
    bias_tensor: Any = None,
    b_ptrs: Any = None,
    n: int | None = None,
    b_dtype: Any = None,
    b_major: str = "k",
    prob_tensor: Any = None,
    acc_dtype: Any = None,
    c_dtype: Any = None,
    d_dtype: Any = None,
    c_tensor: Any = None,
    d_tensor: Any = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    generate_c: bool = False,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Multiply each row of A by the weight of the expert that owns it.

    ``g = alpha[e] * sum_k A[m, k] * B_e[n, k]`` in fp32, for rows ``offsets[e-1] <= m < offsets[e]``.
    Without a bias ``c = g``, ``d = g * prob[m]``; with one ``c = d = g + bias[n, e] * prob[m]``: the product is then
    not scaled by prob. ``C = CAST(c)``, ``D = CAST(d)``, both from fp32.

    Parameters
    ----------
    a_tensor
        (M, K) or (M, K, 1) bfloat16, row-major; K > 0, a multiple of 8. Results have the form of A.
    padded_offsets
        (E,) int32, 1 <= E <= 1024: the row after the last one of each expert, non-decreasing, at most M. Groups may
        have any size, also 0. Device data: never read on the host.
    alpha_tensor
        (E,) float32.
    b_tensor
        Dense weights, bfloat16: (E, N, K) contiguous; with ``b_major="n"`` (E, K, N) contiguous; or the legacy view
        (N, K, E) of either (E, N, K) or (E, K, N). N > 0, a multiple of 8.
    bias_tensor
        (N, E) with strides (1, N), bfloat16, float16 or float32. JAX: (N, E).
    b_ptrs
        Instead of ``b_tensor``, discrete weights: (E,) int64 addresses of (N, K) matrices, row-major, or with
        ``b_major="n"`` of (K, N) ones; on the device of A, multiples of 16, in any order, also repeated. JAX without
        64-bit types: their bytes, (8 E,) uint8. The caller keeps the matrices alive.
    n, b_dtype
        Rows and dtype of the discrete weights; needed with ``b_ptrs``, refused without.
    b_major
        ``"k"`` or ``"n"``: how canonical or discrete weights lie.
    prob_tensor
        (M,) or (M, 1, 1) float32; required.
    acc_dtype
        float32.
    c_dtype, d_dtype
        bfloat16 (the default), float16 or float32. float16 overflows to infinity.
    c_tensor, d_tensor
        Arrays to write C and D into (torch, numpy), of exactly the shape, strides and dtype of the results; they are
        returned. ``c_tensor`` is checked and left alone without ``generate_c``.
    cd_major
        ``"n"``.
    mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched
        Checked, without effect: tiles of 128 or 256 rows and 32, 64, ..., 256 columns; clusters of powers of two with
        a product up to 16; 128 or 256 for ``m_aligned``, on which nothing relies.
    generate_c
        Whether to return C.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``d_tensor`` (M, N) or (M, N, 1); ``c_tensor`` likewise, ``None`` unless ``generate_c``. Rows from the last
        offset on are unspecified.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, presence or options break the contract; on the CPU, or on a GPU under
        ``FE_CHECK_DEVICE_VALUES=1``, also offsets that decrease or exceed M, and null addresses.

    Notes
    -----
    Rows from the last offset on may hold anything, NaN too. Bit-identical from run to run. Not differentiable.
    Malformed offsets give wrong numbers, never a wrong address. ``M % 256``, ends of groups at multiples of 256 and
    ``N % 32``, which the peer asks for, are not needed.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a, b = np.ones((3, 8), ml_dtypes.bfloat16), np.ones((2, 8, 8), ml_dtypes.bfloat16)
    >>> alpha, prob = np.array([1, 2], np.float32), np.ones(3, np.float32)
    >>> d, c = grouped_gemm_wrapper(a, np.array([1, 3], np.int32), alpha, b, prob_tensor=prob)
    >>> d[:, 0].astype(float).tolist(), c
    ([8.0, 16.0, 16.0], None)
    """
    _check_hints(mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched, cd_major)
    arrays = _arrays(a_tensor, padded_offsets, alpha_tensor, b_tensor, bias_tensor, b_ptrs, prob_tensor, b_major)
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": forms.dense_major(b_tensor, b_major),
        "acc_dtype": acc_dtype,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "generate_c": generate_c,
    }
    if c_tensor is None and d_tensor is None:
        return OPERATION(arrays, options, stream=current_stream, backend=backend)
    if generate_c is False and c_tensor is not None:
        _check_unused_c(OPERATION.bind(arrays, options), c_tensor)
        c_tensor = None
    outputs = OPERATION.outputs_into(arrays, (d_tensor, c_tensor), options, stream=current_stream, backend=backend)
    register_pytrees()
    return TupleDict.of(OPERATION.output_names, outputs)


grouped_gemm_wrapper.supports_bf16_canonical_layouts = True  # type: ignore[attr-defined]


class GroupedGemm(GroupedAPI):
    """Grouped product into the caller's outputs; see :func:`grouped_gemm_wrapper`.

    Dtypes of C and D are those of the samples. Weights: ``sample_b``, or ``num_experts``, ``b_shape=(N, K)`` and
    ``b_dtype`` for ``b_ptrs``. Operands come in the form of their samples; M may change between executions.
    ``c_tensor`` is a required buffer that is written with ``generate_c`` only.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_c: Any,
        sample_d: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_b: Any = None,
        sample_bias: Any = None,
        sample_prob: Any = None,
        num_experts: int | None = None,
        b_shape: tuple[int, ...] | None = None,
        b_dtype: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        generate_c: bool = False,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched
        self._writes_c = generate_c
        self._sample_c = None if sample_c is None else Sample.of("grouped_gemm", "c_tensor", sample_c)
        weights = Weights("grouped_gemm", sample_b, num_experts, b_shape, b_dtype, b_major, sample_a)
        options = {
            **weights.options,
            "acc_dtype": acc_dtype,
            "c_dtype": sample_dtype(sample_c, "bfloat16"),
            "d_dtype": sample_dtype(sample_d, "bfloat16"),
            "generate_c": generate_c,
        }
        bias = forms.by_expert(sample_bias)
        inputs = (
            sample_a,
            sample_padded_offsets,
            sample_alpha,
            weights.dense,
            bias,
            weights.table(),
            sample_prob,
        )
        super().__init__(OPERATION, weights, inputs, (sample_d, sample_c if generate_c else None), options, backend)

    def execute(
        self,
        a_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        b_tensor: Any = None,
        b_ptrs: Any = None,
        bias_tensor: Any = None,
        prob_tensor: Any = None,
        current_stream: Any = None,
    ) -> None:
        """Write D, and C with ``generate_c``, into the caller's outputs; no synchronisation."""
        inputs = (
            a_tensor,
            padded_offsets,
            alpha_tensor,
            self._weights.live(b_tensor),
            forms.by_expert(bias_tensor),
            b_ptrs,
            prob_tensor,
        )
        self._execute(inputs, (d_tensor, c_tensor if self._writes_c else None), current_stream)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        _check_hints(*self._hints)
        self._weights.check_depth(bound)
        if not self._writes_c:
            _check_unused_c(bound, self._sample_c)


def grouped_gemm_jax(
    a_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    b_ptrs: Any = None,
    n: int | None = None,
    prob_tensor: Any = None,
    c_dtype: Any = "bfloat16",
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    vector_f32: bool = False,
    generate_c: bool = False,
    use_dynamic_sched: bool = False,
    *,
    b_tensor: Any = None,
    bias_tensor: Any = None,
    b_major: str = "k",
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, forms, dtypes and errors as :func:`grouped_gemm_wrapper`. Weights behind ``b_ptrs`` are bfloat16;
    ``b_tensor`` is (E, N, K), or (E, K, N) with ``b_major="n"``, which is copied; ``bias_tensor`` (N, E) is copied. All
    options are static.

    Returns
    -------
    tuple
        ``(d, c)``, C ``None`` unless ``generate_c``.
    """
    from fe_runtime.jax.entry import entry

    _check_hints(mma_tiler_mn, cluster_shape_mn, vector_f32, 256, use_dynamic_sched)
    arrays = _arrays(a_tensor, padded_offsets, alpha_tensor, b_tensor, bias_tensor, b_ptrs, prob_tensor, b_major)
    options = {
        "n": n,
        "b_dtype": None if b_ptrs is None else "bfloat16",
        "b_major": "k" if b_ptrs is None else b_major,
        "acc_dtype": acc_dtype,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "generate_c": generate_c,
    }
    d, c = entry(OPERATION, arrays, options, backend)
    return d, c


def _arrays(a: Any, offsets: Any, alpha: Any, b: Any, bias: Any, b_ptrs: Any, prob: Any, b_major: Any) -> Any:
    return a, offsets, alpha, forms.weights(b, b_major), forms.by_expert(bias), b_ptrs, prob


def _check_hints(
    mma_tiler_mn: Any,
    cluster_shape_mn: Any,
    vector_f32: Any,
    m_aligned: Any,
    use_dynamic_sched: Any,
    cd_major: Any = "n",
) -> None:
    HINTS.check(
        mma_tiler_mn,
        cluster_shape_mn,
        vector_f32=vector_f32,
        m_aligned=m_aligned,
        use_dynamic_sched=use_dynamic_sched,
        cd_major=cd_major,
    )


def _c(bound: Bound) -> OutputSpec:
    return common.rows_of(bound, common.text(bound, "c_dtype"), common.columns(bound))


def _check_unused_c(bound: Bound, buffer: Any) -> None:
    check_buffer(OPERATION.contract, bound, "c_tensor", _c(bound), buffer)


CONTRACT = Contract(
    operation="grouped_gemm",
    inputs=(
        common.operand("a_tensor", "M K", common.BF16, doc="rows of all experts, one after the other"),
        common.OFFSETS,
        common.ALPHA,
        common.weights(common.BF16),
        common.BIAS,
        common.B_PTRS,
        common.prob("prob_tensor", ("float32",), "factor of each row, or of its bias; required"),
    ),
    options=(
        common.COUNT,
        common.B_DTYPE,
        common.B_MAJOR,
        common.ACCUMULATOR,
        common.stored_dtype("c_dtype", doc="dtype of C"),
        common.stored_dtype("d_dtype", doc="dtype of D"),
        Option("generate_c", bool, False, doc="whether to return C"),
    ),
    outputs=(
        Output(
            "d_tensor",
            lambda bound: common.rows_of(bound, common.text(bound, "d_dtype"), common.columns(bound)),
            doc="products times prob, or plus bias times prob",
        ),
        Output(
            "c_tensor",
            lambda bound: _c(bound) if bound.options["generate_c"] else None,
            doc="products without prob, with `generate_c`",
        ),
    ),
    rules=(
        *common.WEIGHT_MODE,
        Rule(
            "prob_tensor",
            "be given",
            holds=lambda bound: bound.has("prob_tensor"),
            given=lambda _bound: "None",
            fix="Pass ones of shape (M,) for no factor.",
        ),
        *common.EXTENTS,
        common.multiple_of(8, common.columns, "b_tensor", "N"),
    ),
    dynamic=("M",),
    errors=common.ERRORS,
    derived=common.DERIVED,
)


ROLES = {"d_tensor": "c", "c_tensor": "pre"}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors, experts and results, and for the tiles that suit N; for any rows."""
    return find_grouped(bound, target, CONTRACT.output_names, ROLES, "unfused")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.grouped.canonical:grouped_gemm",
    find_kernel=find_kernel,
    check_values=common.check_values,
    check_variable=common.CHECK_VARIABLE,
    jax_entry="fe_gemm.grouped_gemm_jax",
    stream_argument="current_stream",
)
