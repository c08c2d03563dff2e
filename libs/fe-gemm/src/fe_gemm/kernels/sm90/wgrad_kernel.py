"""The kernel of gradients of experts' weights, made of the core's parts, and how W leaves it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fe_gemm.planning.grouped_wgrad import Problem
from fe_gemm.planning.problem import CELL, Sheet
from fe_gemm.planning.tiles import Launch

from . import epilogue
from .block import run_block
from .epilogue import Epilogue, Shared
from .epilogue.cells import cell_layout, stored_columns
from .epilogue.stage import outlet_atom
from .tensor_maps import TensorMaps
from .wgrad_groups import Groups
from .wgrad_tiles import ExpertTile, ExpertTiles, Source

__all__ = ["Core", "wgrad_kernel"]


@dataclass(frozen=True, slots=True)
class Core:
    """What is static about a kernel."""

    problem: Problem
    how: Launch
    dynamic: bool

    @property
    def epilogue(self) -> Epilogue:
        """How W leaves."""
        return Epilogue(self.problem.product, self.how)

    def source(self, maps: tuple[TensorMaps, TensorMaps] | None = None) -> Source:
        """Where tiles of A and B come from; ``maps``: the experts', which are known in the kernel."""
        return Source(self.problem.product, self.how, self.problem, maps)

    def result_atom(self, w: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the copy of cells to W (M, N, E), and W as TMA sees it."""
        (sheet,) = self.problem.product.outputs
        return _adding_atom(sheet, w) if self.problem.accumulates else outlet_atom(sheet, w)

    def maps(self, name: str, workspace: cute.Tensor, experts: Int32) -> TensorMaps | None:
        """Return the experts' maps of an array, if there are some."""
        names = self.problem.maps
        return TensorMaps.of(workspace, experts, names.index(name)) if name in names else None


@cute.kernel
def wgrad_kernel(
    core: cutlass.Constexpr[Core],
    operands: tuple[Any, ...],
    result: tuple[Any, ...],
    workspace: cute.Tensor,
    experts: Int32,
) -> None:
    """One block of a persistent cluster.

    ``operands``: a TMA copy and what it sees for A (M, T, 1) and B (N, T, 1); ``result``: for W (M, N, E).
    """
    _, a, _, b = operands
    a_maps, b_maps, maps = (core.maps(name, workspace, experts) for name in "abc")
    groups = Groups.of(workspace, experts)
    schedule = ExpertTiles.of(core.problem, core.how, (a.shape[0], b.shape[0], experts), groups)
    run_block(core.source((a_maps, b_maps)), operands, schedule, _Ending(core, result, maps, schedule))


@dataclass(frozen=True, slots=True)
class _Ending:
    """What becomes of accumulators, as a block sees it; ``maps``: of W, where each expert's has its own address.

    Takes shared memory for the schedule too.
    """

    core: Core
    result: tuple[Any, ...]
    maps: TensorMaps | None
    schedule: ExpertTiles

    def allocate(self, allocator: Any) -> Shared:
        shared = self.core.epilogue.allocate(allocator)
        if self.core.dynamic:
            self.schedule.allocate(allocator)
        return shared

    def initialise(self, shared: Shared) -> None:
        self.core.epilogue.initialise(shared)
        if self.core.dynamic:
            self.schedule.tickets.initialise()

    def finisher(self, shared: Shared, group: Int32, thread: Int32) -> _Finisher:
        plain = epilogue.Finisher.of(self.core.epilogue, shared, (self.result,), group, thread)
        outlets = tuple(replace(outlet, maps=self.maps) for outlet in plain.outlets)
        return _Finisher(self.core.problem, replace(plain, outlets=outlets), self.maps)


@dataclass(frozen=True, slots=True)
class _Finisher:
    """A thread's view."""

    problem: Problem
    plain: epilogue.Finisher
    maps: TensorMaps | None

    @cute.jit
    def begin(self, tile: ExpertTile) -> None:
        """Make the map of an expert's W usable for the warp that stores."""
        if cutlass.const_expr(self.maps is not None):
            if self.plain.stage.issues:
                self.maps.acquire(tile.batch)

    def finish(self, accumulator: cute.Tensor, tile: ExpertTile) -> None:
        """Finish the accumulators of a tile."""
        factor = tile.group.factor if self.problem.scales_w else None
        replace(self.plain, alpha=factor).finish(accumulator, tile)

    def finish_all(self) -> None:
        """Finish what is left."""
        self.plain.finish_all()


def _adding_atom(sheet: Sheet, array: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the copy of cells that adds them to a matrix, and the matrix as TMA sees it."""
    layout = cute.select(cell_layout(sheet, 1), mode=[0, 1])
    adds = cpasync.CopyReduceBulkTensorTileS2GOp()
    info = cpasync.make_tiled_tma_atom(adds, array, layout, (CELL, stored_columns(sheet)))
    return info.atom, info.tma_tensor


wgrad_kernel.set_name_prefix("fe_gemm_wgrad", remove_cutlass_symbol=True, keep_mangled_name=False)
