"""Products of groups of rows with their experts' weights: X = alpha[e] A B_e^T, and what is made of X.

The parts are those of :mod:`.gemm`. What differs: tiles belong to groups (:mod:`.grouped_tiles`), A is loaded from any
row on, results are stored through tensor maps of their own that end with the group, and weights may each have an
address (:mod:`.tensor_maps`). Rows of a tile that belong to the next group are computed and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute

from fe_gemm.planning.grouped import Grouped, GroupedProblem, split_config
from fe_gemm.planning.problem import CELL
from fe_gemm.planning.tiles import Launch
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.pipeline import Position, Ring
from fe_runtime.cute.types import numeric, storage

from .arguments import ALIGNMENT, aligned
from .block import dimensions, run_block
from .epilogue import Arrays, Epilogue, Finisher, Shared
from .epilogue.glu_finisher import GluFinisher
from .grouped_tiles import GroupedTiles
from .operands import Loader, Source
from .parts import Place, Tile
from .tensor_maps import TensorMaps, Variation, fake_table, make_tensor_maps

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: those that ``config`` names, in its order, and the stream.

    ``config`` is what :func:`fe_gemm.planning.grouped.config` returns.
    """
    del arch
    plan = split_config(config)

    @cute.jit
    def gemm_grouped(*arguments: Any) -> None:
        *values, stream = arguments
        _launch(plan, dict(zip(plan.arguments, values, strict=True)), stream)

    fakes = _fake_arguments(plan)
    return gemm_grouped, (*(fakes[name] for name in plan.arguments), fake_stream())


def _launch(plan: Grouped, arrays: Arrays, stream: Any) -> None:
    """Launch the product, and what has to run before and after it."""
    problem, epilogue = plan.problem, Epilogue(plan.problem, plan.launches.many)
    given = {name: _as_epilogues_take(epilogue, name, arrays[name]) for name in epilogue.names}
    operands = {name: arrays[name] for name in ("offsets", "maps")}
    operands["a"] = _matrix(arrays["a"])
    if problem.discrete:
        operands["addresses"] = _addresses(arrays["addresses"], plan.byte_addresses)
        operands["b"] = _stand_in(problem, operands["a"], given)
    else:
        operands["b"] = _weights(problem, arrays["b"])
    epilogue.prepare(given, stream)
    _launch_for_rows(plan, 0, operands, given, stream)
    epilogue.complete({**given, "offsets": operands["offsets"]}, stream)


@cute.jit
def _launch_for_rows(
    plan: cutlass.Constexpr[Grouped],
    number: cutlass.Constexpr[int],
    operands: Arrays,
    arrays: Arrays,
    stream: Any,
) -> None:
    """Take the launch for the average number of rows of a group, from the ``number``-th on."""
    few = plan.launches.few
    if cutlass.const_expr(number == len(few)):
        Core(plan.problem, plan.launches.many).launch(operands, arrays, plan.multiprocessors, stream)
    else:
        rows, how = few[number]
        if operands["a"].shape[0] <= rows * operands["offsets"].shape[0]:
            Core(plan.problem, how).launch(operands, arrays, plan.multiprocessors, stream)
        else:
            _launch_for_rows(plan, number + 1, operands, arrays, stream)


@dataclass(frozen=True, slots=True)
class Core:
    """A product, its epilogue, and how the work is spread."""

    problem: GroupedProblem
    how: Launch

    @property
    def epilogue(self) -> Epilogue:
        """What is made of the accumulators."""
        return Epilogue(self.problem, self.how)

    def source(self, maps: TensorMaps | None = None) -> GroupedSource:
        """Where tiles of A and B come from; ``maps``: of weights with addresses."""
        return GroupedSource(self.problem, self.how, maps)

    def tiles(self, a: cute.Tensor, b: cute.Tensor, offsets: cute.Tensor) -> GroupedTiles:
        """Return the tiles of the product."""
        return GroupedTiles.of(self.problem, self.how, offsets, (a.shape[0], b.shape[0], a.shape[1]))

    def maps(self, table: cute.Tensor, groups: Int32) -> dict[str, TensorMaps]:
        """Return the maps of groups, by the names of the arrays."""
        return {name: TensorMaps.of(table, groups, number) for number, name in enumerate(self.problem.maps)}

    def launch(self, operands: Arrays, arrays: Arrays, multiprocessors: int, stream: Any) -> None:
        """Launch the kernel, and before it the one that makes the maps of the groups."""
        a, b, offsets, table = (operands[name] for name in ("a", "b", "offsets", "maps"))
        pairs, parameters = self.source().atoms(a, b), self.epilogue.parameters(arrays)
        results = dict(zip(self.epilogue.names, parameters, strict=True))
        varied = [Variation(results[sheet.name], ends=0) for sheet in self.problem.outputs]
        if self.problem.discrete:
            varied.append(Variation(pairs[2:], addresses=operands["addresses"]))
        make_tensor_maps(table, tuple(varied), offsets, stream)
        grouped_kernel(self, pairs, parameters, offsets, table).launch(
            **dimensions(self.how, self.tiles(a, b, offsets).most, multiprocessors), stream=stream
        )


@cute.kernel
def grouped_kernel(
    core: cutlass.Constexpr[Core],
    operands: tuple[Any, ...],
    parameters: tuple[Any, ...],
    offsets: cute.Tensor,
    table: cute.Tensor,
) -> None:
    """One block of a persistent cluster."""
    _, a, _, b = operands
    maps = core.maps(table, offsets.shape[0])
    ending = _Ending(core.epilogue, parameters, maps)
    run_block(core.source(maps.get("b")), operands, core.tiles(a, b, offsets), ending)


grouped_kernel.set_name_prefix("fe_gemm_grouped", remove_cutlass_symbol=True, keep_mangled_name=False)


@dataclass(frozen=True, slots=True)
class GroupedSource(Source):
    """Where tiles of A (M, K, 1) come from, and those of B: (N, K, E), or (N, K, 1) at an address for each group."""

    maps: TensorMaps | None = None

    def loader(self, place: Place, shared: tuple[cute.Tensor, cute.Tensor], operands: tuple[Any, ...]) -> GroupedLoader:
        """Return the producer's view of what :meth:`atoms` returned, for the block at ``place``."""
        plain = Loader.of(place, shared, operands)
        return GroupedLoader(plain.place, plain.a, plain.b, self.maps)


@dataclass(frozen=True, slots=True)
class GroupedLoader(Loader):
    """The producer's view of both operands."""

    maps: TensorMaps | None = None

    def begin(self, tile: Tile) -> None:
        """Make the map of the group's weights usable."""
        if self.maps is not None:
            self.maps.acquire(tile.batch)

    def load(self, ring: Ring, at: Position, tile: Tile, step: Int32) -> None:
        """Wait for a slot and start filling it; called by one warp."""
        ring.acquire(at, self.place.launch.slot_bytes)
        self.a.load_from(ring, at, (tile.row, 0, 0), step)
        if self.maps is None:
            self.b.load_from(ring, at, (tile.column * CELL, 0, tile.batch), step)
        else:
            self.b.load_from(ring, at, (tile.column * CELL, 0, 0), step, self.maps.at(tile.batch))


@dataclass(frozen=True, slots=True)
class _Ending:
    """The epilogue with its arrays, as a block sees it."""

    how: Epilogue
    parameters: tuple[Any, ...]
    maps: dict[str, TensorMaps]

    def allocate(self, allocator: Any) -> Shared:
        return self.how.allocate(allocator)

    def initialise(self, shared: Shared) -> None:
        self.how.initialise(shared)

    def finisher(self, shared: Shared, group: Int32, thread: Int32) -> Finisher:
        kind = GluFinisher if self.how.problem.epilogue == "dglu" else Finisher
        return kind.of(self.how, shared, self.parameters, group, thread, self.maps)


def _matrix(array: cute.Tensor) -> cute.Tensor:
    """Return row-major (M, X) as (M, X, 1)."""
    rows, columns = array.shape
    layout = cute.make_layout((rows, columns, 1), stride=(array.stride[0], 1, 0))
    return aligned(cute.make_tensor(array.iterator, layout), True)


def _weights(problem: GroupedProblem, array: cute.Tensor) -> cute.Tensor:
    """Return (E, N, K) as (N, K, E)."""
    turned = cute.make_tensor(array.iterator, cute.select(array.layout, mode=[1, 2, 0]))
    return aligned(turned, problem.b_major == "k")


def _stand_in(problem: GroupedProblem, a: cute.Tensor, arrays: Arrays) -> cute.Tensor:
    """Return (N, K, 1) of the form of a group's weights, at the address of A: maps with other addresses come of it."""
    n, k = arrays["c"].shape[1] * CELL // problem.result_columns, a.shape[1]
    stride = (Int64(k), 1, 0) if problem.b_major == "k" else (1, Int64(n), 0)
    layout = cute.make_layout((n, k, 1), stride=stride)
    return aligned(cute.make_tensor(a.iterator, layout), problem.b_major == "k")


def _addresses(array: cute.Tensor, bytes_: bool) -> cute.Tensor:
    """Return addresses (E,), which may have been given as their bytes."""
    if not bytes_:
        return array
    return cute.make_tensor(cute.recast_ptr(array.iterator, dtype=Int64), cute.make_layout(array.shape[0] // 8))


def _as_epilogues_take(epilogue: Epilogue, name: str, array: cute.Tensor) -> cute.Tensor:
    if name in epilogue.sheets:
        return _matrix(array)
    if name in ("prob", "dprob"):  # of each row, whatever its group
        return cute.make_tensor(array.iterator, cute.make_layout((array.shape[0], 1, 1), stride=(1, 0, 0)))
    if name == "partials":
        parts, rows = array.shape
        return cute.make_tensor(array.iterator, cute.make_layout((parts, 1, rows), stride=(Int64(rows), 0, 1)))
    return array


def _fake_arguments(plan: Grouped) -> dict[str, Any]:
    """Return the stand-in for every argument that there may be, by name."""
    problem = plan.problem
    m, n, k, groups = (cute.sym_int() for _ in range(4))
    line, matrix = cute.sym_int64(), cute.sym_int64()
    make, real = cute.runtime.make_fake_tensor, Float32
    b_stride = (matrix, line, 1) if problem.b_major == "k" else (matrix, 1, line)
    by_group, by_row = (make(real, (extent,), (1,), assumed_align=4) for extent in (groups, m))
    found = {
        "a": _fake_matrix(problem.dtype, m, k),
        "b": make(numeric(problem.dtype), (groups, n, k), b_stride, assumed_align=ALIGNMENT),
        "offsets": make(Int32, (groups,), (1,), assumed_align=4),
        "addresses": make(Int64, (groups,), (1,), assumed_align=8),
        **dict.fromkeys(("alpha", "beta"), by_group),
        "bias": make(numeric(problem.bias_dtype or "float32"), (groups, n), (cute.sym_int64(), 1), assumed_align=4),
        **dict.fromkeys(("prob", "dprob", "old_dprob"), by_row),
        **dict.fromkeys(("dbias", "old_dbias"), _fake_lines(BFloat16, groups, cute.sym_int(), 2)),
        "partials": _fake_lines(real, cute.sym_int(), m, 4),
        "column_partials": _fake_lines(real, cute.sym_int(), cute.sym_int(), 8),
        "maps": fake_table(),
        **{name: Float32(1.0) for name in problem.scalars},
    }
    if plan.byte_addresses:
        found["addresses"] = make(Uint8, (cute.sym_int(),), (1,), assumed_align=8)
    for name, sheet in Epilogue(problem, plan.launches.many).sheets.items():
        found[name] = _fake_matrix(sheet.dtype, m, n if sheet.columns == CELL else cute.sym_int())
    return found


def _fake_lines(dtype: type[cutlass.Numeric], lines: Any, length: Any, alignment: int) -> cute.Tensor:
    return cute.runtime.make_fake_tensor(dtype, (lines, length), (cute.sym_int64(), 1), assumed_align=alignment)


def _fake_matrix(dtype: str, rows: Any, columns: Any) -> cute.Tensor:
    return cute.runtime.make_fake_tensor(
        storage(dtype), (rows, columns), (cute.sym_int64(), 1), assumed_align=ALIGNMENT
    )
