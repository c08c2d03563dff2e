"""From a checked call of a dense operation to its Hopper kernel: metadata only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fe_gemm.planning import dense as dense_launch
from fe_gemm.planning.dense import Dense, Operands
from fe_gemm.planning.few_rows import FewRows, choose_few_rows
from fe_gemm.planning.launches import choose_launches
from fe_gemm.planning.problem import Problem
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits
from fe_runtime.plan import Form, Kernel, NoKernel, Target

from .plan import Product, describe

__all__ = ["find_dense"]

BUILDER = "fe_gemm.kernels.sm90.dense:build"
FP8 = ("float8_e4m3fn", "float8_e5m2")
OPERANDS = {"a_tensor": "a", "b_tensor": "b", "sfa_tensor": "sfa", "sfb_tensor": "sfb"}


def find_dense(
    bound: Bound, target: Target, names: tuple[str, ...], roles: Mapping[str, str], epilogue: str = "none"
) -> Kernel | NoKernel:
    """Plan the kernel of a dense operation.

    Parameters
    ----------
    bound, target
        The call and the GPU.
    names
        The contract's outputs, in order.
    roles
        What the inputs beside the operands and the outputs are to the epilogue, by their names in the contract:
        ``pre``, ``c``, ``upstream``, ``prob``, ``norm_const``, ``dprob``, ``amax``, ``scales``.
    epilogue
        Name of the epilogue (:class:`fe_gemm.planning.problem.Problem`).
    """
    if target.capability != (9, 0):
        return NoKernel("the kernel needs a Hopper GPU", "Use a GPU of compute capability 9.0.", ((9, 0),))
    product = describe(bound, names)
    operands = _operands(product)
    problem = _problem(product, operands, roles, epilogue, "alpha" in bound.options)
    _, n, k, _ = product.extents
    launches = choose_launches(problem, n, k * operands.parts, target.arch, target.sm_count)
    few = FewRows()
    if operands.form is not None:
        few = choose_few_rows(problem, operands.form, n, k, target.arch, target.sm_count)
    dense = Dense(problem, launches, target.sm_count, (), operands, few)
    dense = replace(dense, arguments=_arguments(bound, names, roles, dense))
    spec = KernelSpec.of(f"fe_gemm.{bound.operation}", BUILDER, target.arch, **dense_launch.config(dense))
    return Kernel(spec, _form(bound, names, roles, dense))


def _operands(product: Product) -> Operands:
    """Return how the operands are brought to the core; its tensor cores take fp8 only with contiguous K."""
    dtype, scales = product.a.dtype, product.scales
    if scales is not None:
        return Operands("blocks", dtype, scales.dtype, scales.vec)
    if dtype == "float32":
        return Operands("split", dtype)
    if dtype in FP8 and (product.a.major, product.b.major) != ("k", "k"):
        return Operands("values", dtype)
    return Operands()


def _problem(product: Product, operands: Operands, roles: Mapping[str, str], epilogue: str, has_alpha: bool) -> Problem:
    matrices = {roles[name]: matrix for name, matrix in product.matrices.items()}
    vectors = {roles[name]: dtype for name, dtype in product.vectors.items()}
    dtypes = {role: None if role not in matrices else _packed(matrices[role].dtype) for role in ("pre", "upstream")}
    return Problem(
        dtype=product.a.dtype if operands.way == "direct" else "bfloat16",
        c_dtype=_packed(matrices["c"].dtype),
        a_major=product.a.major,
        b_major=product.b.major,
        c_major=matrices["c"].major,
        epilogue=epilogue,
        pre_dtype=dtypes["pre"],
        upstream_dtype=dtypes["upstream"],
        alpha=has_alpha,
        amax="amax" in vectors,
        scale_dtype=vectors.get("scales"),
        accumulates="amax" in vectors or "dprob" in vectors,
    )


def _packed(dtype: str) -> str:
    """Return the dtype of the values of a result; a container of bytes holds FP4 pairs."""
    return "float4_e2m1fn" if dtype in ("uint8", "float4_e2m1fn_x2") else dtype


def _arguments(bound: Bound, names: tuple[str, ...], roles: Mapping[str, str], dense: Dense) -> tuple[str, ...]:
    """Return the names of the kernel's arguments, in the runtime's order."""
    known = {**OPERANDS, **roles}
    there = [(known[name], spec) for name, spec in zip(names, bound.outputs, strict=True) if spec is not None]
    return (
        *(known[name] for name in bound.arrays),
        *(f"old_{role}" for role, spec in there if spec.accumulate),
        *(role for role, _ in there),
        *dense.scratch(*map(bound.dim, "MNKL")),
        *dense.problem.scalars,
    )


def _form(bound: Bound, names: tuple[str, ...], roles: Mapping[str, str], dense: Dense) -> Form:
    return Form(
        inputs=tuple(_input_shape(bound, name) for name in bound.arrays),
        outputs=tuple(
            None if spec is None else _flat(spec.shape) if roles[name] in ("amax", "scales") else spec.shape
            for name, spec in zip(names, bound.outputs, strict=True)
        ),
        scalars=dense.problem.scalars,
        scratch=tuple(dense.scratch(*map(bound.dim, "MNKL")).values()),
    )


def _input_shape(bound: Bound, name: str) -> tuple[int, ...]:
    """Return the shape in which a kernel sees an input: packed pairs as bytes, scales as a vector of bytes."""
    desc = bound.arrays[name]
    if name in ("sfa_tensor", "sfb_tensor"):
        return _flat(desc.shape)
    if bits(desc.dtype) == 4:
        rows, columns, batches = desc.shape
        return rows, columns // 2, batches
    return tuple(desc.shape)


def _flat(shape: tuple[int, ...]) -> tuple[int]:
    count = 1
    for extent in shape:
        count *= extent
    return (count,)
