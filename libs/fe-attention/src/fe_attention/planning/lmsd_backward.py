"""How the gradient of LMSD is launched: a choice by rules, the alternatives, and what is valid.

A fixed number of blocks walk over the rows, each with its own sums for weight and bias in registers. A row's operands
are copied to shared memory some rows before their turn. What counts: some 64 KB under way on each multiprocessor,
enough warps at work on it, and no spilled registers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import architecture_number, shared_memory_per_sm, threads_per_sm

from . import lmsd
from .lmsd import MOST_COLUMNS, VECTOR

__all__ = [
    "VECTOR",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "most_columns",
    "partial_rows",
    "shared_bytes",
    "split_config",
]


@dataclass(frozen=True, slots=True)
class Problem(lmsd.Problem):
    """What is static about a call: that of the forward, and whether the gradient of the weight is wanted."""

    compute_dweight: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes that are read of a row: the parts of dy, x, u and the mask."""
        return self.columns * (2 * self.parts + 4 + self.has_dropout)

    @property
    def sums(self) -> int:
        """Sums over all rows that are made for each column."""
        return 1 + self.compute_dweight


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads_per_row
        Threads of one block that share a row: a power of two up to 32, or all threads of the block.
    groups
        Rows side by side in a block.
    chunk
        Vectors of a thread.
    stages
        Rows of a group that have room in shared memory: the one at work and those under way. 0: rows are read from
        global memory when they are needed, twice.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    blocks
        Blocks in all, if there are rows enough. It fixes the order of the sums over rows.
    overlap
        Whether the kernel that adds the blocks' sums starts before they are complete, and waits (sm_90).
    """

    threads_per_row: int
    groups: int
    chunk: int
    stages: int
    blocks_per_sm: int
    blocks: int
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.groups


def choose(problem: Problem, arch: str, sm_count: int) -> Launch:
    """Return the launch for a problem on a GPU; the number of rows does not matter."""
    best = None
    for threads, most in _SPLITS:
        if -(-problem.vectors // threads) > most:
            continue
        found = _staged(problem, arch, sm_count, threads)
        if found is not None and (best is None or _at_work(found) > _at_work(best)):
            best = found
        if best is not None and _at_work(best) >= _ENOUGH:
            break
    return best or _direct(problem, arch, sm_count)


def most_columns(arch: str) -> int:
    """Return the columns of the longest row for which there is a kernel.

    Longer rows would need more registers than a thread can have. Where a block cannot have rows of the usual length in
    shared memory, that is earlier.
    """
    return MOST_COLUMNS if 90 <= architecture_number(arch) < 120 else MOST_COLUMNS * 3 // 4


def candidates(problem: Problem, arch: str, sm_count: int) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    first = choose(problem, arch, sm_count)
    found = [first, replace(first, overlap=False), _direct(problem, arch, sm_count)]
    for threads in (4, 8, 16, 32, 64, 128, 256, 512):
        chunk = -(-problem.vectors // threads)
        if chunk > _MOST_VECTORS or threads > 2 * problem.vectors:
            continue
        for width in (64, 128, 256):
            groups = max(1, width // threads) if threads <= _WARP else 1
            for stages in (0, 2, 3, 4):
                found += [
                    Launch(threads, groups, chunk, stages, blocks, blocks * sm_count, first.overlap)
                    for blocks in (1, 2, 3, 4, 6, 8)
                ]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    whole_groups = launch.threads_per_row in _PARTS_OF_A_WARP or launch.groups == 1
    return (
        min(launch.threads, launch.chunk, launch.blocks_per_sm, launch.blocks) > 0
        and problem.columns % VECTOR == 0
        and whole_groups
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and launch.chunk * launch.threads_per_row >= problem.vectors
        and (launch.groups == 1 if launch.stages == 0 else launch.stages > 1 and _fits(problem, launch, arch))
        and launch.blocks_per_sm <= max(1, _by_registers(problem, launch, arch))
        and (_hopper(arch) or not launch.overlap)
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


def partial_rows(launch: Launch, rows: int) -> int:
    """Return how many blocks work on a number of rows; each writes one row of sums."""
    return max(1, min(launch.blocks, -(-rows // launch.groups)))


def shared_bytes(problem: Problem, launch: Launch) -> int:
    """Return the bytes of shared memory of a block: rows, weight and bias, and through which a row's threads meet."""
    values = VECTOR * launch.chunk
    per_value = problem.row_bytes // problem.columns
    rows = launch.stages * launch.threads * values * per_value
    parameters = 4 * values * launch.threads_per_row if launch.stages else 0
    return rows + parameters + _SMALL


_WARP = 32
_PARTS_OF_A_WARP = (1, 2, 4, 8, 16, 32)
_MAX_THREADS = 1024
_BLOCK = 128  # threads of a block of several rows
_REGISTERS = 65536  # of a multiprocessor
_SPLITS = ((1, 1), (2, 1), (4, 2), (8, 2), (16, 2), (32, 4), (64, 2), (128, 2), (256, 2), (512, 2), (512, 4))
"""Threads that share a row, and their most vectors; the first split with enough threads at work is taken."""
_MOST_VECTORS = 4
_ENOUGH = 448  # threads that should be at work on a multiprocessor
_MOST_BLOCKS = 8  # on a multiprocessor: each costs a row of sums, which the second kernel reads
_UNDER_WAY = 48 << 10  # bytes that a multiprocessor should wait for
_SMALL = 512  # bytes of shared memory through which the threads of a row meet, rounded up


def _at_work(launch: Launch) -> int:
    return launch.threads * launch.blocks_per_sm


def _staged(problem: Problem, arch: str, sm_count: int, threads: int) -> Launch | None:
    """Return the launch for a split of the row with enough bytes under way, or as many as fit."""
    if threads > _WARP:
        threads = _whole_warps(problem, -(-problem.vectors // threads))
    chunk = -(-problem.vectors // threads)
    groups = max(1, _BLOCK // threads) if threads <= _WARP else 1
    found = None
    for stages in (2, 3, 4):
        launch = Launch(threads, groups, chunk, stages, 1, sm_count, _hopper(arch))
        most = min(_MOST_BLOCKS, threads_per_sm(arch) // launch.threads, _by_registers(problem, launch, arch))
        fitting = [n for n in range(1, most + 1) if _fits(problem, replace(launch, blocks_per_sm=n), arch)]
        if not fitting or (found is not None and fitting[-1] < found.blocks_per_sm):
            break
        found = replace(launch, blocks_per_sm=fitting[-1], blocks=fitting[-1] * sm_count)
        if (stages - 1) * groups * problem.row_bytes * fitting[-1] >= _UNDER_WAY:
            break
    return found


def _direct(problem: Problem, arch: str, sm_count: int) -> Launch:
    """Return the launch for rows that do not fit into shared memory."""
    chunk = max(1, -(-problem.vectors // 512))
    threads = _whole_warps(problem, chunk)
    return Launch(threads, 1, chunk, 0, 1, sm_count, _hopper(arch))


def _whole_warps(problem: Problem, chunk: int) -> int:
    """Return the threads of whole warps that share a row, ``chunk`` vectors each."""
    needed = -(-problem.vectors // chunk)
    return -(-needed // _WARP) * _WARP


def _by_registers(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the blocks for which a multiprocessor has registers, by experience with the compiler."""
    need = launch.chunk * VECTOR * problem.sums
    need += 88 if launch.threads_per_row >= _WARP and launch.chunk <= 2 else 100
    # Before Hopper the compiler counts on registers being given out to four warps at a time.
    counted = launch.threads if _hopper(arch) else -(-launch.threads // 128) * 128
    return _REGISTERS // (-(-need // 8) * 8 * counted)


def _fits(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether the blocks' shared memory fits; the system keeps 1 KB for itself in each."""
    return launch.blocks_per_sm * (shared_bytes(problem, launch) + 1024) <= shared_memory_per_sm(arch)


def _hopper(arch: str) -> bool:
    return architecture_number(arch) >= 90
