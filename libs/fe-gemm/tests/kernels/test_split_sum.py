"""How blocks with parts of K of the same tile trade sums: run with lists for registers, arrays for shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import split_sum
from fe_gemm.kernels.sm90.block import Work
from fe_gemm.kernels.sm90.parts import Place, Tile
from fe_gemm.kernels.sm90.split_sum import THREADS, SplitSum
from fe_gemm.planning.problem import CELL, Problem
from fe_gemm.planning.tiles import Launch, finishers, finishing, is_valid, roomy, split_bytes
from fe_runtime.cute.wgmma import WARP_GROUP, fragment_column, fragment_row

THREAD = np.arange(THREADS)
SWIGLU = Problem(epilogue="swiglu")
CASES = [
    (Problem(), Launch(128, 256, cluster_k=4)),
    (Problem(), Launch(128, 256, cluster_k=6)),
    (Problem(), Launch(128, 256, 1, 2, 4)),
    (Problem(), Launch(128, 192, cluster_k=3)),
    (Problem(), Launch(128, 192, cluster_k=2)),
    (Problem(), Launch(128, 128, 2, 2, 2)),
    (Problem(), Launch(256, 128, cluster_k=2)),
    (Problem(), Launch(64, 128, 2, 1, 3)),
    (Problem(), Launch(64, 256, cluster_k=4)),
    (SWIGLU, Launch(128, 256, cluster_k=2)),
    (SWIGLU, Launch(64, 256, 2, 1, 2)),
]
every_case = pytest.mark.parametrize(("problem", "launch"), CASES, ids=[f"{p.epilogue} {how}" for p, how in CASES])


class Cluster:
    """Shared memory of all blocks, in float32, and how often each of its values has been written."""

    def __init__(self, blocks: int, values: int) -> None:
        self.memory = np.full((blocks, values), np.nan, np.float32)
        self.writes = np.zeros((blocks, values), int)
        self.reader = 0

    def map_dsmem_ptr(self, address: Any, rank: int) -> Any:
        return SimpleNamespace(toint=lambda: Remote(rank, address * 4))

    def inline_ptx(self, code: str, read_only_args: list[Any]) -> None:
        assert code.startswith("st.shared::cluster.v4.f32 ")
        remote, *values = read_only_args
        assert (remote.address % 16 == 0).all()
        for i, value in enumerate(values):
            at = remote.address // 4 + i
            self.memory[remote.rank, at] = value
            np.add.at(self.writes[remote.rank], at, 1)

    def make_tensor(self, address: Any, count: int) -> Any:
        values = [self.memory[self.reader, address + i] for i in range(count)]
        return SimpleNamespace(load=lambda: values)


@dataclass
class Remote:
    """An address in bytes in the memory of a block."""

    rank: int
    address: Any

    def __add__(self, count: int) -> Remote:
        return Remote(self.rank, self.address + count)


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch, problem: Problem, launch: Launch) -> Cluster:
    assert is_valid(problem, roomy(problem, launch))
    there = Cluster(launch.cluster, split_bytes(problem, launch) // 4)
    language = SimpleNamespace(arch=there, make_tensor=there.make_tensor, make_layout=lambda count: count)
    monkeypatch.setattr(split_sum, "cute", language)
    return there


def view(problem: Problem, launch: Launch, rank: int) -> SplitSum:
    how = finishing(problem, launch)
    barriers: list[Any] = [None] * 3
    size = how.group_columns // 8, how.group_rows // CELL
    return SplitSum(Place(launch, rank), finishers(problem, launch), *size, 0, *barriers)  # type: ignore[arg-type]


def position(launch: Launch, side: int, half: int, block: int, down: int) -> tuple[Any, Any]:
    """Return row and column in a tile of an accumulator, for all threads."""
    group, thread = THREAD // WARP_GROUP, THREAD % WARP_GROUP
    row, column = (0, group * launch.group_columns) if launch.side_by_side else (group * launch.group_rows, 0)
    return row + down * 64 + fragment_row(thread) + 8 * half, column + block * 8 + fragment_column(thread) + side


class Accumulator:
    """The accumulators of a block's threads, by their places in the registers of one."""

    def __init__(self, launch: Launch, values: Any) -> None:
        self.launch, self.values = launch, values

    def __getitem__(self, at: tuple[tuple[int, int, int], int, int]) -> Any:
        (side, half, block), down, _ = at
        return self.values[position(self.launch, side, half, block, down)]


@every_case
def test_each_block_gets_the_whole_sums_of_its_part(cluster: Cluster, problem: Problem, launch: Launch) -> None:
    """Its own come first, then those of the others in the order of the parts of K; the parts cover the tile once."""
    random = np.random.default_rng(3)
    tiles = random.standard_normal((launch.cluster, launch.tile_m, launch.tile_n)).astype(np.float32)
    totals: list[dict[int, Any]] = [{} for _ in tiles]
    splits = [view(problem, launch, rank) for rank in range(launch.cluster)]
    for split, values, total in zip(splits, tiles, totals, strict=True):
        split._distribute(Accumulator(launch, values), total, split.place.part, THREAD)  # type: ignore[arg-type]
    part = finishing(problem, launch)
    found = np.full((launch.sharing, launch.tile_m, launch.tile_n), np.nan, np.float32)
    for rank, (split, total) in enumerate(zip(splits, totals, strict=True)):
        assert split.finishes == bool(total)
        if not split.finishes:
            continue
        cluster.reader = rank
        for place in range(launch.cluster_k - 1):
            split._receive(total, place, THREAD)  # type: ignore[arg-type]
        first = split.part(Tile(0, 0, 0, 0, 0)).column * CELL
        for at, value in total.items():
            vector, down = at // 4 % split.blocks, at // 4 // split.blocks
            row, column = position(launch, at % 2, at // 2 % 2, vector, down)
            assert np.isnan(found[rank % launch.sharing, row, column + first]).all()
            found[rank % launch.sharing, row, column + first] = value
        assert len(total) == part.group_rows * part.group_columns // WARP_GROUP
    assert np.array_equal(found, wanted(launch, tiles, part.group_columns))
    written = cluster.writes[: split.finishers * launch.sharing]
    assert (written == 1).all()
    assert (cluster.writes[split.finishers * launch.sharing :] == 0).all()


def wanted(launch: Launch, tiles: Any, width: int) -> Any:
    """Return the sums over the parts of K, of the columns of each part of a tile its own ones first."""
    parts = tiles.reshape(launch.cluster_k, launch.sharing, launch.tile_m, launch.tile_n)
    sums = np.empty(parts.shape[1:], np.float32)
    for column in range(launch.tile_n):
        own = column % launch.group_columns // width
        total = parts[own, ..., column]
        for other in (i for i in range(launch.cluster_k) if i != own):
            total = total + parts[other, ..., column]
        sums[..., column] = total
    return sums


@every_case
def test_no_block_is_sent_to_by_all_at_once(cluster: Cluster, problem: Problem, launch: Launch) -> None:
    """If all get a part, each sends the same amount to one after the other, at every time to different ones."""
    orders = []
    for part in range(launch.cluster_k):
        sent: list[int] = []
        cluster.map_dsmem_ptr = lambda _, rank, sent=sent: SimpleNamespace(  # type: ignore[method-assign]
            toint=lambda: Remote(sent.append(rank) or rank, THREAD * 16)
        )
        split = view(problem, launch, part * launch.sharing)
        values = np.zeros((launch.tile_m, launch.tile_n), np.float32)
        split._distribute(Accumulator(launch, values), {}, part, THREAD)  # type: ignore[arg-type]
        orders.append(sent)
        receivers = {rank * launch.sharing for rank in range(split.finishers)}
        assert set(sent) == receivers - {split.place.rank}
        assert len(sent) == len(set(sent))
    if split.finishers == launch.cluster_k:
        assert all(len(set(at_once)) == launch.cluster_k for at_once in zip(*orders, strict=True))


@every_case
def test_the_blocks_of_a_tile_are_those_with_the_same_place_among_the_sharing(problem: Problem, launch: Launch) -> None:
    places = [Place(launch, rank) for rank in range(launch.cluster)]
    for place in places:
        split = view(problem, launch, place.rank)  # type: ignore[arg-type]
        found = [places[split._block(part)] for part in range(launch.cluster_k)]
        assert found == [p for p in places if (p.row, p.column) == (place.row, place.column)]
        assert [p.part for p in found] == list(range(launch.cluster_k))


@every_case
def test_parts_of_warp_groups_lie_side_by_side_in_their_parts_of_the_tile(problem: Problem, launch: Launch) -> None:
    tile, columns = Tile(row=256, column=12, batch=1, end=2000, steps=3), set()
    for rank in range(0, launch.cluster, launch.sharing):
        split = view(problem, launch, rank)
        for group in range(2) if split.finishes else ():
            whole = Work(problem, split.place, SimpleNamespace(), 0, 1).part(tile, group)  # type: ignore[arg-type]
            own = split.part(whole)
            assert (own.row, own.batch, own.end, own.steps) == (whole.row, 1, 2000, 3)
            columns |= {(own.row, own.column + i) for i in range(split.blocks * 8 // CELL)}
    rows = {256} if launch.side_by_side else {256, 256 + launch.group_rows}
    assert columns == {(row, 12 + i) for row in rows for i in range(launch.tile_n // CELL)}
