"""How a matrix product is cut into tiles and spread over the GPU: a choice by measured rules, and what is valid.

Nothing here depends on the number of rows M: a compiled kernel serves any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problem import CELL, DEPTH_BYTES, Problem

__all__ = [
    "Launch",
    "Problem",
    "candidates",
    "cells",
    "choose",
    "finishers",
    "finishing",
    "is_valid",
    "roomy",
    "shared_bytes",
    "split_bytes",
]


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    tile_m, tile_n
        Rows and columns of C that a block computes at once. Each of the two computing warp groups has half of the rows,
        or, of 64 rows, half of the columns.
    cluster_m, cluster_n
        Blocks that work together: those one below the other share their tile of B, those side by side their tile of A.
    cluster_k
        Blocks of a cluster that compute the same tile, each with a part of K; for products with few tiles. Then they
        trade sums, and each finishes a part of the columns: see :func:`finishers`.
    slots
        Tiles of A and B, 128 bytes deep, that are under way.
    store_buffers
        Buffers of 8 KB per warp group through which C is stored.
    band
        Rows of clusters that are treated together, so that blocks at work at the same time share operands.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    slots: int = 4
    store_buffers: int = 2
    band: int = 8

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.sharing * self.cluster_k

    @property
    def sharing(self) -> int:
        """Blocks of a cluster that have the same part of K, and share tiles of A and B."""
        return self.cluster_m * self.cluster_n

    @property
    def side_by_side(self) -> bool:
        """Whether the warp groups share a tile of 64 rows, each with half of its columns."""
        return self.tile_m == CELL

    @property
    def group_columns(self) -> int:
        """Columns of a tile that one warp group computes."""
        return self.tile_n // CONSUMERS if self.side_by_side else self.tile_n

    @property
    def group_rows(self) -> int:
        """Rows of a tile that one warp group computes."""
        return self.tile_m if self.side_by_side else self.tile_m // CONSUMERS

    def accumulators(self, problem: Problem) -> int:
        """Return the registers per thread that hold sums."""
        sums = self.group_rows * self.group_columns // 128
        return 2 * sums if problem.promotes else sums

    @property
    def slot_bytes(self) -> int:
        """Bytes of a tile of A and a tile of B."""
        return (self.tile_m + self.tile_n) * DEPTH_BYTES


CONSUMERS = 2
"""Warp groups that compute."""

CELL_ROWS = 64
CELL_BYTES = 8192
"""What leaves or comes in beside the product is staged in cells of 64 rows, for which there are buffers of 8 KB."""

UPSTREAM_BUFFERS = 2
"""Cells of 64 x 64 that are under way to a warp group, if it reads a matrix beside the product."""

SPLIT_BARRIERS = 3
"""What blocks with parts of K of the same tile need to trade sums."""

MOST_SHARED_BYTES = 227 * 1024


def choose(problem: Problem, n: int, k: int, arch: str) -> Launch:
    """Return the launch for products with N = ``n`` and K = ``k``: the first of those measured best that is valid."""
    del k, arch
    tiles = _NARROW if n <= 128 else _BYTE_TILES if problem.promotes else _TILES
    launches = (roomy(problem, launch) for launch in (*tiles, *_NARROW, *_TILES))
    return next(launch for launch in launches if is_valid(problem, launch))


def candidates(problem: Problem, n: int, k: int, arch: str) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    found = [choose(problem, n, k, arch)]
    for tile in ((128, 256), (256, 128), (128, 192), (128, 128)):
        for cluster in ((1, 1), (2, 1), (1, 2)):
            found += [roomy(problem, Launch(*tile, *cluster, band=band)) for band in (4, 8, 16)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem."""
    if min(launch.cluster_m, launch.cluster_n, launch.cluster_k, launch.slots, launch.store_buffers, launch.band) < 1:
        return False
    if launch.tile_m not in (64, 128, 256) or launch.tile_n not in range(64, 257, 64):
        return False
    return (
        problem.is_consistent
        and launch.accumulators(problem) <= _most_accumulators(problem, launch)
        and launch.group_columns % (CELL * problem.strip) == 0
        and _covers_scales(problem, launch)
        and launch.slots >= 2
        and _has_valid_cluster(launch)
        and _can_split(problem, launch)
        and shared_bytes(problem, launch) <= MOST_SHARED_BYTES
    )


def cells(problem: Problem, launch: Launch) -> int:
    """Return the cells that a warp group stores per tile."""
    strips = launch.group_rows // CELL_ROWS * (launch.group_columns // (CELL * problem.strip))
    return strips * sum(problem.strip * sheet.columns // sheet.cell_columns for sheet in problem.outputs)


def finishers(problem: Problem, launch: Launch) -> int:
    """Return how many blocks with a part of K of the same tile, from the first on, finish a part of its columns.

    All parts are equally wide and consist of whole strips, so it may be that not all blocks get one.
    """
    strips = launch.group_columns // (CELL * problem.strip)
    return max(count for count in range(1, launch.cluster_k + 1) if strips % count == 0)


def finishing(problem: Problem, launch: Launch) -> Launch:
    """Return the launch whose tiles are what a block finishes."""
    return replace(launch, tile_n=launch.tile_n // finishers(problem, launch), cluster_k=1)


def split_bytes(problem: Problem, launch: Launch) -> int:
    """Return the bytes of the sums that a block gets from others with another part of K of the same tile.

    They lie where the tiles of A and B were.
    """
    return (launch.cluster_k - 1) * launch.tile_m * finishing(problem, launch).tile_n * 4


def shared_bytes(problem: Problem, launch: Launch) -> int:
    """Return the shared memory of a block, alignment included."""
    own = launch.store_buffers * CELL_BYTES + problem.sum_bytes
    if problem.upstream is not None:
        own += UPSTREAM_BUFFERS * (problem.upstream.cell_bytes + 8)
    barriers = 16 * launch.slots + SPLIT_BARRIERS * 8
    return launch.slots * launch.slot_bytes + CONSUMERS * own + barriers + 1024


def roomy(problem: Problem, launch: Launch) -> Launch:
    """Return a launch with as many slots as fit."""
    fixed = shared_bytes(problem, replace(launch, slots=0))
    return replace(launch, slots=min(8, (MOST_SHARED_BYTES - fixed) // (launch.slot_bytes + 16)))


_TILES = (Launch(128, 256, cluster_m=2),)
_BYTE_TILES = (Launch(128, 192, cluster_m=2, store_buffers=3), Launch(128, 128, cluster_n=2))
_NARROW = (Launch(128, 128), Launch(128, 64, store_buffers=1))
"""In the order of preference. Timed on an H200: those for wide products, without epilogue."""


def _most_accumulators(problem: Problem, launch: Launch) -> int:
    """Return how many registers of a thread may hold sums; 232 are there.

    Fewer if more is done with the sums than rounding them, and if sums of other blocks are added.
    """
    return 192 if problem.plain and launch.cluster_k == 1 else 128


_MOST_BLOCKS = 8  # of a cluster, on every GPU


def _has_valid_cluster(launch: Launch) -> bool:
    most = {1: 4, 2: 2}.get(launch.cluster_m, 0)
    return launch.cluster_n in (1, 2, 4)[:most] and launch.cluster <= _MOST_BLOCKS


def _can_split(problem: Problem, launch: Launch) -> bool:
    """Whether the sums of other parts of K have room, and all results can do with parts of the columns.

    Sums over rows cannot: their workspace has a line for the columns of each warp group.
    """
    if launch.cluster_k == 1:
        return True
    return not problem.scratch and split_bytes(problem, launch) <= launch.slots * launch.slot_bytes


def _covers_scales(problem: Problem, launch: Launch) -> bool:
    """Whether the tiles cover whole atoms of scales, 128 rows of four, so that their padding is written."""
    if problem.scale_dtype is None:
        return True
    columns = launch.tile_n // CELL * problem.result_columns
    return launch.tile_m % 128 == 0 and columns % (4 * problem.scale_vector) == 0
