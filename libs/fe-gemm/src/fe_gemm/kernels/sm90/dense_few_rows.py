"""Dense operations on few block-scaled rows: a kernel leaves sums, another one makes the results of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fe_gemm.kernels import small_m_operands
from fe_gemm.kernels.small_m_blocked import launch_small_m
from fe_gemm.planning.few_rows import FewRows, Sums
from fe_gemm.planning.problem import Problem
from fe_gemm.planning.small_m import SmallLaunch, SmallProblem

from . import few_rows_shared
from .arguments import ALIGNMENT, aligned
from .epilogue import Arrays, Epilogue
from .finish_sums import launch_finish
from .scaled_few_rows import launch_few_rows

__all__ = ["FewRowsProduct", "fake_sums"]


@dataclass(frozen=True, slots=True)
class FewRowsProduct:
    """Products of few rows with an epilogue."""

    how: FewRows
    setups: tuple[Any, ...]
    epilogue: Epilogue

    @classmethod
    def of(cls, arch: str, problem: Problem, how: FewRows) -> FewRowsProduct | None:
        """Return the products that serve few rows, if there are any."""
        if how.finish is None:
            return None
        return cls(how, tuple(_setup(arch, sums) for sums in how.sums), Epilogue(problem, how.finish))

    def serves(self, a: cute.Tensor) -> Boolean:
        """Whether A, (M, K, L), has so few rows."""
        rows, _, batches = a.shape
        return Boolean(rows <= self.how.sums[-1].rows) & Boolean(batches == 1)

    def launch(self, arrays: Arrays, multiprocessors: int, stream: Any) -> None:
        """Launch the product and what makes results of it.

        ``arrays``: by name, A and B, their scales, the sums, and what :attr:`Epilogue.names` names.
        """
        rows, columns = arrays["a"].shape[0], arrays["b"].shape[0]
        slices = Int32(self.how.sums[-1].slices)
        for sums in reversed(self.how.sums[:-1]):
            slices = cutlass.select_(rows <= sums.rows, Int32(sums.slices), slices)
        held = arrays["sums"]
        line = cute.assume(Int64(held.shape[1]), divby=8 * ALIGNMENT // Float32.width)
        layout = cute.make_layout((slices * rows, columns), stride=(line, 1))
        left = cute.make_tensor(held.iterator, layout)
        finished = {name: arrays[name] for name in self.epilogue.names}
        self.epilogue.prepare(finished, stream)
        _launch_for_rows(self, 0, arrays, left, multiprocessors, stream)
        launch_finish(self.epilogue, left, slices, finished, stream)

    def launch_sums(self, number: int, arrays: Arrays, left: cute.Tensor, multiprocessors: int, stream: Any) -> None:
        """Launch the ``number``-th kernel, which writes sums to ``left``, (slices M, N)."""
        a, b = ((aligned(arrays[name], True), arrays[f"sf{name}"]) for name in "ab")
        setup = self.setups[number]
        if isinstance(setup, small_m_operands.Setup):
            launch_small_m(setup, a, b, left, Int32(self.how.sums[number].slices), multiprocessors, stream)
        else:
            launch_few_rows(setup, a, b, left, multiprocessors, stream)


@cute.jit
def _launch_for_rows(
    product: cutlass.Constexpr[FewRowsProduct],
    number: cutlass.Constexpr[int],
    arrays: Arrays,
    left: cute.Tensor,
    multiprocessors: cutlass.Constexpr[int],
    stream: Any,
) -> None:
    """Take the kernel for the number of rows, from the ``number``-th on."""
    if cutlass.const_expr(number == len(product.setups) - 1):
        product.launch_sums(number, arrays, left, multiprocessors, stream)
    elif arrays["a"].shape[0] <= product.how.sums[number].rows:
        product.launch_sums(number, arrays, left, multiprocessors, stream)
    else:
        _launch_for_rows(product, number + 1, arrays, left, multiprocessors, stream)


def fake_sums() -> cute.Tensor:
    """Return a stand-in for the workspace of the sums: lines for (slices M), N columns and what fills a line up."""
    shape = (cute.sym_int64(), cute.sym_int(divisibility=8 * ALIGNMENT // Float32.width))
    return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(1, 0), assumed_align=ALIGNMENT)


def _setup(arch: str, sums: Sums) -> Any:
    if isinstance(sums.problem, SmallProblem) and isinstance(sums.launch, SmallLaunch):
        return small_m_operands.Setup.of(arch, sums.problem, sums.launch)
    return few_rows_shared.Setup(sums.problem, sums.launch)  # type: ignore[arg-type]
