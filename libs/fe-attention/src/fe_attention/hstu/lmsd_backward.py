"""``hstu_lmsd_backward``: the gradients of LMSD."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fe_attention.planning import lmsd_backward as launch
from fe_runtime import KernelSpec
from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Form, Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

from .lmsd_contract import BACKWARD_CONTRACT, has_dropout
from .lmsd_workspace import Workspaces

__all__ = ["BACKWARD", "HSTULMSDBwd", "hstu_lmsd_backward", "hstu_lmsd_backward_jax", "problem_of"]


def hstu_lmsd_backward(
    dy_tensor: Any,
    x_tensor: Any,
    u_tensor: Any,
    weight_tensor: Any,
    bias_tensor: Any,
    mean_tensor: Any,
    rstd_tensor: Any,
    mask_tensor: Any,
    dropout_ratio: float | None = None,
    stream: Any = None,
    dx_tensor: Any = None,
    du_tensor: Any = None,
    dweight_tensor: Any = None,
    dbias_tensor: Any = None,
    apply_u_silu: bool | None = None,
    concat_u: bool | None = None,
    concat_x: bool | None = None,
    compute_dweight: bool = True,
    *,
    backend: str = "auto",
) -> TupleDict:
    """Return the gradients of :func:`fe_attention.hstu_lmsd_forward`.

    With ``g`` the parts of dy, each times ``1/(1 - p)`` where its bit of the mask is set and 0 elsewhere,
    ``xh = x*rstd - mean*rstd``, ``ln = xh*weight + bias``, ``gln = g_product*a`` and ``wd = weight*gln``:
    ``du = (g_product*ln + g_u)*a'``, ``dx = g_x + (wd - xh*mean_D(xh*wd) - mean_D(wd))*rstd``,
    ``dweight = sum over rows of gln*xh``, ``dbias = sum over rows of gln``, in fp32, each rounded once.

    Parameters
    ----------
    dy_tensor
        (N, parts * D) bfloat16, gradient of y; rows of stride 1 at any distance that is a multiple of 8 elements.
    x_tensor, u_tensor, weight_tensor, bias_tensor
        As given to the forward.
    mean_tensor, rstd_tensor, mask_tensor
        As the forward returned them; the mask is ``None`` if, and only if, ``dropout_ratio`` is 0.
    dropout_ratio, apply_u_silu, concat_u, concat_x
        As given to the forward. They must be given: ``None`` is refused.
    stream
        ``None`` for the framework's current stream, or a stream (torch, raw handle, ``__cuda_stream__``).
    dx_tensor, du_tensor
        ``None``, or where to write these results: (N, D) bfloat16, rows as for x.
    dweight_tensor, dbias_tensor
        ``None``, or where to write these results: (D,) bfloat16, contiguous.
    compute_dweight
        Whether the gradient of the weight is wanted.
    backend
        ``"auto"``, ``"reference"`` or a kernel backend such as ``"sm90"``.

    Returns
    -------
    TupleDict
        ``dx_tensor`` and ``du_tensor`` (N, D), ``dweight_tensor`` (D,) or ``None``, ``dbias_tensor`` (D,), bfloat16:
        the arrays given, where there are some.

    Raises
    ------
    TypeError
        An argument of the wrong kind.
    InvalidArgumentError
        An option was left out; shapes, strides, dtypes, devices, addresses (multiples of 16 bytes on a GPU) or options
        break the contract; ``dweight_tensor`` is given but not wanted; or results overlap other operands.

    Notes
    -----
    Sums over rows are made in fp32, in an order that depends on the GPU model and N only: the same bits in every run.
    No rows give zeros for dweight and dbias. No derivative of its own.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: HSTU LMSD.
    """
    options = {
        "dropout_ratio": dropout_ratio,
        "apply_u_silu": apply_u_silu,
        "concat_u": concat_u,
        "concat_x": concat_x,
    }
    missing = [name for name, value in options.items() if value is None]
    if missing:
        fix = "Pass what the forward was given."
        rule = "be given: the gradient depends on it"
        raise InvalidArgumentError(explain(BACKWARD_CONTRACT.operation, ", ".join(missing), rule, "None", fix))
    arrays = (
        dy_tensor,
        x_tensor,
        u_tensor,
        weight_tensor,
        bias_tensor,
        mean_tensor,
        rstd_tensor,
        mask_tensor,
    )
    given = (dx_tensor, du_tensor, dweight_tensor, dbias_tensor)
    options["compute_dweight"] = compute_dweight
    outputs = BACKWARD.outputs_into(arrays, given, options, stream=stream, backend=backend)
    return TupleDict.of(BACKWARD.output_names, outputs)


class HSTULMSDBwd(APIBase):
    """The gradients into the caller's outputs, with the caller's workspaces; see :func:`hstu_lmsd_backward`.

    The number of rows and their strides may change between executions. Each workspace is (R, D) float32, contiguous,
    with R at least :attr:`workspace_rows`; that of dweight is ``None`` if dweight is not wanted. Nothing else may use
    them during an execution.
    """

    def __init__(
        self,
        sample_dy: Any,
        sample_x: Any,
        sample_u: Any,
        sample_weight: Any,
        sample_bias: Any,
        sample_mean: Any,
        sample_rstd: Any,
        sample_mask: Any,
        sample_dx: Any,
        sample_du: Any,
        sample_dweight: Any,
        sample_dbias: Any,
        sample_dweight_workspace: Any,
        sample_dbias_workspace: Any,
        dropout_ratio: float = 0.1,
        apply_u_silu: bool = True,
        concat_u: bool = True,
        concat_x: bool = True,
        compute_dweight: bool = True,
        *,
        backend: str = "auto",
    ) -> None:
        self._call = threading.local()
        options = {
            "dropout_ratio": dropout_ratio,
            "apply_u_silu": apply_u_silu,
            "concat_u": concat_u,
            "concat_x": concat_x,
            "compute_dweight": compute_dweight,
        }
        inputs = (
            sample_dy,
            sample_x,
            sample_u,
            sample_weight,
            sample_bias,
            sample_mean,
            sample_rstd,
            sample_mask,
        )
        outputs = (sample_dx, sample_du, sample_dweight, sample_dbias)
        self._samples = Workspaces.described(sample_dweight_workspace, sample_dbias_workspace)
        super().__init__(BACKWARD, inputs, outputs, options, backend)

    @property
    def workspace_rows(self) -> int:
        """R: how many rows a workspace needs, whatever the number of rows of x; it depends on the GPU and D."""
        return _workspace_rows(*self._planned())

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of both workspaces together."""
        bound, plan = self._planned()
        matrices = 1 + bool(bound.options["compute_dweight"])
        return matrices * _workspace_rows(bound, plan) * bound.dim("D") * 4

    def execute(
        self,
        dy_tensor: Any,
        x_tensor: Any,
        u_tensor: Any,
        weight_tensor: Any,
        bias_tensor: Any,
        mean_tensor: Any,
        rstd_tensor: Any,
        mask_tensor: Any,
        dx_tensor: Any,
        du_tensor: Any,
        dweight_tensor: Any,
        dbias_tensor: Any,
        dweight_workspace: Any,
        dbias_workspace: Any,
        current_stream: Any = None,
    ) -> None:
        """Write the gradients into the outputs; no allocation, no synchronisation.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand differs from the compiled signature, a workspace does not do, or what is written overlaps
            another operand.
        """
        arrays = (
            dy_tensor,
            x_tensor,
            u_tensor,
            weight_tensor,
            bias_tensor,
            mean_tensor,
            rstd_tensor,
            mask_tensor,
        )
        outputs = (dx_tensor, du_tensor, dweight_tensor, dbias_tensor)
        self._call.workspaces = Workspaces(dweight_workspace, dbias_workspace)
        self._call.on_stream = current_stream is not None
        try:
            self._execute(arrays, outputs, current_stream)
        finally:
            self._call.workspaces = None

    def _planned(self) -> tuple[Bound, Plan]:
        """Return the checked samples and their plan, whatever workspaces there are."""
        bound = self._operation.bind(self._inputs, self._options)
        return bound, self._operation.plan(bound, self._backend)

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        self._samples.check(bound, _workspace_rows(bound, plan))

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], *others: Any
    ) -> Callable[..., None]:
        """Return the launch that checks the workspaces and hands them to the kernel."""
        rows, scratch = _workspace_rows(live, self._check()[1]), () if kernel is None else kernel.form.scratch
        call, scalars = self._call, 0 if kernel is None else len(kernel.form.scalars)
        names = (*BACKWARD_CONTRACT.input_names, *BACKWARD_CONTRACT.output_names)

        def run_in_workspaces(*operands: Any) -> None:
            first = len(operands) - scalars
            held = call.workspaces.cut([shape for shape, _ in scratch], live)
            run(*operands[:first], *held, *operands[first:])

        if kernel is not None:
            kernel = replace(kernel, form=replace(kernel.form, scratch=()))
        launch_kernel = super()._launch(live, kernel, run_in_workspaces, *others)

        def launch_checked(arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
            call.workspaces.check(live, rows)
            call.workspaces.check_overlap(live, zip(names, (*arrays, *outputs), strict=True))
            if call.on_stream:
                call.workspaces.record_stream()
            launch_kernel(arrays, outputs)

        return launch_checked


def hstu_lmsd_backward_jax(
    dy: Any,
    x: Any,
    u: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    mask: Any = None,
    *,
    dropout_ratio: float,
    apply_u_silu: bool,
    concat_u: bool,
    concat_x: bool,
    compute_dweight: bool = True,
    backend: str = "auto",
) -> tuple[Any, Any, Any, Any]:
    """Return the gradients for JAX arrays, eagerly or under ``jit``.

    Same formulas, dtypes and errors as :func:`hstu_lmsd_backward`; all options are static.

    Returns
    -------
    tuple
        ``(dx, du, dweight, dbias)``; ``dweight`` is ``None`` if it is not wanted.
    """
    from fe_runtime.jax.entry import entry

    options = {
        "dropout_ratio": dropout_ratio,
        "apply_u_silu": apply_u_silu,
        "concat_u": concat_u,
        "concat_x": concat_x,
        "compute_dweight": compute_dweight,
    }
    dx, du, dweight, dbias = entry(BACKWARD, (dy, x, u, weight, bias, mean, rstd, mask), options, backend)
    return dx, du, dweight, dbias


def problem_of(bound: Bound) -> dict[str, Any]:
    """Return what the kernels of both directions know of a call."""
    flags = {name: bound.options[name] for name in ("apply_u_silu", "concat_u", "concat_x")}
    ratio = bound.options["dropout_ratio"]
    return {"columns": bound.dim("D"), **flags, "has_dropout": isinstance(ratio, float) and has_dropout(ratio)}


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel for a call: one for each D and set of flags, for any rows and any ratio above 0."""
    rows, columns = bound.dim("N"), bound.dim("D")
    most = launch.most_columns(target.arch)
    if columns > most:
        return NoKernel(f"rows have more than {most} columns", "Use shorter rows.")
    problem = launch.Problem(**problem_of(bound), compute_dweight=bool(bound.options["compute_dweight"]))
    how = launch.choose(problem, target.arch, target.sm_count)
    spec = KernelSpec.of(
        "fe_attention.hstu_lmsd_backward",
        "fe_attention.kernels.lmsd_backward:build",
        target.arch,
        **launch.config(problem, how),
    )
    sums = ((launch.partial_rows(how, rows), columns), "float32")
    form = Form(
        inputs=tuple(array.shape for array in bound.arrays.values()),
        outputs=tuple(None if output is None else output.shape for output in bound.outputs),
        scalars=("dropout_ratio",) if problem.has_dropout else (),
        scratch=(sums,) * (1 + problem.compute_dweight),
    )
    return Kernel(spec, form)


def _workspace_rows(bound: Bound, plan: Plan) -> int:
    """Return the most rows of partial sums that any number of rows of x takes."""
    kernel = plan.kernel or find_kernel(
        bound, HOPPER
    )  # the reference takes none, but what passes there passes on a GPU
    return int(dict(kernel.spec.config)["blocks"] or 0) if isinstance(kernel, Kernel) else 1


BACKWARD = Operation(
    "fe_attention",
    BACKWARD_CONTRACT,
    reference="fe_attention.reference.lmsd:hstu_lmsd_backward",
    find_kernel=find_kernel,
    jax_entry="fe_attention.hstu_lmsd_backward_jax",
)
