"""``grouped_gemm_wgrad``: gradients of the experts' weights, sums over each expert's tokens."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import numpy as np

from fe_gemm.dense.contract import sample_dtype
from fe_runtime import workspace as memory
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import get_data_ptr, is_torch_tensor
from fe_runtime.contract import Bound, Sample
from fe_runtime.errors import InvalidArgumentError, NotSupportedError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict, register_pytrees

from . import forms
from . import vocabulary as common
from .grouped_class import address_table
from .hints import Hints
from .wgrad_contract import CONTRACT, check_values
from .wgrad_kernel import find_wgrad

__all__ = [
    "OPERATION",
    "GroupedGemmWgrad",
    "WGradInputOrder",
    "get_grouped_gemm_wgrad_workspace_size",
    "grouped_gemm_wgrad_jax",
    "grouped_gemm_wgrad_wrapper",
]

NAME = "grouped_gemm_wgrad"
HINTS = Hints(NAME, tile_n=(64, 128, 192, 256), spans=False)
SCALED_HINTS = Hints(NAME, tile_n=(128, 256), spans=False)
MODES = ("dense", "discrete")
PHYSICAL = (5, 2, 4, 0, 1, 3)
"""The order in which the dimensions of the logical view of scales are those of the physical form."""
DESCRIPTORS = {"dense": 4, "discrete": 5}
"""Descriptors of 128 bytes for each expert in the peer's workspace."""


class WGradInputOrder(enum.StrEnum):
    """How the tokens of A and B lie in memory where they are side by side."""

    Tensor2D = "tensor2d"
    TensorRagged = "tensor_ragged"


def grouped_gemm_wgrad_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    offsets_tensor: Any,
    output_mode: str = "dense",
    wgrad_tensor: Any = None,
    wgrad_ptrs: Any = None,
    global_scale_a: Any = None,
    global_scale_b: Any = None,
    acc_dtype: Any = None,
    wgrad_dtype: Any = None,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Any = None,
    accumulate_on_output: bool = False,
    input_order: WGradInputOrder | str = WGradInputOrder.Tensor2D,
    current_stream: Any = None,
    *,
    descriptor_workspace: Any = None,
    backend: str = "auto",
) -> TupleDict:
    """Sum the outer products of A's and B's tokens over the tokens of each expert.

    ``W[e, i, j] = s[e] * sum_t A[i, t] * B[t, j]`` in fp32 over ``offsets[e-1] <= t < offsets[e]``, with
    ``s = global_scale_a * global_scale_b`` or 1; ``CAST(W)``, or with ``accumulate_on_output`` ``CAST(old + CAST(W))``.
    An expert without tokens gets exactly 0, or keeps what is there.

    Parameters
    ----------
    a_tensor
        (M, T), contiguous along T or along M (a transposed view of a token-major tensor): bfloat16, float8_e4m3fn,
        float8_e5m2, or FP4 packed along T (``float4_e2m1fn_x2`` or ``uint8``, (M, T/2), contiguous along T). M > 0.
    b_tensor
        (T, N), dtype of A, contiguous along N or along T; FP4 as the view (T/2, N) of an (N, T/2) buffer, in JAX that
        buffer. N > 0. The contiguous extent of A, of B and of a result's rows is a multiple of 16 bytes.
    sfa_tensor, sfb_tensor
        Scales of fp8 and FP4 operands along T, one blocked layout for each expert: what ``discrete_col_sfd=True`` of
        the GLU operations returns, or the same bytes in order in any contiguous shape: 128 ceil(M/128) times
        4 ceil(ceil(T/V)/4) with ``V = sf_vec_size``.
        Formats as in :func:`fe_gemm.gemm_amax_wrapper`; ``uint8`` and ``int8`` are e8m0 bytes. bfloat16: ``None``.
    offsets_tensor
        (E,) int32, 1 <= E <= 1024: the token after the last one of each expert, non-decreasing, at most T. bfloat16:
        groups of any size, but on a GPU, where A or B is contiguous along T, they begin at multiples of 8 (else the
        expert's gradient is NaN); with scales all but the last are multiples of 4 V. Never read on the host.
    output_mode
        ``"dense"``: one (E, M, N) result. ``"discrete"``: results go to the addresses in ``wgrad_ptrs``, or, without
        them, into the stacked tensor.
    wgrad_tensor
        (E, M, N) contiguous, to write into (torch, numpy); its dtype is the default of ``wgrad_dtype``.
    wgrad_ptrs
        (E,) int64 addresses of (M, N) row-major buffers, multiples of 16; JAX also their bytes, (8 E,) uint8.
    global_scale_a, global_scale_b
        (E,) float32 for scaled operands, both or neither; needed for NVFP4.
    acc_dtype
        float32.
    wgrad_dtype
        bfloat16 (the default), float16 or float32.
    mma_tiler_mn, cluster_shape_mn
        Checked, without effect: tiles of 128 or 256 rows and 64, 128, 192 or 256 columns (with scales 128 or 256);
        clusters of powers of two with a product up to 16.
    sf_vec_size
        Tokens per scale.
    sf_fp8_dtype_override
        ``None``.
    accumulate_on_output
        Whether to add to what the results hold. A new result holds 0.
    input_order
        ``"tensor_ragged"``: the tokens of each expert are a compact matrix of their own, one after the other, in
        arrays of the same shape. Matters where tokens are side by side in memory.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    descriptor_workspace
        Checked, without effect: a contiguous uint8 tensor of at least
        :func:`get_grouped_gemm_wgrad_workspace_size` bytes; torch, with scales.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``wgrad_tensor`` (E, M, N), the given one where one was given; ``None`` with ``wgrad_ptrs``.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, presence or options break the contract; on the CPU, or on a GPU under
        ``FE_CHECK_DEVICE_VALUES=1``, also malformed offsets and null addresses.
    NotImplementedError
        ``wgrad_ptrs`` with JAX arrays where no kernel serves the call: the reference writes to no address there; and
        under ``torch.compile``.

    Notes
    -----
    Tokens beyond the last offset may hold anything. One writer for each element, in a fixed order: bit-identical from
    run to run. Not differentiable. ``T`` at 256 and offsets at multiples of 256, which the peer asks of bfloat16, are
    not needed.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: weight gradient of grouped GEMM.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> a, b = np.ones((8, 16), ml_dtypes.bfloat16), np.ones((16, 8), ml_dtypes.bfloat16)
    >>> (w,) = grouped_gemm_wgrad_wrapper(a, b, None, None, np.array([3, 3, 16], np.int32))
    >>> w[:, 0, 0].astype(float).tolist()
    [3.0, 0.0, 13.0]
    """
    _check_hints(a_tensor, mma_tiler_mn, cluster_shape_mn, sf_fp8_dtype_override)
    _check_mode(output_mode, wgrad_tensor, wgrad_ptrs)
    if wgrad_ptrs is not None and is_torch_tensor(a_tensor):
        _reject_tracing()
    has_results = wgrad_tensor is not None or wgrad_ptrs is not None
    options = {
        "acc_dtype": acc_dtype,
        "wgrad_dtype": sample_dtype(wgrad_tensor, "bfloat16") if wgrad_dtype is None else wgrad_dtype,
        "sf_vec_size": sf_vec_size,
        "accumulate_on_output": accumulate_on_output if has_results else _without_effect(accumulate_on_output),
        "input_order": _order(input_order),
    }
    arrays = _arrays(
        a_tensor, b_tensor, sfa_tensor, sfb_tensor, offsets_tensor, wgrad_ptrs, global_scale_a, global_scale_b
    )
    if descriptor_workspace is not None:
        _check_descriptors(OPERATION.bind(arrays, options), descriptor_workspace, output_mode)
    if wgrad_tensor is None or wgrad_ptrs is not None:
        outputs = OPERATION.outputs(arrays, options, stream=current_stream, backend=backend)
    else:
        given = (wgrad_tensor, None)
        outputs = OPERATION.outputs_into(arrays, given, options, stream=current_stream, backend=backend)
    register_pytrees()
    return TupleDict.of(("wgrad_tensor",), outputs[:1])


grouped_gemm_wgrad_wrapper.supports_canonical_layouts = True  # type: ignore[attr-defined]
grouped_gemm_wgrad_wrapper.supports_bf16_canonical_layouts = True  # type: ignore[attr-defined]


class GroupedGemmWgrad(APIBase):
    """Gradients of the experts' weights into the caller's outputs; see :func:`grouped_gemm_wgrad_wrapper`.

    Results: ``sample_wgrad``, or ``num_experts``, ``wgrad_shape=(M, N)`` and ``wgrad_dtype`` for results behind
    addresses. T may change between executions; majors are those of the samples.
    """

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_offsets: Any,
        sample_wgrad: Any = None,
        sample_wgrad_expert: Any = None,
        num_experts: int | None = None,
        wgrad_shape: tuple[int, int] | None = None,
        wgrad_dtype: Any = None,
        sample_global_scale_a: Any = None,
        sample_global_scale_b: Any = None,
        acc_dtype: Any = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: Any = None,
        accumulate_on_output: bool = False,
        input_order: WGradInputOrder | str = WGradInputOrder.Tensor2D,
        *,
        backend: str = "auto",
    ) -> None:
        self._hints = mma_tiler_mn, cluster_shape_mn, sf_fp8_dtype_override
        self._scaled = _is_scaled(sample_a)
        self._results = {"num_experts": num_experts, "wgrad_shape": wgrad_shape, "wgrad_dtype": wgrad_dtype}
        self._is_dense, self._shape = sample_wgrad is not None, wgrad_shape
        expert = sample_wgrad_expert
        self._expert = None if expert is None else Sample.of(NAME, "sample_wgrad_expert", expert)
        options = {
            "acc_dtype": acc_dtype,
            "wgrad_dtype": sample_dtype(sample_wgrad, "bfloat16") if wgrad_dtype is None else wgrad_dtype,
            "sf_vec_size": sf_vec_size,
            "accumulate_on_output": accumulate_on_output,
            "input_order": _order(input_order),
        }
        ptrs = None if self._is_dense or num_experts is None else address_table(sample_a, num_experts)
        arrays = (sample_a, sample_b, sample_sfa, sample_sfb, sample_offsets, ptrs)
        inputs = _arrays(*arrays, sample_global_scale_a, sample_global_scale_b)
        super().__init__(OPERATION, inputs, (sample_wgrad, None), options, backend)

    def execute(
        self,
        a_tensor: Any,
        b_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        offsets_tensor: Any,
        wgrad_tensor: Any = None,
        wgrad_ptrs: Any = None,
        global_scale_a: Any = None,
        global_scale_b: Any = None,
        current_stream: Any = None,
        *,
        descriptor_workspace: Any = None,
    ) -> None:
        """Write the gradients into ``wgrad_tensor`` or behind ``wgrad_ptrs``; no synchronisation."""
        if not self._is_dense and wgrad_ptrs is None and wgrad_tensor is not None:
            wgrad_ptrs, wgrad_tensor = _addresses_in(wgrad_tensor, self._check()[0]), None
        arrays = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, offsets_tensor, wgrad_ptrs)
        if descriptor_workspace is not None:
            _check_descriptors(self._check()[0], descriptor_workspace, MODES[not self._is_dense])
        inputs = _arrays(*arrays, global_scale_a, global_scale_b)
        self._execute(inputs, (wgrad_tensor, None), current_stream)

    def _check(self) -> Any:
        if self._checked is None:
            self._check_results()
        return super()._check()

    def _check_results(self) -> None:
        """Raise unless the results are described in exactly one way."""
        described = [name for name, value in self._results.items() if value is not None]
        complete = len(described) == len(self._results)
        if self._is_dense == (complete or "num_experts" in described):
            rule = "be given, or num_experts, wgrad_shape and wgrad_dtype: one of the two"
            given = "both" if self._is_dense else f"none, with {described or 'nothing else'}"
            raise InvalidArgumentError(explain(NAME, "sample_wgrad", rule, given, "Describe the results."))
        if not self._is_dense and not complete:
            rule = "be given for results behind addresses"
            missing = next(name for name, value in self._results.items() if value is None)
            raise InvalidArgumentError(explain(NAME, missing, rule, "None", "Pass num_experts, shape and dtype."))

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        del plan
        tile, cluster, override = self._hints
        _check_override(override)
        (SCALED_HINTS if self._scaled else HINTS).check(tile, cluster)
        shape = (bound.dim("M"), bound.dim("N"))
        if self._shape is not None and tuple(self._shape) != shape:
            raise InvalidArgumentError(explain(NAME, "wgrad_shape", f"be (M, N) = {shape}", repr(self._shape)))
        expert = self._expert
        if expert is not None and (tuple(expert.desc.shape), expert.desc.dtype) != (
            shape,
            bound.options["wgrad_dtype"],
        ):
            rule = f"be {shape} of {bound.options['wgrad_dtype']}"
            given = f"{tuple(expert.desc.shape)} of {expert.desc.dtype}"
            raise InvalidArgumentError(explain(NAME, "sample_wgrad_expert", rule, given))


def get_grouped_gemm_wgrad_workspace_size(
    num_experts: int, *, output_mode: str = "dense", input_order: WGradInputOrder | str = WGradInputOrder.Tensor2D
) -> int:
    """Return the bytes of a ``descriptor_workspace``: 512 for each expert, 640 for discrete results.

    Nothing needs it here; the numbers are the peer's, for callers that allocate ahead.

    Raises
    ------
    TypeError
        ``num_experts`` is no integer.
    InvalidArgumentError
        ``num_experts`` below 1, an unknown mode or order.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: weight gradient of grouped GEMM.
    """
    name = "get_grouped_gemm_wgrad_workspace_size"
    if isinstance(num_experts, bool) or not isinstance(num_experts, int):
        raise TypeError(explain(name, "num_experts", "be a Python int", type(num_experts).__name__))
    if num_experts < 1:
        raise InvalidArgumentError(explain(name, "num_experts", "be positive", num_experts))
    if output_mode not in MODES:
        raise InvalidArgumentError(explain(name, "output_mode", 'be "dense" or "discrete"', repr(output_mode)))
    if input_order not in tuple(WGradInputOrder):
        rule = "be tensor2d or tensor_ragged"
        raise InvalidArgumentError(explain(name, "input_order", rule, repr(input_order)))
    return 128 * DESCRIPTORS[output_mode] * num_experts


def grouped_gemm_wgrad_jax(
    a_tensor: Any,
    b_tensor: Any,
    offsets_tensor: Any,
    wgrad_ptrs: Any = None,
    wgrad_dtype: Any = "bfloat16",
    acc_dtype: Any = "float32",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    accumulate_on_output: bool = False,
    input_order: WGradInputOrder | str = WGradInputOrder.Tensor2D,
    *,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    global_scale_a: Any = None,
    global_scale_b: Any = None,
    sf_vec_size: int = 32,
    backend: str = "auto",
) -> Any:
    """Apply the operation to JAX arrays, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`grouped_gemm_wgrad_wrapper`; A (M, T) and B (T, N) row-major, FP4 as
    ``uint8`` (M, T/2) and (N, T/2). ``sf_vec_size`` counts for scaled operands only. ``accumulate_on_output`` needs
    ``wgrad_ptrs``. All options are static.

    Returns
    -------
    TupleDict or jax.Array
        ``wgrad_tensor`` (E, M, N); with ``wgrad_ptrs`` an array that is ready when the results are.
    """
    from fe_runtime.jax.entry import entry

    _check_hints(a_tensor, mma_tiler_mn, cluster_shape_mn, None)
    if accumulate_on_output is True and wgrad_ptrs is None:
        rule, fix = "be False without wgrad_ptrs", "Add to the result: there is no array to accumulate into."
        raise InvalidArgumentError(explain(NAME, "accumulate_on_output", rule, True, fix))
    options = {
        "acc_dtype": acc_dtype,
        "wgrad_dtype": wgrad_dtype,
        "sf_vec_size": sf_vec_size if sfa_tensor is not None else 16,
        "accumulate_on_output": accumulate_on_output,
        "input_order": _order(input_order),
    }
    arrays = (a_tensor, b_tensor, sfa_tensor, sfb_tensor, offsets_tensor, wgrad_ptrs)
    inputs = _arrays(*arrays, global_scale_a, global_scale_b)
    wgrad, token = entry(OPERATION, inputs, options, backend)
    register_pytrees()
    return token if wgrad_ptrs is not None else TupleDict.of(("wgrad_tensor",), (wgrad,))


def _arrays(a: Any, b: Any, sfa: Any, sfb: Any, offsets: Any, ptrs: Any, scale_a: Any, scale_b: Any) -> tuple[Any, ...]:
    """Return the operation's inputs: B of packed FP4 by N, scales flat."""
    packed = forms.is_packed(a) and forms.is_packed(b)
    b, turned = (None, forms.by_rows_of_pairs(b)) if packed else (b, None)
    return a, b, turned, _flat(sfa), _flat(sfb), offsets, ptrs, scale_a, scale_b


def _flat(scales: Any) -> Any:
    """Return scales as a vector of their bytes in order; the contract says what is wrong with others."""
    shape = getattr(scales, "shape", None)
    if shape is None or len(shape) < 2:
        return scales
    if len(shape) == 6 and (shape[0], shape[1], shape[3]) == (32, 4, 4):
        scales = forms.turned(scales, PHYSICAL)
    return forms.reshaped(scales, (-1,))


def _order(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _without_effect(value: Any) -> Any:
    """Return False for a flag that has no effect, and what is no flag as it is: its check will name it."""
    return False if isinstance(value, bool) else value


def _is_scaled(a: Any) -> bool:
    return forms.dtype_name(a) != "bfloat16"


def _check_hints(a: Any, tile: Any, cluster: Any, override: Any) -> None:
    _check_override(override)
    (SCALED_HINTS if _is_scaled(a) else HINTS).check(tile, cluster)


def _check_override(override: Any) -> None:
    if override is not None:
        rule = "be None: no GPU that is served has another dtype for scales"
        raise InvalidArgumentError(explain(NAME, "sf_fp8_dtype_override", rule, repr(override), "Leave it out."))


def _check_mode(mode: Any, wgrad: Any, ptrs: Any) -> None:
    if mode not in MODES:
        raise InvalidArgumentError(explain(NAME, "output_mode", 'be "dense" or "discrete"', repr(mode)))
    if mode == "dense" and ptrs is not None:
        rule, fix = 'be None for output_mode="dense"', 'Pass output_mode="discrete".'
        raise InvalidArgumentError(explain(NAME, "wgrad_ptrs", rule, "an array", fix))
    if wgrad is not None and ptrs is not None:
        fix = "Pass one of the two."
        raise InvalidArgumentError(explain(NAME, "wgrad_tensor", "be None with wgrad_ptrs", "an array", fix))


def _reject_tracing() -> None:
    """Raise while torch traces a program: it would drop a call that returns nothing and changes no argument."""
    import torch

    if torch.compiler.is_compiling():
        rule, fix = "be None under torch.compile", "Use the stacked result, or call it outside of compiled code."
        text = explain(NAME, "wgrad_ptrs", rule, "addresses", fix)
        raise NotSupportedError(text, reason="torch.compile does not see what is written behind addresses")


def _check_descriptors(bound: Bound, workspace: Any, mode: str) -> None:
    if bound.framework == "jax" or bound.dtype("a_tensor") == "bfloat16":
        rule, fix = "be None for bfloat16 operands and for JAX arrays", "Leave it out: nothing needs it."
        raise InvalidArgumentError(explain(NAME, "descriptor_workspace", rule, "an array", fix))
    size = get_grouped_gemm_wgrad_workspace_size(bound.dim("E"), output_mode=mode)
    memory.check(NAME, workspace, size, bound, "descriptor_workspace")


def _addresses_in(stacked: Any, bound: Bound) -> Any:
    """Return a table of the addresses of the matrices of a stacked (E, M, N) result."""
    shape = (bound.dim("E"), bound.dim("M"), bound.dim("N"))
    dtype = str(bound.options["wgrad_dtype"])
    sample = Sample.of(NAME, "wgrad_tensor", stacked)
    if tuple(sample.desc.shape) != shape or sample.desc.dtype != dtype or not sample.desc.is_contiguous():
        rule, given = f"be contiguous {shape} of {dtype}", f"{tuple(sample.desc.shape)} of {sample.desc.dtype}"
        raise InvalidArgumentError(explain(NAME, "wgrad_tensor", rule, given))
    step = shape[1] * shape[2] * (4 if dtype == "float32" else 2)
    table = get_data_ptr(stacked) + step * np.arange(shape[0], dtype=np.int64)
    if is_torch_tensor(stacked):
        import torch

        return torch.from_numpy(table).to(stacked.device)
    return table


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes, majors and results, and for the tiles that suit M and N; for any tokens."""
    return find_wgrad(bound, replace(target, sm_count=common.multiprocessors(NAME, target)))


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.grouped.canonical:grouped_gemm_wgrad",
    find_kernel=find_kernel,
    check_values=check_values,
    check_variable=common.CHECK_VARIABLE,
    jax_entry="fe_gemm.grouped_gemm_wgrad_jax",
    stream_argument="current_stream",
)
