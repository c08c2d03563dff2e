"""``vision_rope_backward``: rotate the Q and K gradients of a vision attention layer back and pack dQ, dK and dV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import ANY_LAYOUT, CONTIGUOUS, Bound, Contract, Input, Output, OutputSpec, Rule, Sample
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.tuple_dict import TupleDict

from . import launch_vision as launch
from .backend import resolved

__all__ = [
    "NATIVE",
    "OPERATION",
    "VisionRoPEBackward",
    "vision_rope_backward_jax",
    "vision_rope_backward_wrapper",
]

BF16 = ("bfloat16",)
LONGEST_COLUMN = 1024
"""Channels of a head up to which a tile of tokens fits in shared memory to be transposed."""


def vision_rope_backward_wrapper(
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
    cosine: Any,
    sine: Any,
    *,
    backend: str = "frost",
    current_stream: Any = None,
) -> TupleDict:
    """Rotate the gradients of Q and K backwards and pack them with that of V, for the backward of the projection.

    ``d[i] = bf16(RN(RN(a*c) + RN(b*s)))`` and ``d[D/2+i] = bf16(RN(RN(b*c) - RN(a*s)))`` for ``a, b`` the channels
    ``i`` and ``D/2+i`` of a head and ``c, s`` the entries ``i`` of its token, in fp32. V is copied bit for bit.

    Parameters
    ----------
    grad_q, grad_k, grad_v
        (T, H, D), D even; bfloat16; any strides. Read fastest as attention leaves them: Q and V stored (H, T, D), K
        stored (H, D, T).
    cosine, sine
        (T, 1, D/2) or (T, D/2) float32, contiguous.
    backend
        ``"frost"`` or ``"auto"``: the best there is; ``"reference"``, or a kernel backend such as ``"sm90"``.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).

    Returns
    -------
    TupleDict
        ``grad_qkv`` (T, 3*H*D) bfloat16: dQ, dK, dV side by side, each (H, D) in a row.

    Raises
    ------
    TypeError
        An argument that is no array.
    InvalidArgumentError
        Shapes, strides, dtypes or devices break the contract.

    Notes
    -----
    The result is defined bit for bit, on every backend: each product, sum and result is rounded once, nothing is
    fused; subnormals and signed zeros stay. A new T never compiles anything. Deterministic. It has no gradient of its
    own: operands that require one are taken as detached.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: vision RoPE backward.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> q, k, v = (np.full((1, 1, 4), value, ml_dtypes.bfloat16) for value in (1, 2, 3))
    >>> zeros, ones = np.zeros((1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    >>> vision_rope_backward_wrapper(q, k, v, zeros, ones)["grad_qkv"].astype(float).tolist()
    [[1.0, 1.0, -1.0, -1.0, 2.0, 2.0, -2.0, -2.0, 3.0, 3.0, 3.0, 3.0]]
    """
    arrays = (grad_q, grad_k, grad_v, cosine, sine)
    return OPERATION(arrays, {}, stream=current_stream, backend=resolved(backend))


class VisionRoPEBackward(APIBase):
    """Rotate and pack into the caller's output; see :func:`vision_rope_backward_wrapper`.

    The number of tokens may change between executions; everything else is fixed. Samples of a single token whose
    strides leave it open count as stored in the fastest way.
    """

    def __init__(
        self, grad_q: Any, grad_k: Any, grad_v: Any, cosine: Any, sine: Any, *, backend: str = "frost"
    ) -> None:
        super().__init__(OPERATION, (grad_q, grad_k, grad_v, cosine, sine), (None,), {}, resolved(backend))
        self._outputs = (_output_like(self._inputs[0]),)

    def execute(
        self,
        grad_q: Any,
        grad_k: Any,
        grad_v: Any,
        cosine: Any,
        sine: Any,
        grad_qkv: Any,
        current_stream: Any = None,
    ) -> Any:
        """Write the result into ``grad_qkv`` and return it; no allocation, no synchronisation."""
        self._execute((grad_q, grad_k, grad_v, cosine, sine), (grad_qkv,), current_stream)
        return grad_qkv


def vision_rope_backward_jax(
    grad_q_htd: Any, grad_k_hdt: Any, grad_v_htd: Any, cosine: Any, sine: Any, *, backend: str = "auto"
) -> Any:
    """Apply the operation to JAX arrays as attention leaves them, eagerly or under ``jit``.

    Same formula, dtypes and errors as :func:`vision_rope_backward_wrapper`; ``backend`` is static.

    Parameters
    ----------
    grad_q_htd, grad_v_htd
        (H, T, D) bfloat16.
    grad_k_hdt
        (H, D, T) bfloat16.
    cosine, sine
        (T, D/2) or (T, 1, D/2) float32.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    jax.Array
        ``grad_qkv`` (T, 3*H*D).
    """
    from fe_runtime.jax.entry import entry

    return entry(NATIVE, (grad_q_htd, grad_k_hdt, grad_v_htd, cosine, sine), {}, resolved(backend))


def _output_like(q: Sample | None) -> Sample | None:
    """Describe the output that belongs to a sample of Q: the peer's constructor takes none."""
    if q is None or q.desc.ndim != 3:
        return None  # binding will say what is wrong
    tokens, heads, channels = q.desc.shape
    desc = TensorDesc.of("bfloat16", (tokens, 3 * heads * channels), device=q.desc.device)
    return Sample.of("vision_rope_backward", "grad_qkv", desc)


def _spec(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("T"), 3 * bound.dim("H") * bound.dim("D")), "bfloat16")


def _rules(names: tuple[str, ...], axes: tuple[int, int, int]) -> tuple[Rule, ...]:
    """Return the rules for arguments of these names; ``axes`` are those of the channels."""

    def cut(call: Mapping[str, Any], channels: int, pairs: int) -> dict[str, Any]:
        """Cut the channels of a valid call, to build one that breaks a rule on their number."""
        wanted = [(axis, channels) for axis in axes] + [(-1, pairs)] * 2
        kept = {name: _first(call[name], *part) for name, part in zip(names, wanted, strict=True)}
        return {**call, **kept}

    return (
        Rule(
            names[0],
            "have at least one head and an even number of channels, at least 2",
            holds=lambda bound: bound.dim("H") > 0 and bound.dim("D") > 0 and bound.dim("D") % 2 == 0,
            given=lambda bound: f"shape {bound.given[names[0]]}",
            fix="Channels are rotated in pairs, one of each half.",
            violation=lambda call: cut(call, 3, 1),
        ),
        Rule(
            names[3],
            "have D/2 columns",
            holds=lambda bound: 2 * bound.dim("R") == bound.dim("D"),
            given=lambda bound: f"{bound.dim('R')} columns with D = {bound.dim('D')}",
            fix="There is one entry for each pair of channels.",
            violation=lambda call: cut(call, 4, 1),
        ),
    )


def _first(array: Any, axis: int, extent: int) -> Any:
    """Return the first entries of a numpy array along an axis, contiguous."""
    return array.take(range(extent), axis=axis)


def _contract(operation: str, names: tuple[str, str, str], shapes: tuple[str, str, str], stored: bool) -> Contract:
    docs = ("gradient of the rotated Q", "gradient of the rotated K", "gradient of V, copied")
    layout = CONTIGUOUS if stored else ANY_LAYOUT
    gradients = [
        Input(name, shape, BF16, layout, doc=doc) for name, shape, doc in zip(names, shapes, docs, strict=True)
    ]
    tables = [Input(name, "T R", ("float32",), also=("T 1 R",), doc="one row for each token") for name in TABLES]
    return Contract(
        operation=operation,
        inputs=(*gradients, *tables),
        outputs=(Output("grad_qkv", _spec, doc="dQ, dK, dV side by side"),),
        rules=_rules((*names, *TABLES), (2, 1, 2) if stored else (2, 2, 2)),
        dynamic=("T",),
    )


TABLES = ("cosine", "sine")
CONTRACT = _contract("vision_rope_backward", ("grad_q", "grad_k", "grad_v"), ("T H D",) * 3, stored=False)
NATIVE_CONTRACT = _contract(
    "vision_rope_backward_native",
    ("grad_q_htd", "grad_k_hdt", "grad_v_htd"),
    ("H T D", "H D T", "H T D"),
    stored=True,
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one for each kind of strides, heads, channels and alignment, for any tokens."""
    names = CONTRACT.input_names[:3]
    q, k, v = (bound.arrays[name] for name in names)
    forms = _form(q), launch.COLUMNS if _is_stored_by_column(k) else _form(k), _form(v)
    alignments = [bound.alignments[name] if form == launch.ROWS else 2 for name, form in zip(names, forms, strict=True)]
    return _kernel(bound, target, names, forms, alignments, _is_packed(q) and _is_packed(v))


def find_native_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for arrays that are passed as they are stored."""
    names = NATIVE_CONTRACT.input_names[:3]
    forms = launch.ROWS, _columns(bound.dim("D")), launch.ROWS
    alignments = [bound.alignments[names[0]], 2, bound.alignments[names[2]]]
    return _kernel(bound, target, names, forms, alignments, packed=True, stored=True)


def _kernel(
    bound: Bound,
    target: Target,
    names: tuple[str, ...],
    forms: tuple[str, str, str],
    alignments: list[int],
    packed: bool,
    stored: bool = False,
) -> Kernel | NoKernel:
    tables = [bound.given[name] for name in TABLES]
    if len(tables[0]) != len(tables[1]):
        tables = [bound.arrays[name].shape for name in TABLES]
    problem = launch.Problem(
        heads=bound.dim("H"),
        channels=bound.dim("D"),
        q=forms[0],
        k=forms[1],
        v=forms[2],
        packed=packed,
        q_alignment=alignments[0],
        k_alignment=alignments[1],
        v_alignment=alignments[2],
        out_alignment=bound.alignments["grad_qkv"],
        table_alignment=min(bound.alignments[name] for name in TABLES),
        table_rank=len(tables[0]),
        stored=stored,
    )
    config = launch.config(problem, launch.choose(problem, target.arch))
    place = "fe_rope.kernels.vision_rope_backward:build"
    spec = KernelSpec.of(f"fe_rope.{bound.operation}", place, target.arch, **config)
    gradients = [bound.given[name] for name in names]
    shape = (bound.dim("T"), 3 * bound.dim("H") * bound.dim("D"))
    return Kernel(spec, Form(inputs=(*gradients, *tables), outputs=(shape,), related=True))


def _form(x: TensorDesc) -> str:
    """Return where the neighbours of a gradient (T, H, D) lie."""
    if x.stride[2] == 1:
        return launch.ROWS
    return _columns(x.shape[2]) if x.stride[0] == 1 else launch.SCATTERED


def _columns(channels: int) -> str:
    return launch.COLUMNS if channels <= LONGEST_COLUMN else launch.SCATTERED


def _is_stored_by_column(k: TensorDesc) -> bool:
    """Whether K can be stored (H, D, T); a stride along an extent of 1 says nothing."""
    tokens, _, channels = k.shape
    wanted = (1, channels * tokens, tokens)
    found = zip(k.shape, k.stride, wanted, strict=True)
    return channels <= LONGEST_COLUMN and all(extent == 1 or step == want for extent, step, want in found)


def _is_packed(x: TensorDesc) -> bool:
    """Whether the tokens of a head lie side by side; for a single token, whether they could."""
    tokens, heads, channels = x.shape
    if tokens > 1:
        return x.stride[0] == channels
    return heads == 1 or x.stride[1] == channels


OPERATION = Operation(
    "fe_rope",
    CONTRACT,
    reference="fe_rope.reference.vision_rope_backward:vision_rope_backward",
    find_kernel=find_kernel,
    jax_entry="fe_rope.vision_rope_backward_jax",
    stream_argument="current_stream",
)
NATIVE = Operation(
    "fe_rope",
    NATIVE_CONTRACT,
    reference="fe_rope.reference.vision_rope_backward:vision_rope_backward_native",
    find_kernel=find_native_kernel,
    jax_entry="fe_rope.vision_rope_backward_jax",
    stream_argument="current_stream",
)
