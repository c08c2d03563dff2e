"""From a checked call of a grouped product with bf16 operands to its Hopper kernel: metadata only."""

from __future__ import annotations

from collections.abc import Mapping

from fe_gemm.planning import grouped as launch_grouped
from fe_gemm.planning.grouped import Grouped, GroupedProblem
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.strides import has_order

from . import vocabulary as common

__all__ = ["find_grouped"]

BUILDER = "fe_gemm.kernels.sm90.grouped:build"
OPERANDS = {
    "a_tensor": "a",
    "padded_offsets": "offsets",
    "alpha_tensor": "alpha",
    "beta_tensor": "beta",
    "b_tensor": "b",
    "b_ptrs": "addresses",
    "bias_tensor": "bias",
    "prob_tensor": "prob",
}
"""Names of the kernel's arguments by those of the contracts' inputs."""


def find_grouped(
    bound: Bound, target: Target, names: tuple[str, ...], roles: Mapping[str, str], epilogue: str
) -> Kernel | NoKernel:
    """Plan the kernel of a grouped operation.

    Parameters
    ----------
    bound, target
        The call and the GPU.
    names
        The contract's outputs, in order.
    roles
        What the inputs beside the operands and the outputs are to the epilogue, by their names in the contract:
        ``upstream``, ``pre``, ``c``, ``dprob``, ``dbias``, ``act``.
    epilogue
        Name of the epilogue (:class:`fe_gemm.planning.grouped.GroupedProblem`).
    """
    if target.capability != (9, 0):
        return NoKernel("the kernel needs a Hopper GPU", "Use a GPU of compute capability 9.0.", ((9, 0),))
    if bound.dtype("a_tensor") != "bfloat16":
        return NoKernel("the kernels of block-scaled grouped products are not connected yet", "Pass bf16 operands.")
    problem = _problem(bound, names, roles, epilogue)
    if not problem.is_consistent:
        return NoKernel("no grouped kernel serves this combination of results", "Pass backend='reference'.")
    n, k, groups = common.columns(bound), bound.dim("K"), bound.dim("E")
    count = common.multiprocessors(bound.operation, target)
    launches = launch_grouped.choose_launches(problem, n, k, groups, target.arch, count)
    by_bytes = bound.dtype("b_ptrs") == "uint8"
    plan = Grouped(problem, launches, count, (), by_bytes)
    scratch = plan.scratch(groups, bound.dim("M"), n)
    plan = Grouped(problem, launches, count, _arguments(bound, names, roles, problem, tuple(scratch)), by_bytes)
    spec = KernelSpec.of(f"fe_gemm.{bound.operation}", BUILDER, target.arch, **launch_grouped.config(plan))
    return Kernel(spec, _form(bound, names, roles, problem, tuple(scratch.values())))


def _problem(bound: Bound, names: tuple[str, ...], roles: Mapping[str, str], epilogue: str) -> GroupedProblem:
    made = {roles[name]: spec for name, spec in zip(names, bound.outputs, strict=True) if spec is not None}
    upstream = next((bound.dtype(name) for name, role in roles.items() if role == "upstream"), None)
    pre = made.get("pre")
    return GroupedProblem(
        dtype="bfloat16",
        c_dtype=made["c"].dtype,
        b_major=_major(bound),
        epilogue=epilogue,
        pre_dtype=None if pre is None else pre.dtype,
        upstream_dtype=upstream,
        discrete=bound.has("b_ptrs"),
        bias_dtype=bound.dtype("bias_tensor"),
        activation=_activation(bound),
        weighted=bound.has("prob_tensor"),
        beta=bound.has("beta_tensor"),
        rounds=bool(bound.options.get("round_dgrad_to_input_dtype", False)),
        dprob="added" if "dprob" in made else None,
        dbias="added" if "dbias" in made else None,
        keeps="act" in made,
    )


def _activation(bound: Bound) -> str | None:
    name = bound.options.get("act_func")
    return None if name is None else str(name).removeprefix("d")


def _major(bound: Bound) -> str:
    """Return the contiguous dimension of the weights; ``"k"`` if the strides do not tell."""
    if not bound.has("b_tensor"):
        return common.text(bound, "b_major")
    desc = bound.arrays["b_tensor"]
    return "k" if has_order(desc.shape, desc.stride, (0, 1, 2)) else "n"


def _arguments(
    bound: Bound, names: tuple[str, ...], roles: Mapping[str, str], problem: GroupedProblem, scratch: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the kernel's arguments, in the runtime's order."""
    known = {**OPERANDS, **roles}
    there = [(roles[name], spec) for name, spec in zip(names, bound.outputs, strict=True) if spec is not None]
    return (
        *(known[name] for name in bound.arrays),
        *(f"old_{role}" for role, spec in there if spec.accumulate),
        *(role for role, _ in there),
        *scratch,
        *problem.scalars,
    )


def _form(
    bound: Bound,
    names: tuple[str, ...],
    roles: Mapping[str, str],
    problem: GroupedProblem,
    scratch: tuple[tuple[tuple[int, ...], str], ...],
) -> Form:
    rows = bound.dim("M")
    outputs: list[tuple[int, ...] | None] = []
    for name, spec in zip(names, bound.outputs, strict=True):
        if spec is None:
            outputs.append(None)
        elif roles[name] == "dprob":
            outputs.append((rows,))
        else:
            outputs.append(tuple(spec.shape[:2]))
    inputs = tuple(tuple(desc.shape) for desc in bound.arrays.values())
    return Form(inputs=inputs, outputs=tuple(outputs), scalars=problem.scalars, scratch=scratch)
