"""A dense operation's launcher: operands that the tensor cores cannot take are expanded into workspaces, then the
product runs with its epilogue. With few rows, block-scaled operands are multiplied as they are.

The number of rows decides at each call; the workspaces of the other way are not touched then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, cute

from fe_gemm.kernels import convert_operand, expand
from fe_gemm.planning import convert as launch_convert
from fe_gemm.planning import expand as launch_expand
from fe_gemm.planning.dense import Dense, split_config
from fe_runtime.cute.arguments import fake_stream, fake_vector
from fe_runtime.cute.types import storage

from .arguments import aligned, fake_matrices
from .dense_few_rows import FewRowsProduct, fake_sums
from .gemm import Product

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: those that ``config`` names, in its order, and the stream.

    ``config`` is what :func:`fe_gemm.planning.dense.config` returns.
    """
    dense = split_config(config)
    ways = _Ways.of(arch, dense)

    @cute.jit
    def gemm_dense(*arguments: Any) -> None:
        *values, stream = arguments
        _launch(ways, dict(zip(dense.arguments, values, strict=True)), stream)

    fakes = {**ways.operands.fake_arguments(), **_fake_results(ways.product, dense.arguments), "sums": fake_sums()}
    return gemm_dense, (*(fakes[name] for name in dense.arguments), fake_stream())


@dataclass(frozen=True, slots=True)
class _Ways:
    """How the results are made of the operands: through workspaces and the core, and maybe otherwise with few rows."""

    dense: Dense
    operands: _Operands
    product: Product
    few_rows: FewRowsProduct | None

    @classmethod
    def of(cls, arch: str, dense: Dense) -> _Ways:
        few_rows = FewRowsProduct.of(arch, dense.problem, dense.few_rows)
        return cls(dense, _Operands.of(arch, dense), Product(dense.problem, dense.launches), few_rows)

    def launch_core(self, arrays: dict[str, Any], stream: Any) -> None:
        """Launch what fills the workspaces, and the core."""
        a, b = self.operands.ready(arrays, stream)
        values = {name: arrays[name] for name in self.product.names}
        self.product.launch(a, b, values, self.dense.multiprocessors, stream)


@cute.jit
def _launch(ways: cutlass.Constexpr[_Ways], arrays: dict[str, Any], stream: Any) -> None:
    """Take the way for the number of rows."""
    if cutlass.const_expr(ways.few_rows is None):
        ways.launch_core(arrays, stream)
    elif ways.few_rows.serves(arrays["a"]):
        ways.few_rows.launch(arrays, ways.dense.multiprocessors, stream)
    else:
        ways.launch_core(arrays, stream)


@dataclass(frozen=True, slots=True)
class _Operands:
    """A and B: as they are, or to be brought to workspaces."""

    dense: Dense
    setups: dict[str, expand.Setup | convert_operand.Setup]

    @classmethod
    def of(cls, arch: str, dense: Dense) -> _Operands:
        return cls(dense, {name: _setup(arch, how) for name, how in dense.workspaces.items()})

    def ready(self, arrays: dict[str, Any], stream: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Launch what fills the workspaces; return A and B as the product takes them."""
        return self._ready("a", arrays, stream), self._ready("b", arrays, stream)

    def _ready(self, name: str, arrays: dict[str, Any], stream: Any) -> cute.Tensor:
        setup = self.setups.get(name)
        if setup is None:
            return arrays[name]
        given, workspace = aligned(arrays[name], setup.problem.major == "k"), arrays[f"{name}_values"]
        if isinstance(setup, convert_operand.Setup):
            values = convert_operand.converted_matrices(setup.problem, given, workspace)
            convert_operand.launch_convert(setup, given, values, stream)
        else:
            values = expand.expanded_matrices(setup.problem, given, workspace)
            expand.launch_expand(setup, given, arrays[f"sf{name}"], values, stream)
        return values

    def fake_arguments(self) -> dict[str, Any]:
        problem, found = self.dense.problem, {}
        dtype = storage(self.dense.operands.element or problem.dtype)
        for name, major in (("a", problem.a_major), ("b", problem.b_major)):
            found[name] = fake_matrices(dtype, *(cute.sym_int() for _ in range(3)), major == "k")
            setup = self.setups.get(name)
            if isinstance(setup, convert_operand.Setup):
                _, found[f"{name}_values"] = convert_operand.fake_arguments(setup.problem)
            elif setup is not None:
                _, found[f"sf{name}"], found[f"{name}_values"] = expand.fake_arguments(setup.problem)
        return found


def _setup(arch: str, problem: launch_expand.Problem | launch_convert.Problem) -> expand.Setup | convert_operand.Setup:
    if isinstance(problem, launch_convert.Problem):
        return convert_operand.Setup.of(arch, problem, launch_convert.choose(problem))
    return expand.Setup.of(arch, problem, launch_expand.choose(problem, arch))


def _fake_results(product: Product, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return stand-ins for what the epilogue reads and writes, and for what accumulating results hold so far."""
    values = product.fake_arguments(*(cute.sym_int() for _ in range(3)))
    found = dict(zip(product.names, values, strict=True))
    others = dict(zip(product.names, product.fake_arguments(*(cute.sym_int() for _ in range(3))), strict=True))
    old = {name: others[name.removeprefix("old_")] for name in arguments if name.startswith("old_")}
    unused = fake_vector(Float32, 1, 4)  # a norm_const for a result that is not quantised
    return {"norm_const": unused, **found, **old}
