"""``grouped_gemm_glu``: products of groups of rows with their experts' weights, gated, bf16 or block-scaled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fe_gemm.dense.contract import sample_dtype
from fe_runtime._callers import user_stacklevel
from fe_runtime.arrays import get_device, is_jax_array, is_torch_tensor
from fe_runtime.contract import Bound, OutputSpec, Sample
from fe_runtime.errors import InvalidArgumentError, NotSupportedError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict, register_pytrees

from . import families, forms
from . import vocabulary as common
from .glu_contract import CONTRACT, check_values
from .grouped_class import GroupedAPI, Weights, check_buffer, given_outputs
from .hints import Hints
from .kernel import find_grouped

__all__ = ["OPERATION", "GroupedGemmGlu", "grouped_gemm_glu_jax", "grouped_gemm_glu_wrapper"]

NAME = "grouped_gemm_glu"
HINTS = Hints(NAME, tile_n=(64, 128, 192, 256))
SCALED_HINTS = Hints(NAME, tile_n=(128, 256), longest=4)
DISCRETE_SCALED_HINTS = Hints(NAME, tile_n=(256,), longest=4)


def grouped_gemm_glu_wrapper(
    a_tensor: Any,
    sfa_tensor: Any,
    padded_offsets: Any,
    alpha_tensor: Any,
    b_tensor: Any = None,
    sfb_tensor: Any = None,
    bias_tensor: Any = None,
    b_ptrs: Any = None,
    sfb_ptrs: Any = None,
    n: int | None = None,
    b_dtype: Any = None,
    b_major: str = "k",
    norm_const_tensor: Any = None,
    prob_tensor: Any = None,
    acc_dtype: Any = None,
    c_dtype: Any = None,
    d_dtype: Any = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    generate_c: bool = False,
    sf_fp8_dtype_override: Any = None,
    *,
    scheduler_counter_tensor: Any = None,
    outputs: Mapping[str, Any] | None = None,
    backend: str = "auto",
) -> TupleDict:
    """Multiply each row by its expert's weight, and gate: even blocks of 32 columns are gates, odd ones are gated.

    ``h = alpha[e] * sum_k A[m, k] * B_e[n, k] + bias[n, e]`` in fp32, ``C = CAST(h)``, and from h, not from C, with
    gate ``h[m, 64*(j//32) + j%32]`` and up 32 columns further ``x = act(gate, up) * prob[m]``, ``D = CAST(x)`` or
    quantised:

    * swiglu: ``up * gate*sigmoid(gate)``;
    * geglu: ``(clamp(up, glu_clamp_min, glu_clamp_max) + linear_offset) * g*sigmoid(geglu_alpha * g)`` with
      ``g = min(gate, glu_clamp_max)``;
    * situglu: ``situ_beta1*tanh(gate/situ_beta1)*sigmoid(gate) * situ_beta2*tanh(up/situ_beta2)``.

    Parameters
    ----------
    a_tensor
        (M, K) or (M, K, 1), row-major: bfloat16, float8_e4m3fn, float8_e5m2, or FP4 packed along K
        (``float4_e2m1fn_x2`` or ``uint8``, K/2 bytes). K > 0, rows of a multiple of 16 bytes. Results have the form
        of A.
    sfa_tensor
        Scales of fp8 and FP4 operands in the blocked layout over all rows: physical (1, ceil(M/128), ceil(K/V/4), 32,
        4, 4), its logical view, or the same bytes in any contiguous shape, ``V = sf_vec_size``. fp8: e8m0, V = 32; FP4:
        e8m0, V = 16 or 32, or e4m3, V = 16. ``uint8`` and ``int8`` are e8m0 bytes. bfloat16: ``None``.
    padded_offsets
        (E,) int32, 1 <= E <= 1024: the row after the last one of each expert, non-decreasing, at most M. Groups may
        have any size; with ``discrete_col_sfd`` all but the last end at multiples of 128. Never read on the host.
    alpha_tensor
        (E,) float32.
    b_tensor, sfb_tensor
        Dense weights of the dtype of A, by rows: (E, N, K) contiguous, or the legacy view (N, K, E) of it, and their
        scales, (E, ceil(N/128), ceil(K/V/4), 32, 4, 4) in any of the forms above. N > 0, a multiple of 64.
    bias_tensor
        (N, E) with strides (1, N), bfloat16, float16 or float32. JAX: (N, E).
    b_ptrs, sfb_ptrs
        Instead of them: (E,) int64 addresses of (N, K) matrices, by rows, or with ``b_major="n"`` (not FP4) by columns,
        and of each matrix's scales; see :func:`grouped_gemm_wrapper`.
    n, b_dtype
        Rows and dtype of the discrete weights; needed with ``b_ptrs``, refused without.
    b_major
        ``"k"``; ``"n"`` for discrete weights only.
    norm_const_tensor
        (1,) float32 > 0, for fp8 operands: D is quantised, along rows and along columns, in blocks of 32. Needed for an
        fp8 D; a 16-bit D is then divided by its blocks' magnitudes. E5M2 is quantised to at most 128.
    prob_tensor
        (M,) or (M, 1, 1) float32; with scales also bfloat16, or ``None`` for 1.
    acc_dtype
        float32.
    c_dtype, d_dtype
        bfloat16 (the default), float16, float32; fp8 operands: also fp8, D not float32. An fp8 C is a saturating cast
        without scales. FP4 operands: C in 16 bits.
    cd_major
        ``"n"``.
    sf_vec_size
        Elements per scale of the operands.
    discrete_col_sfd
        Column scales as one blocked layout for each expert: what :func:`grouped_gemm_wgrad_wrapper` takes.
    act_func, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2
        The activation and its factors, rounded to fp32. ``linear_offset=None``: 1 for geglu. Other activations' factors
        are ignored. New values of all but ``situ_beta1`` never compile anything.
    mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched, scheduler_counter_tensor
        Checked, without effect.
    use_single_group_runtime_offsets
        With scales and E = 1: all rows belong to the expert, whatever ``padded_offsets`` holds.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    generate_c
        Whether to return C; torch and numpy return it for scaled operands in any case.
    sf_fp8_dtype_override
        ``None``.
    outputs
        Arrays to write results into, by their keys (torch, numpy): amax is raised.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``c_tensor`` (M, N), ``d_tensor`` (M, N/2), ``d_col_tensor`` like D, ``amax_tensor`` (E, 1) float32 (scaled
        operands, 16-bit D; -inf for an expert without rows, NaN if there is one), ``sfd_row_tensor`` and
        ``sfd_col_tensor``, e8m0 scales of (M, N/2) and of (N/2, M) in the physical form (torch, A of rank 3: the
        logical view); ``None`` for what is not produced. Rows from the last offset on are unspecified.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, presence or options break the contract; on the CPU, or on a GPU under
        ``FE_CHECK_DEVICE_VALUES=1``, also malformed offsets and null addresses.
    NotSupportedError
        A C of FP4 operands that has not 16 bits; tiles of 128 columns with fp8 operands and an fp8 D, or with a bias.

    Notes
    -----
    Rows from the last offset on may hold anything. Bit-identical from run to run. Not differentiable;
    :func:`grouped_gemm_dglu_wrapper` is the backward. A NaN wins the magnitude of its block: the whole block is NaN.
    ``M % 256`` and ends of groups at multiples of 256, which the peer asks for, are not needed.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: grouped GEMM with GLU.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a, b = np.ones((3, 8), ml_dtypes.bfloat16), np.ones((2, 64, 8), ml_dtypes.bfloat16)
    >>> one, prob = np.ones(2, np.float32), np.ones(3, np.float32)
    >>> result = grouped_gemm_glu_wrapper(a, None, np.array([1, 3], np.int32), one, b, prob_tensor=prob)
    >>> result["d_tensor"].shape, float(result["d_tensor"][0, 0]), result["c_tensor"]
    ((3, 32), 64.0, None)
    """
    families.scale_controls(NAME, sf_fp8_dtype_override)
    scaled = _is_scaled(a_tensor)
    _check_hints(
        mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched, cd_major,
        scaled=scaled, discrete=b_tensor is None, fp8=_is_fp8(a_tensor, d_dtype), bias=bias_tensor is not None,
    )  # fmt: skip
    if scheduler_counter_tensor is not None:
        is_used = scaled and b_tensor is not None and use_dynamic_sched is True
        _check_counter(scheduler_counter_tensor, is_used, a_tensor)
    arrays = _arrays(
        a_tensor, sfa_tensor, padded_offsets, alpha_tensor, b_tensor, sfb_tensor, bias_tensor, b_ptrs, sfb_ptrs,
        norm_const_tensor, prob_tensor, b_major, sf_vec_size,
    )  # fmt: skip
    always = scaled and (is_torch_tensor(a_tensor) or not is_jax_array(a_tensor))
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "acc_dtype": acc_dtype,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "sf_vec_size": sf_vec_size,
        "discrete_col_sfd": discrete_col_sfd,
        "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
        "act_func": act_func,
        **families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2),
        "generate_c": True if always and generate_c is False else generate_c,
    }
    if discrete_col_sfd is True and scaled and norm_const_tensor is None:
        _warn_unused_layout()
    if outputs is None:
        return OPERATION(arrays, options, stream=current_stream, backend=backend)
    given = given_outputs(CONTRACT, outputs, {})
    made = OPERATION.outputs_into(arrays, given, options, stream=current_stream, backend=backend)
    register_pytrees()
    return TupleDict.of(OPERATION.output_names, made)


grouped_gemm_glu_wrapper.supports_canonical_layouts = True  # type: ignore[attr-defined]
grouped_gemm_glu_wrapper.supports_bf16_canonical_layouts = True  # type: ignore[attr-defined]
grouped_gemm_glu_wrapper.supports_external_scheduler_counter = True  # type: ignore[attr-defined]


class GroupedGemmGlu(GroupedAPI):
    """Gated grouped product into the caller's outputs; see :func:`grouped_gemm_glu_wrapper`.

    Dtypes of C and D are those of the samples; D is quantised with ``sample_norm_const``, which needs ``sample_d_col``,
    ``sample_sfd_row`` and ``sample_sfd_col``. Weights: ``sample_b``, or ``num_experts``, ``b_shape=(N, K)`` and
    ``b_dtype`` for ``b_ptrs``. ``c_tensor`` is a required buffer, written for scaled operands or with ``generate_c``.
    ``execute`` raises the maxima that ``amax_tensor`` holds: preset it. M may change between executions.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_c: Any,
        sample_d: Any,
        sample_sfa: Any,
        sample_padded_offsets: Any,
        sample_alpha: Any,
        sample_d_col: Any,
        sample_b: Any = None,
        sample_sfb: Any = None,
        sample_bias: Any = None,
        num_experts: int | None = None,
        b_shape: tuple[int, ...] | None = None,
        b_dtype: Any = None,
        sample_sfd_row: Any = None,
        sample_sfd_col: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        sample_prob: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: Any = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "swiglu",
        situ_beta1: float = 4.0,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        generate_c: bool = False,
        *,
        sample_scheduler_counter: Any = None,
        backend: str = "auto",
    ) -> None:
        self._scaled = _is_scaled(sample_a)
        self._override = sf_fp8_dtype_override
        self._hints = mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned, use_dynamic_sched
        self._counter = sample_scheduler_counter is not None, use_dynamic_sched is True
        self._has_bias = sample_bias is not None
        self._is_quantised = sample_norm_const is not None
        self._vec, self._situ = sf_vec_size, (act_func == "situglu", situ_beta1)
        self._writes_c = generate_c if generate_c is not False else self._scaled
        self._sample_c = None if sample_c is None else Sample.of(NAME, "c_tensor", sample_c)
        weights = Weights(NAME, sample_b, num_experts, b_shape, b_dtype, b_major, sample_a)
        options = {
            **weights.options,
            "acc_dtype": acc_dtype,
            "c_dtype": sample_dtype(sample_c, "bfloat16"),
            "d_dtype": sample_dtype(sample_d, "bfloat16"),
            "sf_vec_size": sf_vec_size,
            "discrete_col_sfd": discrete_col_sfd,
            "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
            "act_func": act_func,
            "situ_beta1": situ_beta1,
            "generate_c": self._writes_c,
            "with_amax": sample_amax is not None,
        }
        sfa, sfb = families.scales(sample_a, weights.dense, sample_sfa, sample_sfb, sf_vec_size)
        table = weights.table()
        inputs = (
            sample_a, sfa, sample_padded_offsets, sample_alpha, weights.dense, sfb, forms.by_expert(sample_bias), table,
            table if self._scaled else None, sample_norm_const, sample_prob,
        )  # fmt: skip
        outputs = self._outputs_of(sample_c, sample_d, sample_d_col, sample_amax, sample_sfd_row, sample_sfd_col)
        super().__init__(OPERATION, weights, inputs, outputs, options, backend)

    def execute(
        self,
        a_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        sfa_tensor: Any,
        padded_offsets: Any,
        alpha_tensor: Any,
        b_tensor: Any = None,
        sfb_tensor: Any = None,
        bias_tensor: Any = None,
        b_ptrs: Any = None,
        sfb_ptrs: Any = None,
        d_col_tensor: Any = None,
        sfd_row_tensor: Any = None,
        sfd_col_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        prob_tensor: Any = None,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        situ_beta1: float = 4.0,
        situ_beta2: float = 25.0,
        current_stream: Any = None,
        *,
        scheduler_counter_tensor: Any = None,
    ) -> None:
        """Write the results into the caller's outputs; no synchronisation.

        ``situ_beta1``: for situglu, the constructor's value.
        """
        self._check_call(situ_beta1, scheduler_counter_tensor, a_tensor)
        b = self._weights.live(b_tensor)
        sfa, sfb = families.scales(a_tensor, b, sfa_tensor, sfb_tensor, self._vec)
        inputs = (
            a_tensor, sfa, padded_offsets, alpha_tensor, b, sfb, forms.by_expert(bias_tensor), b_ptrs, sfb_ptrs,
            norm_const_tensor, prob_tensor,
        )  # fmt: skip
        outputs = self._outputs_of(c_tensor, d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor)
        factors = families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2)
        del factors["situ_beta1"]
        self._execute(inputs, outputs, current_stream, factors)

    def _outputs_of(self, c: Any, d: Any, d_col: Any, amax: Any, row: Any, col: Any) -> tuple[Any, ...]:
        """Return the operation's outputs among the buffers: without scales D_col is not written."""
        return c if self._writes_c else None, d, d_col if self._is_quantised else None, amax, row, col

    def _check_call(self, situ_beta1: Any, counter: Any, a: Any) -> None:
        is_situ, beta = self._situ
        if is_situ and situ_beta1 != beta:
            rule, fix = f"be the constructor's ({beta})", "It is part of the compiled code."
            raise InvalidArgumentError(explain(NAME, "situ_beta1", rule, situ_beta1, fix))
        sampled, _ = self._counter
        if (counter is not None) != sampled:
            rule = f"be {'given' if sampled else 'None'} as its sample was"
            given = "None" if counter is None else "an array"
            raise InvalidArgumentError(explain(NAME, "scheduler_counter_tensor", rule, given, "Pass both or neither."))
        if counter is not None:
            _check_counter(counter, True, a)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        del plan
        families.scale_controls(NAME, self._override)
        dtype = common.text(bound, "d_dtype")
        fp8 = families.has_fp8(bound) and dtype.startswith("float8")
        discrete = not bound.has("b_tensor")
        _check_hints(*self._hints, scaled=self._scaled, discrete=discrete, fp8=fp8, bias=self._has_bias)
        self._weights.check_depth(bound)
        sampled, dynamic = self._counter
        if sampled and not (self._scaled and not discrete and dynamic):
            raise _unused_counter("an array")
        if not self._writes_c:
            check_buffer(CONTRACT, bound, "c_tensor", _c(bound), self._sample_c)


def grouped_gemm_glu_jax(
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
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    generate_c: bool = False,
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
    bias_tensor: Any = None,
    b_major: str = "k",
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    backend: str = "auto",
) -> Any:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, forms, dtypes and errors as :func:`grouped_gemm_glu_wrapper`. Weights behind ``b_ptrs`` have the dtype
    of A; ``sf_vec_size`` counts for scaled operands only; ``bias_tensor`` (N, E) is copied. All options are static.

    Returns
    -------
    TupleDict or tuple
        The wrapper's results, C with ``generate_c`` only; with ``b_ptrs`` and bfloat16 operands ``(d, c)``.
    """
    from fe_runtime.jax.entry import entry

    scaled = _is_scaled(a_tensor)
    fp8, has_bias = _is_fp8(a_tensor, d_dtype), bias_tensor is not None
    hints = (mma_tiler_mn, cluster_shape_mn, vector_f32, 256, use_dynamic_sched)
    _check_hints(*hints, scaled=scaled, discrete=b_tensor is None, fp8=fp8, bias=has_bias)
    vec = sf_vec_size if scaled else 16
    arrays = _arrays(
        a_tensor, sfa_tensor, padded_offsets, alpha_tensor, b_tensor, sfb_tensor, bias_tensor, b_ptrs, sfb_ptrs,
        norm_const_tensor, prob_tensor, b_major, vec,
    )  # fmt: skip
    options = {
        "n": n,
        "b_dtype": None if b_ptrs is None else forms.dtype_name(a_tensor),
        "b_major": b_major,
        "acc_dtype": acc_dtype,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "sf_vec_size": vec,
        "discrete_col_sfd": discrete_col_sfd,
        "act_func": act_func,
        **families.factors(linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min, situ_beta1, situ_beta2),
        "generate_c": generate_c,
    }
    outputs = entry(OPERATION, arrays, options, backend)
    if b_ptrs is not None and not scaled:
        return outputs[1], outputs[0]
    register_pytrees()
    return TupleDict.of(OPERATION.output_names, tuple(outputs))


def _arrays(
    a: Any, sfa: Any, offsets: Any, alpha: Any, b: Any, sfb: Any, bias: Any, b_ptrs: Any, sfb_ptrs: Any, norm: Any,
    prob: Any, b_major: Any, vec: Any,
) -> tuple[Any, ...]:  # fmt: skip
    b = forms.weights(b, b_major)
    sfa, sfb = families.scales(a, b, sfa, sfb, vec)
    return a, sfa, offsets, alpha, b, sfb, forms.by_expert(bias), b_ptrs, sfb_ptrs, norm, prob


def _is_scaled(a: Any) -> bool:
    return forms.dtype_name(a) != "bfloat16"


def _is_fp8(a: Any, d_dtype: Any) -> bool:
    """Whether A and D are fp8."""
    return forms.dtype_name(a).startswith("float8") and "float8" in str(getattr(d_dtype, "__name__", d_dtype))


def _check_hints(
    tile: Any,
    cluster: Any,
    vector_f32: Any,
    m_aligned: Any,
    use_dynamic_sched: Any,
    cd_major: Any = "n",
    *,
    scaled: bool,
    discrete: bool,
    fp8: bool,
    bias: bool,
) -> None:
    hints = HINTS if not scaled else DISCRETE_SCALED_HINTS if discrete else SCALED_HINTS
    hints.check(
        tile,
        cluster,
        vector_f32=vector_f32,
        m_aligned=m_aligned,
        use_dynamic_sched=use_dynamic_sched,
        cd_major=cd_major,
    )
    if scaled and tile[1] == 128 and (fp8 or bias):
        rule = "have 256 columns with fp8 operands and an fp8 D, and with a bias"
        reason = f"tiles of 128 columns {'with a bias' if bias else 'with fp8 operands and an fp8 D'}"
        raise NotSupportedError(explain(NAME, "mma_tiler_mn", rule, repr(tile), "Leave it out."), reason=reason)


def _check_counter(counter: Any, is_used: bool, a: Any) -> None:
    """Raise unless a scheduler's counter is one, in a call that may have one. Nothing needs it."""
    if not is_used:
        raise _unused_counter("an array")
    desc = Sample.of(NAME, "scheduler_counter_tensor", counter).desc
    if desc.dtype != "int32" or desc.ndim != 1 or not desc.numel() or not desc.is_contiguous():
        rule = "be a contiguous int32 vector with elements"
        given = f"{desc.dtype} of shape {tuple(desc.shape)}"
        raise InvalidArgumentError(explain(NAME, "scheduler_counter_tensor", rule, given, "Leave it out."))
    if is_torch_tensor(a) and get_device(a) != desc.device:
        rule = f"be on the device of a_tensor ({get_device(a)})"
        raise InvalidArgumentError(explain(NAME, "scheduler_counter_tensor", rule, desc.device, "Leave it out."))


def _unused_counter(given: object) -> InvalidArgumentError:
    rule = "be None but for dense scaled weights with use_dynamic_sched=True"
    return InvalidArgumentError(explain(NAME, "scheduler_counter_tensor", rule, given, "Leave it out."))


def _warn_unused_layout() -> None:
    text = f"{NAME}: discrete_col_sfd has no effect: D is not quantised without norm_const_tensor."
    warnings.warn(text, UserWarning, stacklevel=user_stacklevel())


def _c(bound: Bound) -> OutputSpec:
    return common.rows_of(bound, common.text(bound, "c_dtype"), common.columns(bound))


ROLES = {"c_tensor": "pre", "d_tensor": "c"}
"""What the arrays are to the epilogue."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors, experts and results, and for the tiles that suit N; for any rows."""
    return find_grouped(bound, target, CONTRACT.output_names, ROLES, "glu")


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.grouped.canonical:grouped_gemm_glu",
    find_kernel=find_kernel,
    check_values=check_values,
    check_variable=common.CHECK_VARIABLE,
    jax_entry="fe_gemm.grouped_gemm_glu_jax",
    stream_argument="current_stream",
)
