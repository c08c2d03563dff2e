"""``gemm_swiglu_backward``: the gradients of ``gemm_swiglu`` without scales, for autograd and ``jax.grad``."""

from __future__ import annotations

from collections.abc import Mapping

from fe_gemm.planning import swiglu_backward as launch
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound, Contract, Output, OutputSpec
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.strides import has_order

from . import contract as common

__all__ = ["CONTRACT", "GRADIENT", "OPERATION"]

FLOATS = ("float16", "bfloat16", "float32")
"""Operands that have gradients."""
STORED = (*common.WIDE, *common.FP8)


def _gradient_of(bound: Bound, name: str) -> OutputSpec:
    """Return an output like an input: its shape and dtype, the same dimension contiguous."""
    desc = bound.arrays[name]
    order = common.operand_a(FLOATS).layout.order(desc.shape, desc.stride)
    return OutputSpec(desc.shape, desc.dtype, order=order)


CONTRACT = Contract(
    operation="gemm_swiglu_backward",
    inputs=(
        common.input_matrix("dc", "M H L", ("float16", "bfloat16"), doc="gradient of C"),
        common.input_matrix("dab12", "M N L", STORED, optional=True, doc="gradient of AB12; none by default"),
        common.operand_a(FLOATS),
        common.operand_b(FLOATS),
        common.input_matrix("ab12", "M N L", STORED, doc="product as the forward stored it"),
    ),
    options=(common.ALPHA,),
    outputs=(
        Output("da", lambda bound: _gradient_of(bound, "a_tensor"), doc="gradient of A"),
        Output("db", lambda bound: _gradient_of(bound, "b_tensor"), doc="gradient of B"),
    ),
    rules=common.EXTENTS,
    dynamic=("M",),
    derived={"H": lambda bound: bound.dim("N") // 2},
)


BUILDER = "fe_gemm.kernels.sm90.swiglu_backward:build"
DIRECT = ("float16", "bfloat16")
MOST_VALUES = 2**35
"""Values of AB12 that the pass over it can count in vectors: 128 GiB with its own result."""


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernel: one for dtypes and majors, and for the tiles that suit N and K; for any rows."""
    if target.capability != (9, 0):
        return NoKernel("the kernel needs a Hopper GPU", "Use a GPU of compute capability 9.0.", ((9, 0),))
    if bound.dtype("a_tensor") not in DIRECT:
        reason = f"there is no kernel for {bound.dtype('a_tensor')} operands"
        return NoKernel(reason, "Use float16 or bfloat16 operands.")
    m, n, k, batches = map(bound.dim, "MNKL")
    if m * n * batches >= MOST_VALUES:
        return NoKernel("AB12 has 2^35 values or more", "Split the rows.")
    problem = _problem(bound)
    how = launch.plan(problem, n, k, target.arch, target.sm_count)
    spec = KernelSpec.of("fe_gemm.gemm_swiglu_backward", BUILDER, target.arch, **launch.config(how))
    form = Form(
        inputs=tuple(tuple(desc.shape) for desc in bound.arrays.values()),
        outputs=tuple(spec.shape for spec in bound.outputs if spec is not None),
        scalars=("alpha",),
        scratch=((launch.workspace_shape(problem, m, n, batches), problem.dtype),),
    )
    return Kernel(spec, form)


def _problem(bound: Bound) -> launch.Problem:
    dtypes = {name: desc.dtype for name, desc in bound.arrays.items()}
    return launch.Problem(
        dtype=dtypes["a_tensor"],
        dc_dtype=dtypes["dc"],
        ab12_dtype=dtypes["ab12"],
        dab12_dtype=dtypes.get("dab12"),
        a_major=_major(bound, "a_tensor", "km"),
        b_major=_major(bound, "b_tensor", "kn"),
        major=_major(bound, "dc", "nm"),
        ab12_major=_major(bound, "ab12", "nm"),
        dab12_major=_major(bound, "dab12", "nm"),
    )


def _major(bound: Bound, name: str, letters: str) -> str:
    """Return the letter of the contiguous dimension; that of the second dimension comes first, and is the default."""
    desc = bound.arrays.get(name)
    return letters[0] if desc is None or has_order(desc.shape, desc.stride, common.ORDERS["n"]) else letters[1]


OPERATION = Operation(
    "fe_gemm",
    CONTRACT,
    reference="fe_gemm.reference.swiglu_backward:gemm_swiglu_backward",
    find_kernel=find_kernel,
    jax_entry="fe_gemm.gemm_swiglu_jax",
)


def _has_gradient(dtypes: Mapping[str, str]) -> bool:
    return dtypes["a_tensor"] in FLOATS and "sfa_tensor" not in dtypes


GRADIENT = Gradient(
    OPERATION,
    residuals=("a_tensor", "b_tensor", "ab12_tensor"),
    wrt=("a_tensor", "b_tensor"),
    outputs=("c_tensor", "ab12_tensor"),
    options=("alpha",),
    applies=_has_gradient,
)
