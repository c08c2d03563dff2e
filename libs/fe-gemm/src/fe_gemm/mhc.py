"""``mhc_projection_backward``: gradients of the flattened residual input and of the projection weight of
manifold-constrained hyper-connections."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime import workspace as scratch_memory
from fe_runtime.api_base import APIBase
from fe_runtime.arrays import byte_range, is_jax_array, is_torch_tensor
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.errors import InvalidArgumentError, NotSupportedError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Form, Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

from .planning import mhc as launch

__all__ = ["OPERATION", "MhcProjectionBackward", "mhc_projection_backward", "mhc_projection_backward_jax"]

NAME = "mhc_projection_backward"
ALIGNMENT = 16
"""Bytes at a multiple of which every operand on a GPU starts."""


class OperandError(NotSupportedError, InvalidArgumentError):
    """An operand of a shape, dtype or stride that the operation does not take.

    The peer says ``NotImplementedError`` when the operation is declared and ``ValueError`` when it runs: it is both.
    """


def mhc_projection_backward(
    x: Any,
    weight: Any,
    grad_proj: Any,
    grad_r: Any,
    r: Any,
    *,
    allow_tf32: bool = False,
    backend: str = "frost",
    current_stream: Any = None,
) -> TupleDict:
    """Return the gradients of the residual input, with the term through its root mean square, and of the weight.

    ``dx = bf16(grad_r * (1 / (r * Kc)) * x + P @ weight)`` and ``dweight = P^T @ x``, where ``P = grad_proj[:, :N]``.

    Parameters
    ----------
    x
        (M, Kc) bfloat16, Kc a positive multiple of 8.
    weight
        (N, Kc) float32, N from 1 to 64.
    grad_proj
        (M, Np) float32, Np >= N; columns from N on are ignored, NaN too.
    grad_r, r
        (M, 1) float32; r > 0 is the root mean square of a row.
    allow_tf32
        Must be ``True``: permission to round ``P`` and ``weight`` to TF32 in dx.
    backend
        ``"frost"`` or ``"auto"``: the best there is; ``"reference"``, or a kernel backend such as ``"sm90"``.
    current_stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).

    Returns
    -------
    TupleDict
        ``dx`` (M, Kc) bfloat16, ``dweight`` (N, Kc) float32.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        Operands overlap, are misaligned (16 bytes, on a GPU) or on different devices, or an option is unknown.
    NotSupportedError
        ``allow_tf32`` is not ``True``; or a shape, dtype or stride, which is an ``InvalidArgumentError`` too.

    Notes
    -----
    All arrays are contiguous. Errors of a kernel, relative to the norm of the result, stay below 3e-3 for dx (its
    rounding to bf16 is most of that) and below 1e-4 for dweight, as P is split into two bf16 terms and x is exact. The
    order of all sums is fixed: results are the same from run to run. M = 0 gives zeros for dweight. A new M never
    compiles anything. Not differentiable: a gradient is neither recorded nor refused.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: mHC projection backward.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> x, one = np.ones((2, 8), ml_dtypes.bfloat16), np.ones((2, 1), np.float32)
    >>> w, grad_proj = np.ones((3, 8), np.float32), np.ones((2, 4), np.float32)
    >>> dx, dweight = mhc_projection_backward(x, w, grad_proj, 8 * one, one, allow_tf32=True)
    >>> float(dx[0, 0]), float(dweight[0, 0])
    (4.0, 2.0)
    """
    arrays = (x, weight, grad_proj, grad_r, r)
    if not _is_tracing() and not is_jax_array(x):
        _reject_overlap(CONTRACT.input_names, arrays)
    options = {"allow_tf32": allow_tf32 is True}
    return OPERATION(arrays, options, stream=current_stream, backend=_resolved(backend))


class MhcProjectionBackward(APIBase):
    """The gradients into the caller's outputs, with the caller's workspace; see :func:`mhc_projection_backward`.

    The number of rows may change between executions; everything else is fixed.
    """

    def __init__(
        self,
        x: Any,
        weight: Any,
        grad_proj: Any,
        grad_r: Any,
        r: Any,
        dx: Any,
        dweight: Any,
        *,
        allow_tf32: bool = False,
        backend: str = "frost",
    ) -> None:
        self._scratch: scratch_memory.Scratch = ()
        self._call = threading.local()
        options = {"allow_tf32": allow_tf32 is True}
        super().__init__(OPERATION, (x, weight, grad_proj, grad_r, r), (dx, dweight), options, _resolved(backend))

    def compile(self) -> MhcProjectionBackward:  # type: ignore[override]
        """Build the kernel, once, and return the object."""
        super().compile()
        return self

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of the workspace that ``execute`` needs; the number of rows does not matter."""
        self.check_support()
        return scratch_memory.size(self._scratch)

    def execute(
        self,
        x: Any,
        weight: Any,
        grad_proj: Any,
        grad_r: Any,
        r: Any,
        dx: Any,
        dweight: Any,
        workspace: Any = None,
        current_stream: Any = None,
    ) -> TupleDict:
        """Write the result into ``dx`` and ``dweight`` and return them; no allocation, no synchronisation.

        ``workspace`` is a contiguous uint8 vector of at least :meth:`scratch_workspace_bytes`, 16-byte aligned on a
        GPU, that no other execution uses at the same time.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand is not as the compiled descriptor says, operands overlap, or the workspace does not do.
        """
        self._call.workspace, self._call.on_stream = workspace, current_stream is not None
        try:
            self._execute((x, weight, grad_proj, grad_r, r), (dx, dweight), current_stream)
        finally:
            self._call.workspace = None
        return TupleDict.of(CONTRACT.output_names, (dx, dweight))

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        kernel = plan.kernel or find_kernel(bound, HOPPER)
        if isinstance(kernel, Kernel):  # the reference needs none, but what passes there passes on a GPU
            self._scratch = kernel.form.scratch

    def _admit(self, *arguments: Any, **keywords: Any) -> Callable[..., None]:
        try:
            return super()._admit(*arguments, **keywords)
        except (InvalidArgumentError, NotSupportedError) as error:
            text = f"{error} All operands must be as the compiled descriptor says, but for M."
            raise InvalidArgumentError(text) from error

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], *others: Any
    ) -> Callable[..., None]:
        """Return the launch that checks what the contract does not know of, and hands the workspace to the kernel."""
        call, scratch, names = self._call, self._scratch, (*CONTRACT.input_names, *CONTRACT.output_names, "workspace")
        needed, index = scratch_memory.size(scratch), live.device.index or 0

        def run_in_workspace(*operands: Any) -> None:
            run(*operands, *_cut(call.workspace, scratch, index))

        if kernel is not None:
            kernel = replace(kernel, form=replace(kernel.form, scratch=()))
        launch_kernel = super()._launch(live, kernel, run_in_workspace, *others)

        def launch_checked(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
            scratch_memory.check(NAME, call.workspace, needed, live)
            _reject_overlap(names, (*arrays, *outputs, call.workspace))
            if call.on_stream:
                scratch_memory.record_stream(call.workspace)
            launch_kernel(arrays, outputs)

        return launch_checked


def mhc_projection_backward_jax(
    x: Any,
    weight: Any,
    grad_proj: Any,
    grad_r: Any,
    r: Any,
    *,
    allow_tf32: bool = False,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Return the gradients for JAX arrays, eagerly or under ``jit``.

    Same formulas, dtypes and errors as :func:`mhc_projection_backward`; the options are static.

    Returns
    -------
    tuple
        ``(dx, dweight)``.
    """
    from fe_runtime.jax.entry import entry

    options = {"allow_tf32": allow_tf32 is True}
    dx, dweight = entry(OPERATION, (x, weight, grad_proj, grad_r, r), options, _resolved(backend))
    return dx, dweight


def _resolved(backend: str) -> str:
    """Return the runtime's name of a backend: the peer's only one, ``"frost"``, means ``"auto"``."""
    return "auto" if isinstance(backend, str) and backend == "frost" else backend


def _is_tracing() -> bool:
    """Whether torch.compile traces: then there are no addresses."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_dynamo_compiling()


def _reject_overlap(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raise if two operands, which are contiguous, share a byte, inputs too."""
    spans = sorted((*_span(array), name) for name, array in zip(names, arrays, strict=True))
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            given = f"{second} overlapping {first}"
            raise InvalidArgumentError(explain(NAME, second, f"not share memory with {first}", given, "Pass a copy."))


def _span(array: Any) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the one after its last; (0, 0) if it has none."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and type(array) is torch.Tensor and array.is_contiguous():  # without the general way
            start = array.data_ptr()
            return (start, start + array.nbytes) if start else (0, 0)
        start, stop = byte_range(array)
    except (InvalidArgumentError, TypeError, RuntimeError, AttributeError):  # no address, or no array
        return 0, 0
    return (start, stop) if start < stop else (0, 0)


def _cut(workspace: Any, scratch: scratch_memory.Scratch, index: int) -> list[Any]:
    """Return the workspace as the one matrix that the kernel writes; ``index`` is the device's."""
    if is_torch_tensor(workspace):
        return scratch_memory.cut(workspace, scratch)
    if is_jax_array(workspace):
        from fe_runtime.jax.in_place import BufferView

        return [BufferView(workspace, *scratch[0], index)]
    rule = "be a torch or JAX array"
    raise InvalidArgumentError(explain(NAME, "workspace", rule, "another DLPack producer", "Convert it."))


def _narrowed(call: Mapping[str, Any], columns: int, *names: str) -> dict[str, Any]:
    """Cut operands of a valid call to some columns, to build one that breaks a rule."""
    return {**call, **{name: call[name][:, :columns].copy() for name in names}}


def _with_many_coefficients(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "weight": call["weight"][[0] * (launch.MOST_COEFFICIENTS + 1)]}


CONTRACT = Contract(
    operation=NAME,
    inputs=(
        Input("x", "M Kc", ("bfloat16",), alignment=ALIGNMENT, doc="flattened residual input"),
        Input("weight", "N Kc", ("float32",), alignment=ALIGNMENT, doc="coefficient projection"),
        Input("grad_proj", "M Np", ("float32",), alignment=ALIGNMENT, doc="gradient of the coefficients, then padding"),
        Input("grad_r", "M 1", ("float32",), alignment=ALIGNMENT, doc="gradient of the root mean square"),
        Input("r", "M 1", ("float32",), alignment=ALIGNMENT, doc="root mean square of each row"),
    ),
    options=(
        Option(
            "allow_tf32",
            bool,
            False,
            holds=lambda allowed: allowed is True,
            rule="be True: the products are computed on tensor cores",
            invalid=(False,),
            error=NotSupportedError,
            doc="permission to round the coefficients and the weight to TF32",
        ),
    ),
    outputs=(
        Output(
            "dx",
            lambda bound: OutputSpec((bound.dim("M"), bound.dim("Kc")), "bfloat16", alignment=ALIGNMENT),
            doc="gradient of x",
        ),
        Output(
            "dweight",
            lambda bound: OutputSpec((bound.dim("N"), bound.dim("Kc")), "float32", alignment=ALIGNMENT),
            doc="gradient of the weight",
        ),
    ),
    rules=(
        Rule(
            "x",
            "have a positive multiple of 8 columns",
            holds=lambda bound: bound.dim("Kc") > 0 and bound.dim("Kc") % 8 == 0,
            given=lambda bound: f"Kc = {bound.dim('Kc')}",
            fix="Pad the columns.",
            error=OperandError,
            violation=lambda call: _narrowed(call, 12, "x", "weight"),
        ),
        Rule(
            "weight",
            f"have 1 to {launch.MOST_COEFFICIENTS} rows",
            holds=lambda bound: 0 < bound.dim("N") <= launch.MOST_COEFFICIENTS,
            given=lambda bound: f"N = {bound.dim('N')}",
            fix="Split the coefficients over several calls.",
            error=OperandError,
            violation=_with_many_coefficients,
        ),
        Rule(
            "grad_proj",
            "have a column for each row of weight",
            holds=lambda bound: bound.dim("Np") >= bound.dim("N"),
            given=lambda bound: f"{bound.dim('Np')} columns for N = {bound.dim('N')}",
            fix="Pass the gradients of all coefficients.",
            error=OperandError,
            violation=lambda call: _narrowed(call, 1, "grad_proj"),
        ),
    ),
    dynamic=("M",),
    errors=dict.fromkeys(("rank", "shape", "layout", "dtype"), OperandError),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one for each N and Kc, for any number of rows and of columns of grad_proj."""
    m, n, columns = (bound.dim(letter) for letter in ("M", "N", "Kc"))
    if n * columns >= 2**31:
        return NoKernel("the weight has 2^31 elements or more", "Split its columns over several calls.")
    problem = launch.Problem(n, columns)
    how = launch.choose(problem, target.arch, target.sm_count)
    config = launch.config(problem, how)
    spec = KernelSpec.of(f"fe_gemm.{NAME}", f"fe_gemm.kernels.{NAME}:build", target.arch, **config)
    form = Form(
        inputs=((m, columns), (n, columns), (m, bound.dim("Np")), (m,), (m,)),
        outputs=((m, columns), (n, columns)),
        scratch=(((how.splits, n * columns), "float32"),),
    )
    return Kernel(spec, form)


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference=f"fe_gemm.reference.{NAME}:{NAME}",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.mhc_projection_backward_jax",
    stream_argument="current_stream",
)
