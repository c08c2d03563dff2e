"""X = A B^T on Hopper, and what is made of X: the core that the dense products share.

The parts are exchangeable: :mod:`.operands` brings tiles of A and B, :mod:`.mainloop` multiplies them, :mod:`.block`
lets warps work together, :mod:`.epilogue` makes results of the accumulators and stores them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from fe_gemm.planning.launches import Launches, split_config
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.tiles import Launch, finishing
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.types import storage

from .arguments import aligned, fake_matrices
from .block import dimensions, run_block
from .dense_tiles import DenseTiles
from .epilogue import Arrays, Epilogue, Finisher, Shared
from .operands import Source

__all__ = ["Product", "build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: a (M, K, L), b (N, K, L), what the epilogue reads and writes,
    multiprocessors, stream.

    ``config`` is what :func:`fe_gemm.planning.launches.config` returns; the order is :attr:`Epilogue.names`.
    """
    del arch
    product = Product(*split_config(config))

    @cute.jit
    def gemm(*arguments: Any) -> None:
        a, b, *values, multiprocessors, stream = arguments
        product.launch(a, b, dict(zip(product.names, values, strict=True)), multiprocessors, stream)

    return gemm, _fake_arguments(product)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with its epilogue, and launches by the number of rows."""

    problem: Problem
    launches: Launches

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays and scalars besides A and B, in the order of a kernel's arguments."""
        return self._epilogue.names

    @property
    def _epilogue(self) -> Epilogue:
        return Epilogue(self.problem, self.launches.many)

    def fake_arguments(self, m: Any, n: Any, batches: Any) -> tuple[Any, ...]:
        """Return stand-ins for what :attr:`names` lists, for matrices of the extents that the symbols stand for."""
        return self._epilogue.fake_arguments(m, n, batches)

    def launch(self, a: cute.Tensor, b: cute.Tensor, arrays: Arrays, multiprocessors: Int32 | int, stream: Any) -> None:
        """Launch the product, and what has to run before and after it.

        ``arrays`` are what :attr:`names` names.
        """
        a, b = aligned(a, self.problem.a_major == "k"), aligned(b, self.problem.b_major == "k")
        sheets = self._epilogue.sheets
        arrays = {n: aligned(x, sheets[n].major == "n") if n in sheets else x for n, x in arrays.items()}
        self._epilogue.prepare(arrays, stream)
        _launch_for_rows(self, 0, a, b, arrays, multiprocessors, stream)
        self._epilogue.complete(arrays, stream)


@cute.jit
def _launch_for_rows(
    product: cutlass.Constexpr[Product],
    number: cutlass.Constexpr[int],
    a: cute.Tensor,
    b: cute.Tensor,
    arrays: Arrays,
    multiprocessors: Int32 | int,
    stream: Any,
) -> None:
    """Take the launch for the number of rows, from the ``number``-th on."""
    few = product.launches.few
    if cutlass.const_expr(number == len(few)):
        Core(product.problem, product.launches.many).launch(a, b, arrays, multiprocessors, stream)
    else:
        rows, how = few[number]
        if a.shape[0] <= rows:
            Core(product.problem, how).launch(a, b, arrays, multiprocessors, stream)
        else:
            _launch_for_rows(product, number + 1, a, b, arrays, multiprocessors, stream)


@dataclass(frozen=True, slots=True)
class Core:
    """A product, its epilogue, and how the work is spread."""

    problem: Problem
    how: Launch

    @property
    def source(self) -> Source:
        """Where tiles of A and B come from."""
        return Source(self.problem, self.how)

    @property
    def epilogue(self) -> Epilogue:
        """What is made of the accumulators that a block finishes."""
        return Epilogue(self.problem, finishing(self.problem, self.how))

    def tiles(self, a: cute.Tensor, b: cute.Tensor) -> DenseTiles:
        """Return the tiles of the product."""
        (m, k, batches), (n, _, _) = a.shape, b.shape
        return DenseTiles.of(self.problem, self.how, (m, n, k, batches))

    def launch(self, a: cute.Tensor, b: cute.Tensor, arrays: Arrays, multiprocessors: Int32 | int, stream: Any) -> None:
        """Launch the kernel."""
        gemm_kernel.set_name_prefix("fe_gemm", remove_cutlass_symbol=True, keep_mangled_name=False)
        gemm_kernel(self, self.source.atoms(a, b), self.epilogue.parameters(arrays)).launch(
            **dimensions(self.how, self.tiles(a, b).count, multiprocessors), stream=stream
        )


def _fake_arguments(product: Product) -> tuple[Any, ...]:
    problem = product.problem
    m, n, k, batches = (cute.sym_int() for _ in range(4))
    dtype = storage(problem.dtype)
    return (
        fake_matrices(dtype, m, k, batches, problem.a_major == "k"),
        fake_matrices(dtype, n, k, batches, problem.b_major == "k"),
        *product.fake_arguments(m, n, batches),
        Int32(1),
        fake_stream(),
    )


@cute.kernel
def gemm_kernel(core: cutlass.Constexpr[Core], operands: tuple[Any, ...], parameters: tuple[Any, ...]) -> None:
    """One block of a persistent cluster."""
    _, a, _, b = operands
    run_block(core.source, operands, core.tiles(a, b), _Ending(core.epilogue, parameters))


@dataclass(frozen=True, slots=True)
class _Ending:
    """The epilogue with its arrays, as a block sees it."""

    how: Epilogue
    parameters: tuple[Any, ...]

    def allocate(self, allocator: Any) -> Shared:
        return self.how.allocate(allocator)

    def initialise(self, shared: Shared) -> None:
        self.how.initialise(shared)

    def finisher(self, shared: Shared, group: Int32, thread: Int32) -> Finisher:
        return Finisher.of(self.how, shared, self.parameters, group, thread)
