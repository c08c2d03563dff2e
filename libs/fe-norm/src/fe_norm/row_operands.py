"""What the contracts and plans of the row operations share: options, rules, and how their arrays reach a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fe_runtime import KernelSpec
from fe_runtime.contract import Bound, Option, Rule, merged_strides
from fe_runtime.dtypes import bits
from fe_runtime.plan import Form, Kernel, Target

from . import launch_backward

__all__ = ["EPS", "FLOATS", "alignment", "backward_kernel", "copied", "some_columns"]

FLOATS = ("bfloat16", "float16", "float32")

EPS = Option(
    "eps",
    float,
    1e-5,
    holds=lambda eps: isinstance(eps, float) and 0 <= eps < float("inf"),
    rule="be a finite number >= 0",
    invalid=(-1.0, float("nan"), float("inf")),
    runtime=True,
    doc="added to the mean square",
)


def some_columns(argument: str, letter: str, violation: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Rule:
    """Return the rule that a row is not empty; ``violation`` cuts a valid call down to no columns."""
    return Rule(
        argument,
        "have at least one column",
        holds=lambda bound: bound.dim(letter) > 0,
        given=lambda bound: f"shape {bound.given[argument]}",
        fix="The mean square of an empty row is undefined.",
        violation=violation,
    )


def copied(bound: Bound, *names: str) -> tuple[str, ...]:
    """Return those of the arrays whose leading dimensions do not merge into rows of one stride."""
    arrays = {name: bound.arrays[name] for name in names if bound.has(name)}
    return tuple(name for name, array in arrays.items() if merged_strides(array.shape, array.stride) is None)


def alignment(bound: Bound, *names: str) -> int:
    """Return the largest power of two up to 16 that divides, in bytes, the start of every row of the arrays.

    Absent arrays do not count; those that are copied count as the copies.
    """
    apart = copied(bound, *names)
    return min([16, *(_of_copy(bound, n) if n in apart else bound.alignments.get(n, 16) for n in names)])


def backward_kernel(
    bound: Bound,
    target: Target,
    arrays: tuple[str, str, str, str],
    *,
    activation: str | None,
    dresidual: str = "",
    rstd: str = "",
) -> Kernel:
    """Plan the gradient of a row operation: one kernel per row length, dtypes and alignment, for any rows.

    Parameters
    ----------
    bound, target
        The call and the GPU.
    arrays
        Contract names of the output's gradient, x, weight and bias.
    activation
        ``None`` or ``"silu"``.
    dresidual, rstd
        Contract names of the gradient of the sum and of the reciprocal root mean squares, where there are such inputs.
    """
    dout, x, weight, bias = arrays
    problem = launch_backward.BackwardProblem(
        columns=bound.arrays[x].shape[-1],
        x_dtype=bound.arrays[x].dtype,
        dout_dtype=bound.arrays[dout].dtype,
        weight_dtype=bound.dtype(weight),
        bias_dtype=bound.dtype(bias),
        activation=activation,
        has_residual=bound.has(dresidual),
        has_rstd=bound.has(rstd),
        x_alignment=alignment(bound, x, dresidual),
        dout_alignment=alignment(bound, dout),
        weight_alignment=alignment(bound, weight, bias),
    )
    how = launch_backward.choose(problem, target.arch, target.sm_count)
    config = launch_backward.config(problem, how)
    builder = "fe_norm.kernels.rms_rows_backward:build"
    spec = KernelSpec.of(f"fe_norm.{bound.operation}", builder, target.arch, **config)
    rows, columns = bound.rows, problem.columns
    sums = ((launch_backward.partial_rows(how, rows), columns), "float32")
    forms = dict.fromkeys((weight, bias), (columns,)) | {rstd: (rows,)}
    form = Form(
        inputs=tuple(forms.get(name, (rows, columns)) for name in bound.arrays),
        outputs=((rows, columns), *((columns,) if bound.has(name) else None for name in (weight, bias))),
        scalars=() if problem.has_rstd else ("eps",),
        scratch=(sums,) * problem.sums,
        related=True,
    )
    return Kernel(spec, form, copied(bound, dout, dresidual, x))


def _of_copy(bound: Bound, name: str) -> int:
    row_bytes = bound.arrays[name].shape[-1] * bits(bound.arrays[name].dtype) // 8
    return row_bytes & -row_bytes
