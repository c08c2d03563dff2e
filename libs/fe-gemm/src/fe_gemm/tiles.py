"""How a matrix product is cut into tiles and spread over the GPU: a choice by measured rules, and what is valid.

Nothing here depends on the number of rows M: a compiled kernel serves any.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["Launch", "Problem", "candidates", "choose", "config", "is_valid", "shared_bytes", "split_config"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a product C = A B^T of matrices (M, K), (N, K) and (M, N), in batches.

    Parameters
    ----------
    dtype
        Of A and B: bfloat16 or float16.
    c_dtype
        Of C: bfloat16 or float16.
    a_major, b_major, c_major
        The contiguous dimension: ``"k"`` or ``"m"``, ``"k"`` or ``"n"``, ``"n"`` or ``"m"``.
    """

    dtype: str = "bfloat16"
    c_dtype: str = "bfloat16"
    a_major: str = "k"
    b_major: str = "k"
    c_major: str = "n"


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    tile_m, tile_n
        Rows and columns of C that a block computes at once.
    cluster_m, cluster_n
        Blocks that work together: those one below the other share their tile of B, those side by side their tile of A.
    shares_tile
        Whether the two computing warp groups share a tile, each with half of its rows; otherwise they take turns, one
        storing its tile while the other computes the next.
    slots
        Tiles of A and B, 64 deep, that are under way.
    store_buffers
        Buffers of 8 KB per warp group through which C is stored.
    band
        Rows of clusters that are treated together, so that blocks at work at the same time share operands.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 1
    cluster_n: int = 1
    shares_tile: bool = True
    slots: int = 4
    store_buffers: int = 2
    band: int = 8

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def group_rows(self) -> int:
        """Rows of a tile that one warp group computes."""
        return self.tile_m // CONSUMERS if self.shares_tile else self.tile_m

    @property
    def slot_bytes(self) -> int:
        """Bytes of a tile of A and a tile of B."""
        return (self.tile_m + self.tile_n) * DEPTH * 2


DEPTH = 64
"""Depth of a tile of A or B: 128 bytes of 16-bit values."""

CONSUMERS = 2
"""Warp groups that compute."""

CELL_ROWS = 64
CELL_BYTES = 8192
"""C is stored in cells: 64 rows of 128 bytes."""

MOST_SHARED_BYTES = 227 * 1024


def choose(problem: Problem, n: int, k: int, arch: str) -> Launch:
    """Return the launch for products with N = ``n`` and K = ``k``."""
    del problem, k, arch
    return _roomy(Launch(128, 128)) if n <= 128 else _roomy(Launch(128, 256, cluster_m=2))


def candidates(problem: Problem, n: int, k: int, arch: str) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    found = [choose(problem, n, k, arch)]
    for tile in _TILES:
        for cluster in ((1, 1), (2, 1), (1, 2)):
            buffers = 3 if tile[1] == 192 else 2
            found += [_roomy(Launch(*tile, *cluster, store_buffers=buffers, band=band)) for band in (4, 8, 16)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem."""
    if min(launch.cluster_m, launch.cluster_n, launch.slots, launch.store_buffers, launch.band) < 1:
        return False
    if launch.tile_m not in (128, 256) or launch.tile_n not in range(64, 257, 64):
        return False
    accumulators = launch.group_rows * launch.tile_n // 128
    return (
        launch.shares_tile  # taking turns is not written yet
        and accumulators <= _MOST_ACCUMULATORS
        and launch.slots >= 2
        and max(launch.cluster_m, launch.cluster_n) <= 2
        and cells(problem, launch) % launch.store_buffers == 0
        and shared_bytes(launch) <= MOST_SHARED_BYTES
    )


def cells(problem: Problem, launch: Launch) -> int:
    """Return the cells of C that a warp group stores per tile."""
    del problem  # all dtypes of C have 16 bits
    return launch.group_rows // CELL_ROWS * (launch.tile_n // 64)


def shared_bytes(launch: Launch) -> int:
    """Return the shared memory of a block, alignment included."""
    buffers = CONSUMERS * launch.store_buffers * CELL_BYTES
    return launch.slots * launch.slot_bytes + buffers + 16 * launch.slots + 1024


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_TILES = ((128, 256), (256, 128), (128, 192), (128, 128))
_MOST_ACCUMULATORS = 192  # registers of a thread; 232 are there


def _roomy(launch: Launch) -> Launch:
    """Return a launch with as many slots as fit."""
    fixed = shared_bytes(replace(launch, slots=0))
    return replace(launch, slots=min(8, (MOST_SHARED_BYTES - fixed) // (launch.slot_bytes + 16)))
