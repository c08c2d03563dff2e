"""``grouped_gemm_dglu``: gradients through the second layer's weights and the gated activation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fe_gemm.dense.contract import sample_dtype
from fe_runtime import workspace as memory
from fe_runtime._callers import user_stacklevel
from fe_runtime.arrays import is_jax_array, is_torch_tensor
from fe_runtime.contract import Bound
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict, register_pytrees

from . import families, forms
from . import vocabulary as common
from .dglu_contract import CONTRACT, check_values
from .grouped_class import GroupedAPI, Weights, given_outputs
from .hints import Hints
from .kernel import find_grouped

__all__ = ["OPERATION", "GroupedGemmDglu", "grouped_gemm_dglu_jax", "grouped_gemm_dglu_wrapper"]

NAME = "grouped_gemm_dglu"
HINTS = Hints(NAME, tile_n=tuple(range(32, 257, 32)))
SCALED_HINTS = Hints(NAME, tile_n=(256,), longest=4)
KEYS = CONTRACT.output_names[:7]
IDENTITY = (None, "none", "identity")
WITHOUT_EFFECT = ("relu", "srelu")
"""Values of ``epilogue_op`` that the peer takes and never applies."""


def grouped_gemm_dglu_wrapper(
    a_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    prob_tensor: Any,
    dprob_tensor: Any,
    b_tensor: Any = None,
    sfb_tensor: Any = None,
    generate_dbias: bool = False,
    b_ptrs: Any = None,
    sfb_ptrs: Any = None,
    n: int | None = None,
    b_dtype: Any = None,
    b_major: str = "k",
    norm_const_tensor: Any = None,
    acc_dtype: Any = None,
    d_dtype: Any = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Any = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    round_dgrad_to_input_dtype: bool = False,
    activation_tensor: Any = None,
    deterministic: bool | None = False,
    *,
    outputs: Mapping[str, Any] | None = None,
    backend: str = "auto",
) -> TupleDict:
    """Multiply gradients by the second layer's weights, and carry them back through the gated activation.

    ``R = alpha[e]^2 * sum_k A[m, k] * B_e[n, k]`` in fp32; gate and up are ``beta[e] * C`` in even and odd blocks of 32
    columns, and ``act`` is that of :func:`grouped_gemm_glu_wrapper`. ``dgate = R*prob * d act/d gate``,
    ``dup = R*prob * d act/d up``, interleaved in D; ``dprob[m] += sum_n R*act``; ``dbias[e] = sum over the rows of e of
    (dgate, dup)``. Beyond a clamp the gradient is 0.

    Parameters
    ----------
    a_tensor, sfa_tensor
        (M, K) or (M, K, 1), gradients of the second layer's results, and their scales, as in
        :func:`grouped_gemm_glu_wrapper`.
    c_tensor
        (M, 2N) or (M, 2N, 1), row-major, the C of the forward: bfloat16, float16, float32; with scales also fp8.
    padded_offsets
        (E,) int32; see :func:`grouped_gemm_glu_wrapper`.
    alpha_tensor, beta_tensor
        (E,) float32. alpha counts squared. Without effect for dgeglu of scaled operands: beta.
    prob_tensor
        (M,) or (M, 1, 1) float32; with scales also bfloat16, or ``None`` for 1.
    dprob_tensor
        (M,) or (M, 1, 1) float32, to which the sums are added (torch, numpy), or with scales ``None``. JAX: ``None``,
        see :func:`grouped_gemm_dglu_jax`.
    b_tensor, sfb_tensor, b_ptrs, sfb_ptrs, n, b_dtype, b_major
        The weights, N rows of one branch each, N a multiple of 32, dense or discrete; see
        :func:`grouped_gemm_glu_wrapper`. Dense weights that are not FP4 may also be (E, K, N) with ``b_major="n"``,
        or a legacy view (N, K, E) of that.
    generate_dbias
        Whether to return dbias.
    norm_const_tensor
        (1,) float32 > 0, needed for an fp8 D, which is quantised along rows and along columns in blocks of 32.
    acc_dtype
        float32.
    d_dtype
        bfloat16 (the default), float16 or float32; fp8 operands: float8_e4m3fn, float8_e5m2 or 16 bits, a plain cast.
    cd_major, mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched
        Checked, without effect.
    sf_vec_size, sf_fp8_dtype_override, discrete_col_sfd, use_single_group_runtime_offsets
        As in :func:`grouped_gemm_glu_wrapper`.
    act_func, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2
        ``"dswiglu"``, ``"dgeglu"`` or ``"dsituglu"``, and the factors of the forward.
    epilogue_op
        ``None``, ``"none"`` or ``"identity"``; ``"relu"`` and ``"srelu"`` are taken for scaled operands and, as by the
        peer, not applied.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    round_dgrad_to_input_dtype
        bfloat16 operands: round R to bfloat16 before everything else.
    activation_tensor
        (M, N) or (M, N, 1) bfloat16 in the form of A, to write ``act * prob`` into: bfloat16 operands, C and D, dgeglu.
    deterministic
        Without effect: results always have the same bits.
    outputs
        Arrays to write other results into, by their keys (torch, numpy): dbias is added to, amax raised.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``d_row_tensor`` (M, 2N) in the form of A; ``d_col_tensor`` like it, ``sfd_row_tensor`` and ``sfd_col_tensor``
        for a quantised D; ``dprob_tensor``, the given one; ``dbias_tensor`` (E, 2N, 1) bfloat16; ``amax_tensor``
        (E, 2, 1) float32, the largest ``|dgate|`` and ``|dup|`` (scaled operands, 16-bit D); ``activation_tensor`` only
        if one was given. ``None`` for what is not produced. Rows from the last offset on are unspecified, in dprob as
        they were.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, presence or options break the contract; on the CPU, or on a GPU under
        ``FE_CHECK_DEVICE_VALUES=1``, also malformed offsets and null addresses.

    Notes
    -----
    Rows from the last offset on may hold anything. dbias is summed in fp32 and rounded once. Bit-identical from run to
    run. Not differentiable. ``M % 256`` and ends of groups at multiples of 256, which the peer asks for, are not
    needed.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: backward of grouped GEMM with GLU.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a, b = np.ones((3, 8), ml_dtypes.bfloat16), np.ones((2, 32, 8), ml_dtypes.bfloat16)
    >>> c, one, prob = np.zeros((3, 64), ml_dtypes.bfloat16), np.ones(2, np.float32), np.ones(3, np.float32)
    >>> off, dprob = np.array([1, 3], np.int32), np.zeros(3, np.float32)
    >>> result = grouped_gemm_dglu_wrapper(a, c, None, off, one, one, prob, dprob, b)
    >>> result["d_row_tensor"].shape, result["dprob_tensor"] is dprob
    ((3, 64), True)
    """
    families.scale_controls(NAME, sf_fp8_dtype_override)
    _check_flag(deterministic)
    _check_epilogue(epilogue_op, _is_scaled(a_tensor))
    hints = mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched, cd_major
    _check_hints(*hints, scaled=_is_scaled(a_tensor), c=c_tensor)
    arrays = _arrays(
        a_tensor, c_tensor, sfa_tensor, padded_offsets, alpha_tensor, beta_tensor, prob_tensor, b_tensor, sfb_tensor,
        b_ptrs, sfb_ptrs, norm_const_tensor, b_major, sf_vec_size,
    )  # fmt: skip
    in_jax = not is_torch_tensor(a_tensor) and is_jax_array(a_tensor)
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": forms.dense_major(b_tensor, b_major),
        "acc_dtype": acc_dtype,
        "d_dtype": d_dtype,
        "sf_vec_size": sf_vec_size,
        "discrete_col_sfd": discrete_col_sfd,
        "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
        "act_func": act_func,
        **families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2),
        "generate_dbias": generate_dbias,
        "round_dgrad_to_input_dtype": round_dgrad_to_input_dtype,
        "with_dprob": dprob_tensor is not None or in_jax,
        "with_activation": activation_tensor is not None,
    }
    own = {"dprob_tensor": dprob_tensor, "activation_tensor": activation_tensor}
    given = given_outputs(CONTRACT, outputs, own)
    made = OPERATION.outputs_into(arrays, given, options, stream=current_stream, backend=backend)
    register_pytrees()
    names = CONTRACT.output_names if activation_tensor is not None else KEYS
    return TupleDict.of(names, made[: len(names)])


grouped_gemm_dglu_wrapper.supports_canonical_layouts = True  # type: ignore[attr-defined]
grouped_gemm_dglu_wrapper.supports_bf16_canonical_layouts = True  # type: ignore[attr-defined]


class GroupedGemmDglu(GroupedAPI):
    """Gradients through the gated activation into the caller's outputs; see :func:`grouped_gemm_dglu_wrapper`.

    The dtype of D is that of its sample; a quantised D needs ``sample_d_col``, ``sample_sfd_row``, ``sample_sfd_col``
    and ``sample_norm_const``. ``execute`` adds to what dprob and dbias hold and raises the maxima in ``amax_tensor``:
    preset them. M may change between executions.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_c: Any,
        sample_d_row: Any,
        sample_d_col: Any,
        sample_sfa: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_beta: Any,
        sample_prob: Any,
        sample_dprob: Any,
        sample_b: Any = None,
        sample_sfb: Any = None,
        sample_dbias: Any = None,
        num_experts: int | None = None,
        b_shape: tuple[int, ...] | None = None,
        b_dtype: Any = None,
        sample_sfd_row: Any = None,
        sample_sfd_col: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: Any = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "dswiglu",
        b_major: str = "k",
        epilogue_op: str | None = None,
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        situ_beta1: float = 4.0,
        situ_beta2: float = 25.0,
        round_dgrad_to_input_dtype: bool = False,
        sample_activation: Any = None,
        _deterministic: bool | None = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._scaled = _is_scaled(sample_a)
        self._override, self._epilogue, self._flag = sf_fp8_dtype_override, epilogue_op, _deterministic
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched
        self._vec, self._sample_c = sf_vec_size, sample_c
        d_dtype = sample_dtype(sample_d_row, "bfloat16")
        a_dtype = sample_dtype(sample_a, "bfloat16")
        self._is_quantised = a_dtype.startswith("float8") and d_dtype.startswith("float8")
        self._scales = sample_sfd_row, sample_sfd_col, sample_norm_const
        weights = Weights(NAME, sample_b, num_experts, b_shape, b_dtype, b_major, sample_a)
        options = {
            **weights.options,
            "acc_dtype": acc_dtype,
            "d_dtype": d_dtype,
            "sf_vec_size": sf_vec_size,
            "discrete_col_sfd": discrete_col_sfd,
            "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
            "act_func": act_func,
            **families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2),
            "generate_dbias": sample_dbias is not None,
            "round_dgrad_to_input_dtype": round_dgrad_to_input_dtype,
            "with_dprob": sample_dprob is not None,
            "with_activation": sample_activation is not None,
            "with_amax": sample_amax is not None,
        }
        norm, row, col = self._quantiser(sample_norm_const, sample_sfd_row, sample_sfd_col)
        sfa, sfb = families.scales(sample_a, weights.dense, sample_sfa, sample_sfb, sf_vec_size)
        table = weights.table()
        inputs = (
            sample_a, sample_c, sfa, sample_padded_offsets, sample_alpha, sample_beta, sample_prob, weights.dense, sfb,
            table, table if self._scaled else None, norm,
        )  # fmt: skip
        d_col = sample_d_col if self._is_quantised else None
        outputs = (sample_d_row, d_col, sample_dprob, sample_dbias, sample_amax, row, col, sample_activation)
        super().__init__(OPERATION, weights, inputs, outputs, options, backend)

    def execute(
        self,
        a_tensor: Any,
        c_tensor: Any,
        d_row_tensor: Any,
        d_col_tensor: Any,
        sfa_tensor: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        beta_tensor: Any,
        prob_tensor: Any,
        dprob_tensor: Any,
        b_tensor: Any = None,
        sfb_tensor: Any = None,
        dbias_tensor: Any = None,
        b_ptrs: Any = None,
        sfb_ptrs: Any = None,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        current_stream: Any = None,
        activation_tensor: Any = None,
        *,
        workspace: Any = None,
        factors: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write the results into the caller's outputs; no synchronisation.

        ``workspace``: a contiguous uint8 vector of ``scratch_workspace_bytes()`` that overlaps no operand; without one
        the framework's allocator provides what is needed. ``factors``: factors of the activation by name, but
        ``situ_beta1``, for this execution in place of the constructor's.
        """
        b = self._weights.live(b_tensor)
        sfa, sfb = families.scales(a_tensor, b, sfa_tensor, sfb_tensor, self._vec)
        norm, row, col = self._quantiser(norm_const_tensor, sfd_row_tensor, sfd_col_tensor)
        inputs = (
            a_tensor, c_tensor, sfa, padded_offsets, alpha_tensor, beta_tensor, prob_tensor, b, sfb, b_ptrs, sfb_ptrs,
            norm,
        )  # fmt: skip
        d_col = d_col_tensor if self._is_quantised else None
        outputs = (d_row_tensor, d_col, dprob_tensor, dbias_tensor, amax_tensor, row, col, activation_tensor)
        if workspace is not None:
            self._check_workspace(workspace, (*inputs, *outputs))
        self._execute(inputs, outputs, current_stream, factors)

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of the workspace of ``execute``: positive, a multiple of 128."""
        bound, plan = self._check()
        kernel = plan.kernel or OPERATION.find_kernel(bound, HOPPER)
        needed = memory.size(kernel.form.scratch) if isinstance(kernel, Kernel) else 0
        return max(128, -(-needed // 128) * 128)

    def _check_workspace(self, workspace: Any, operands: tuple[Any, ...]) -> None:
        memory.check(NAME, workspace, self.scratch_workspace_bytes(), self._check()[0])
        names = (*CONTRACT.input_names, *CONTRACT.output_names)
        memory.check_apart(NAME, workspace, zip(names, operands, strict=True))

    def _quantiser(self, norm: Any, row: Any, col: Any) -> tuple[Any, Any, Any]:
        """Return what belongs to a quantised D; a complete set has no effect on another D."""
        complete = all(x is not None for x in (norm, row, col))
        return (None, None, None) if complete and not self._is_quantised else (norm, row, col)

    def _check(self) -> Any:
        if self._checked is None:
            self._check_scales()
        return super()._check()

    def _check_scales(self) -> None:
        given = [x is not None for x in self._scales]
        if any(given) and not all(given):
            rule = "be given with sample_sfd_col and sample_norm_const, or none of them"
            raise InvalidArgumentError(explain(NAME, "sample_sfd_row", rule, f"{sum(given)} of 3", "Pass all or none."))
        if all(given) and not self._is_quantised:
            text = f"{NAME}: scales and norm_const have no effect: D is not quantised."
            warnings.warn(text, UserWarning, stacklevel=user_stacklevel())

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        del plan
        families.scale_controls(NAME, self._override)
        _check_flag(self._flag)
        _check_epilogue(self._epilogue, self._scaled)
        _check_hints(*self._hints, scaled=self._scaled, c=self._sample_c)
        self._weights.check_depth(bound)


def grouped_gemm_dglu_jax(
    a_tensor: Any,
    c_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    beta_tensor: Any,
    b_ptrs: Any = None,
    n: int | None = None,
    prob_tensor: Any = None,
    d_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    vector_f32: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    generate_dbias: bool = False,
    use_dynamic_sched: bool = False,
    *,
    b_tensor: Any = None,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    norm_const_tensor: Any = None,
    discrete_col_sfd: bool = False,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    sf_vec_size: int = 32,
    sfb_ptrs: Any = None,
    b_major: str = "k",
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    round_dgrad_to_input_dtype: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, forms, dtypes and errors as :func:`grouped_gemm_dglu_wrapper`; dprob is always summed, from 0, and its
    tail is 0. Weights behind ``b_ptrs`` have the dtype of A; ``sf_vec_size`` counts for scaled operands only.
    ``deterministic`` has no effect: results always have the same bits. All options are static.

    Returns
    -------
    TupleDict or tuple
        The wrapper's results; with ``b_ptrs`` and bfloat16 operands ``(d_row, dprob, dbias)``, rows from the last
        offset on 0.
    """
    from fe_runtime.jax.entry import entry

    _check_flag(deterministic)
    scaled = _is_scaled(a_tensor)
    _check_hints(mma_tiler_mn, cluster_shape_mn, vector_f32, 256, use_dynamic_sched, scaled=scaled, c=c_tensor)
    vec = sf_vec_size if scaled else 16
    arrays = _arrays(
        a_tensor, c_tensor, sfa_tensor, padded_offsets, alpha_tensor, beta_tensor, prob_tensor, b_tensor, sfb_tensor,
        b_ptrs, sfb_ptrs, norm_const_tensor, b_major, vec,
    )  # fmt: skip
    options = {
        "n": n,
        "b_dtype": None if b_ptrs is None else forms.dtype_name(a_tensor),
        "b_major": "k" if b_ptrs is None else b_major,
        "acc_dtype": acc_dtype,
        "d_dtype": d_dtype,
        "sf_vec_size": vec,
        "discrete_col_sfd": discrete_col_sfd,
        "act_func": act_func,
        **families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2),
        "generate_dbias": generate_dbias,
        "round_dgrad_to_input_dtype": round_dgrad_to_input_dtype,
        "with_dprob": True,
    }
    outputs = entry(OPERATION, arrays, options, backend)
    if b_ptrs is not None and not scaled:
        return forms.without_tail(outputs[0], padded_offsets), outputs[2], outputs[3]
    register_pytrees()
    return TupleDict.of(KEYS, tuple(outputs[:7]))


def _arrays(
    a: Any, c: Any, sfa: Any, offsets: Any, alpha: Any, beta: Any, prob: Any, b: Any, sfb: Any, b_ptrs: Any,
    sfb_ptrs: Any, norm: Any, b_major: Any, vec: Any,
) -> tuple[Any, ...]:  # fmt: skip
    b = forms.weights(b, b_major)
    sfa, sfb = families.scales(a, b, sfa, sfb, vec)
    return a, c, sfa, offsets, alpha, beta, prob, b, sfb, b_ptrs, sfb_ptrs, norm


def _is_scaled(a: Any) -> bool:
    return forms.dtype_name(a) != "bfloat16"


def _check_flag(deterministic: Any) -> None:
    if deterministic is not None and not isinstance(deterministic, bool):
        given = type(deterministic).__name__
        raise TypeError(explain(NAME, "deterministic", "be a Python bool or None", given, "Leave it out."))


def _check_epilogue(epilogue: Any, scaled: bool) -> None:
    if epilogue in IDENTITY:
        return
    if scaled and epilogue in WITHOUT_EFFECT:
        families.warn_epilogue(NAME, epilogue)
        return
    rule = 'be None, "none" or "identity"' + (', "relu" or "srelu"' if scaled else "")
    raise InvalidArgumentError(explain(NAME, "epilogue_op", rule, repr(epilogue), "Leave it out."))


def _check_hints(
    tile: Any,
    cluster: Any,
    vector_f32: Any,
    m_aligned: Any,
    use_dynamic_sched: Any,
    cd_major: Any = "n",
    *,
    scaled: bool,
    c: Any,
) -> None:
    (SCALED_HINTS if scaled else HINTS).check(
        tile,
        cluster,
        vector_f32=vector_f32,
        m_aligned=m_aligned,
        use_dynamic_sched=use_dynamic_sched,
        cd_major=cd_major,
    )
    if vector_f32 and forms.dtype_name(c).startswith("float8"):
        raise InvalidArgumentError(explain(NAME, "vector_f32", "be False for an fp8 C", True, "Leave it out."))


ROLES = {
    "c_tensor": "upstream",
    "d_row_tensor": "c",
    "dprob_tensor": "dprob",
    "dbias_tensor": "dbias",
    "activation_tensor": "act",
}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors, experts and results, and for the tiles that suit N; for any rows."""
    return find_grouped(bound, target, CONTRACT.output_names, ROLES, "dglu")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.grouped.canonical:grouped_gemm_dglu",
    find_kernel=find_kernel,
    check_values=check_values,
    check_variable=common.CHECK_VARIABLE,
    jax_entry="fe_gemm.grouped_gemm_dglu_jax",
    stream_argument="current_stream",
)
