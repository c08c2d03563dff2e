"""From a checked call of ``grouped_gemm_wgrad`` to its Hopper kernel: metadata only."""

from __future__ import annotations

from fe_gemm.planning import expand as launch_expand
from fe_gemm.planning import grouped_wgrad
from fe_gemm.planning.dense import Operands
from fe_gemm.planning.grouped_wgrad import Plan, Problem
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.strides import has_order

__all__ = ["find_wgrad"]

BUILDER = "fe_gemm.kernels.sm90.grouped_wgrad:build"
ROLES = {
    "a_tensor": "a",
    "b_tensor": "b",
    "bt_tensor": "b",
    "sfa_tensor": "sfa",
    "sfb_tensor": "sfb",
    "offsets_tensor": "offsets",
    "global_scale_a": "scale_a",
    "global_scale_b": "scale_b",
    "wgrad_tensor": "c",
    "token": "token",
}
"""Names of the kernel's arguments by the contract's; addresses have two, see :func:`_role`."""


def find_wgrad(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel."""
    if target.capability != (9, 0):
        return NoKernel("the kernel needs a Hopper GPU", "Use a GPU of compute capability 9.0.", ((9, 0),))
    problem = _problem(bound)
    launch = grouped_wgrad.choose(problem, bound.dim("M"), bound.dim("N"), target.arch)
    plan = Plan(problem, launch, target.sm_count, _arguments(bound, problem))
    spec = KernelSpec.of(f"fe_gemm.{bound.operation}", BUILDER, target.arch, **grouped_wgrad.config(plan))
    return Kernel(spec, _form(bound, problem))


def _problem(bound: Bound) -> Problem:
    element, operands, turned = bound.arrays["a_tensor"].dtype, Operands(), bound.has("bt_tensor")
    if bound.has("sfa_tensor"):
        operands = Operands("blocks", element, bound.arrays["sfa_tensor"].dtype, int(str(bound.options["sf_vec_size"])))
    return Problem(
        dtype="bfloat16" if bound.has("sfa_tensor") else element,
        c_dtype=str(bound.options["wgrad_dtype"]),
        a_major=_major(bound, "a_tensor", "mk"),
        b_major=_major(bound, "bt_tensor", "nk") if turned else _major(bound, "b_tensor", "kn"),
        accumulates=bool(bound.options["accumulate_on_output"]),
        discrete=bound.has("wgrad_ptrs"),
        ragged=bound.options["input_order"] == "tensor_ragged",
        factors=bound.has("global_scale_a"),
        operands=operands,
        b_turned=turned,
    )


def _major(bound: Bound, name: str, letters: str) -> str:
    """Return the dimension along which a matrix is contiguous, of those that the letters name; the last if in doubt."""
    desc = bound.arrays[name]
    return letters[1] if has_order(desc.shape, desc.stride, (0, 1)) else letters[0]


def _role(bound: Bound, name: str) -> str:
    if name == "wgrad_ptrs":
        return "address_bytes" if bound.arrays[name].dtype == "uint8" else "addresses"
    return ROLES[name]


def _arguments(bound: Bound, problem: Problem) -> tuple[str, ...]:
    """Return the names of the kernel's arguments, in the runtime's order."""
    outputs = [(name, spec) for name, spec in zip(("c", "token"), bound.outputs, strict=True) if spec is not None]
    return (
        *(_role(bound, name) for name in bound.arrays),
        *(f"old_{name}" for name, spec in outputs if spec.accumulate),
        *(name for name, _ in outputs),
        "groups",
        *(f"{name}_values" for name in problem.workspaces),
    )


def _form(bound: Bound, problem: Problem) -> Form:
    m, n, t, experts = map(bound.dim, "MNTE")
    scratch: list[tuple[tuple[int, ...], str]] = [((grouped_wgrad.workspace_bytes(experts),), "uint8")]
    for (_, how), rows in zip(problem.workspaces.items(), (m, n), strict=False):
        scratch.append((launch_expand.workspace_shape(how, rows, t, 1), "bfloat16"))
    return Form(
        inputs=tuple(_input_shape(bound, name) for name in bound.arrays),
        outputs=tuple(None if spec is None else spec.shape for spec in bound.outputs),
        scratch=tuple(scratch),
    )


def _input_shape(bound: Bound, name: str) -> tuple[int, ...]:
    """Return the shape in which a kernel sees an input: packed pairs as bytes."""
    desc = bound.arrays[name]
    if bits(desc.dtype) == 4:
        rows, columns = desc.shape
        return rows, columns // 2
    return tuple(desc.shape)
