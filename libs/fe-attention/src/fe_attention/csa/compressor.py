"""The compressor of CSA and HCA: gated pooling of blocks of packed tokens, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fe_attention.workspace import WorkspaceAPI
from fe_runtime import determinism
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import detect_framework, is_tracer, on_stream, to_host_list
from fe_runtime.contract import Bound
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Kernel
from fe_runtime.tuple_dict import TupleDict

from . import contract

__all__ = [
    "ACCUMULATING",
    "BACKWARD",
    "COMPRESSOR",
    "FORWARD",
    "CSACompressorBackward",
    "CSACompressorForward",
    "csa_compressor",
    "csa_compressor_backward_jax",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_jax",
    "csa_compressor_forward_wrapper",
    "csa_compressor_jax",
]


def csa_compressor_forward_wrapper(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: Any = None,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Pool each block of ``ratio`` tokens of each sequence to one row, by a softmax over its window in each channel.

    ``x_k = score_k + ape_k``, ``p = softmax(x)``, ``out = sum over k of kv_k * p_k``, in fp32, rounded once. With
    ``coff`` 2 the window of a block is the block before it in the same sequence, if there is one (its columns below
    ``head_dim``), and the block itself (the other columns): the form of CSA. With 1 it is the block: that of HCA.

    Parameters
    ----------
    kv, score
        (T, coff * head_dim), bfloat16: all tokens of a packed batch.
    ape
        (ratio, coff * head_dim), float32: added to the scores by the token's place in its block.
    cu_seqlens
        (B + 1,), int32: sequence s has the tokens from ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``.
    cu_seqlens_comp
        (B + 1,), int32: the same of the blocks, ``length // ratio`` of each sequence. A tail of tokens is dropped.
    ratio
        Tokens of a block.
    head_dim
        Channels of the result; ``None``: the columns of kv / coff.
    coff
        1 or 2: blocks of a window.
    total_comp
        Rows of the result, at least ``cu_seqlens_comp[-1]``; ``None`` reads that, which waits for a GPU, so pass it
        where a graph is captured. Rows beyond are written, their contents mean nothing.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``out`` (total_comp, head_dim), bfloat16.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Shapes, strides, dtypes, devices, alignment or options break the contract.

    Notes
    -----
    All arrays are contiguous, on a GPU 16-byte aligned. NaN and infinity propagate inside a window, as in the formula,
    and never to another one. Deterministic. Not differentiable, as at the peer: see :func:`csa_compressor`.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: CSA compressor.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> kv, zero = np.arange(16.0).reshape(8, 2).astype(ml_dtypes.bfloat16), np.zeros((8, 2), ml_dtypes.bfloat16)
    >>> cu, comp = np.array([0, 8], np.int32), np.array([0, 2], np.int32)
    >>> out = csa_compressor_forward_wrapper(kv, zero, np.zeros((4, 2), np.float32), cu, comp, coff=1)["out"]
    >>> out.astype(float).tolist()
    [[3.0, 4.0], [11.0, 12.0]]
    """
    total_comp = _total(cu_seqlens_comp, total_comp, stream)
    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff, "total_comp": total_comp}
    return FORWARD((kv, score, ape, cu_seqlens, cu_seqlens_comp), options, stream=stream, backend=backend)


def csa_compressor_backward_wrapper(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    stream: Any = None,
    deterministic: bool = False,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Return the gradients of :func:`csa_compressor_forward_wrapper`.

    With go the gradient of a row: ``y_k = (go * kv_k) * p_k``, ``ds_k = y_k - p_k * sum of y``, ``dkv_k = go * p_k``;
    ``grad_ape`` is the sum of ds over all blocks.

    Parameters
    ----------
    kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim, coff
        As given to the forward.
    grad_out
        (total_comp, head_dim), bfloat16. Rows from ``cu_seqlens_comp[-1]`` on do not count, whatever they hold.
    stream, backend
        As for the forward.
    deterministic
        Without effect: the gradients are the same in every run.

    Returns
    -------
    TupleDict
        ``grad_kv`` and ``grad_score`` (T, coff * head_dim), bfloat16, exactly 0 where no window has a token's column;
        ``grad_ape`` (ratio, coff * head_dim), float32.

    Raises
    ------
    TypeError, InvalidArgumentError
        The call breaks the contract.

    Notes
    -----
    The order of the sums over blocks depends on the GPU model and the number of blocks only.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: CSA compressor.
    """
    _check_flag("csa_compressor_backward", deterministic)
    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff}
    arrays = (grad_out, kv, score, ape, cu_seqlens, cu_seqlens_comp)
    return BACKWARD(arrays, options, stream=stream, backend=backend)


def csa_compressor(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    *,
    backend: str = "auto",
) -> Any:
    """Return ``out`` of :func:`csa_compressor_forward_wrapper`, differentiable in kv, score and ape, once.

    Parameters and errors are those of the forward.
    """
    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff, "total_comp": _total(cu_seqlens_comp, total_comp)}
    (out,) = COMPRESSOR.outputs((kv, score, ape, cu_seqlens, cu_seqlens_comp), options, backend=backend)
    return out


def csa_compressor_jax(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    *,
    total_comp: int,
    backend: str = "auto",
) -> Any:
    """Apply :func:`csa_compressor` to JAX arrays, eagerly, under ``jit`` and under ``grad``; options are static."""
    from fe_runtime.jax.entry import entry

    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff, "total_comp": total_comp}
    return entry(COMPRESSOR, (kv, score, ape, cu_seqlens, cu_seqlens_comp), options, backend)


def csa_compressor_forward_jax(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    *,
    total_comp: int,
    backend: str = "auto",
) -> Any:
    """Apply :func:`csa_compressor_forward_wrapper` to JAX arrays, eagerly or under ``jit``; returns ``out``.

    ``total_comp`` is required: nothing is read while tracing.
    """
    from fe_runtime.jax.entry import entry

    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff, "total_comp": total_comp}
    return entry(FORWARD, (kv, score, ape, cu_seqlens, cu_seqlens_comp), options, backend)


def csa_compressor_backward_jax(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    deterministic: bool = False,
    *,
    backend: str = "auto",
) -> tuple[Any, Any, Any]:
    """Apply :func:`csa_compressor_backward_wrapper` to JAX arrays: ``(grad_kv, grad_score, grad_ape)``."""
    from fe_runtime.jax.entry import entry

    _check_flag("csa_compressor_backward", deterministic)
    options = {"ratio": ratio, "head_dim": head_dim, "coff": coff}
    arrays = (grad_out, kv, score, ape, cu_seqlens, cu_seqlens_comp)
    grad_kv, grad_score, grad_ape = entry(BACKWARD, arrays, options, backend)
    return grad_kv, grad_score, grad_ape


class CSACompressorForward(APIBase):
    """The compressor into the caller's output; see :func:`csa_compressor_forward_wrapper`.

    ``head_dim`` and ``total_comp`` are those of the output. Tokens, sequences and rows may change between executions.
    """

    def __init__(
        self,
        sample_kv: Any,
        sample_score: Any,
        sample_ape: Any,
        sample_cu_seqlens: Any,
        sample_cu_seqlens_comp: Any,
        sample_out: Any,
        ratio: int = 4,
        coff: int = 2,
        *,
        backend: str = "auto",
    ) -> None:
        inputs = (sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp)
        options = {"ratio": ratio, "coff": coff, "total_comp": _rows_of(sample_out)}
        super().__init__(FORWARD, inputs, (sample_out,), options, backend)

    def execute(
        self,
        kv: Any,
        score: Any,
        ape: Any,
        cu_seqlens: Any,
        cu_seqlens_comp: Any,
        out: Any,
        current_stream: Any = None,
    ) -> None:
        """Write the result into ``out``; no synchronisation."""
        runtime = {"total_comp": _rows_of(out)}
        self._execute((kv, score, ape, cu_seqlens, cu_seqlens_comp), (out,), current_stream, runtime)


class CSACompressorBackward(WorkspaceAPI):
    """The gradients into the caller's outputs; see :func:`csa_compressor_backward_wrapper`.

    ``deterministic=False`` adds to ``grad_ape``, which the caller has set to zero, in any order and without a
    workspace; torch's switch for deterministic algorithms refuses it. ``deterministic=True`` writes ``grad_ape``, and
    needs a workspace. Without rows nothing is written at all.
    """

    def __init__(
        self,
        sample_kv: Any,
        sample_score: Any,
        sample_ape: Any,
        sample_cu_seqlens: Any,
        sample_cu_seqlens_comp: Any,
        sample_out: Any,
        ratio: int = 4,
        coff: int = 2,
        deterministic: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        _check_flag("csa_compressor_backward", deterministic)
        self.deterministic = deterministic
        inputs = (sample_out, sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp)
        operation = BACKWARD if deterministic else ACCUMULATING
        super().__init__(operation, inputs, {"ratio": ratio, "coff": coff}, backend)

    def execute(
        self,
        kv: Any,
        score: Any,
        ape: Any,
        cu_seqlens: Any,
        cu_seqlens_comp: Any,
        grad_out: Any,
        grad_kv: Any,
        grad_score: Any,
        grad_ape: Any,
        current_stream: Any = None,
        workspace: Any = None,
    ) -> None:
        """Write the gradients; no synchronisation."""
        if not self.deterministic:
            self._check_accumulating(kv, workspace)
        inputs = (grad_out, kv, score, ape, cu_seqlens, cu_seqlens_comp)
        self._execute_in(workspace, inputs, (grad_kv, grad_score, grad_ape), current_stream)

    def _check_accumulating(self, kv: Any, workspace: Any) -> None:
        name = "csa_compressor_backward"
        if workspace is not None:
            rule, fix = "be None without deterministic=True", "Leave it out."
            raise InvalidArgumentError(explain(name, "workspace", rule, "a workspace", fix))
        determinism.resolve(
            name, None, has_path=False, framework=detect_framework(kv), output="grad_ape", default=False
        )

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], *others: Any
    ) -> Callable[..., None]:
        launch = super()._launch(live, kernel, run, *others)
        return (lambda _arrays, _outputs: None) if live.dim("M") == 0 else launch


def _total(cu_seqlens_comp: Any, total_comp: int | None, stream: Any = None) -> int:
    """Return the rows of the result: as given, or read from the offsets, on the launch stream."""
    if total_comp is not None:
        return total_comp
    if len(getattr(cu_seqlens_comp, "shape", ())) != 1 or cu_seqlens_comp.shape[0] == 0:
        return 0  # the contract says what is wrong with it
    if is_tracer(cu_seqlens_comp):
        rule, fix = "be given while JAX traces", "Pass it to csa_compressor_forward_jax: a static number of rows."
        raise InvalidArgumentError(explain("csa_compressor_forward", "total_comp", rule, None, fix))
    if stream is None:
        (last,) = to_host_list(cu_seqlens_comp[-1:])
    else:
        with on_stream(FORWARD.resolve_stream(stream, (cu_seqlens_comp,)), (cu_seqlens_comp,)):
            (last,) = to_host_list(cu_seqlens_comp[-1:])
    return int(last)


def _rows_of(out: Any) -> int:
    """Return the rows of an output; what is no matrix, the contract refuses."""
    shape: tuple[int, ...] = getattr(out, "shape", ())
    return int(shape[0]) if len(shape) == 2 else 0


def _check_flag(operation: str, deterministic: object) -> None:
    if not isinstance(deterministic, bool):
        raise TypeError(explain(operation, "deterministic", "be a Python bool", repr(deterministic)))


FORWARD = Operation(
    "fe_attention",
    contract.FORWARD,
    reference="fe_attention.reference.csa:csa_compressor_forward",
    find_kernel=contract.find_kernel,
    check_values=contract.check_prefixes,
    jax_entry="fe_attention.csa_compressor_forward_jax",
)

BACKWARD = Operation(
    "fe_attention",
    contract.BACKWARD,
    reference="fe_attention.reference.csa:csa_compressor_backward",
    find_kernel=contract.find_backward_kernel,
    check_values=contract.check_prefixes,
    jax_entry="fe_attention.csa_compressor_backward_jax",
)

ACCUMULATING = Operation(
    "fe_attention",
    contract.ACCUMULATING,
    reference="fe_attention.reference.csa:csa_compressor_backward",
    find_kernel=contract.find_accumulating_kernel,
    check_values=contract.check_prefixes,
    jax_entry="fe_attention.csa_compressor_backward_jax",
)

COMPRESSOR = Operation(
    "fe_attention",
    contract.COMPRESSOR,
    reference="fe_attention.reference.csa:csa_compressor_forward",
    find_kernel=contract.find_kernel,
    gradient=Gradient(
        BACKWARD,
        residuals=("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp"),
        wrt=("kv", "score", "ape"),
        outputs=("out",),
        options=("ratio", "head_dim", "coff"),
    ),
    check_values=contract.check_prefixes,
    jax_entry="fe_attention.csa_compressor_jax",
)
