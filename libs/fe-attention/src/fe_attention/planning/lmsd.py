"""How the kernel of LMSD is launched: a choice by rules, the alternatives, and what is valid.

A group of threads (a part of a warp, a warp, or a block) takes some rows, one after the other. What counts: 64 bytes of
x and u under way in each thread while the row before is at work, because random numbers cost about as many instructions
as fit into the time of the memory traffic, and few barriers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import architecture_number, threads_per_sm

__all__ = ["MOST_COLUMNS", "VECTOR", "Launch", "Problem", "candidates", "choose", "config", "is_valid", "split_config"]

VECTOR = 8
"""Neighbouring columns that a thread treats at once: 16 bytes of bfloat16, two counters of random numbers."""
MOST_COLUMNS = 8192
"""Columns of the longest row for which there is a kernel."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call: the length of rows, and the flags of the operation."""

    columns: int
    apply_u_silu: bool = True
    concat_u: bool = True
    concat_x: bool = True
    has_dropout: bool = True

    @property
    def vectors(self) -> int:
        """Vectors in a row."""
        return self.columns // VECTOR

    @property
    def parts(self) -> int:
        """Parts of a row of y."""
        return 1 + self.concat_u + self.concat_x


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads_per_row
        Threads of one block that share a row: a power of two up to 32, or all threads of the block.
    groups
        Rows side by side in a block.
    rows
        Rows of a group, one after the other; the next one is loaded while one is at work.
    chunk
        Vectors of a thread.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    prefetch
        How many blocks ahead rows are brought to the second-level cache; 0: not at all.
    """

    threads_per_row: int
    groups: int
    rows: int
    chunk: int
    blocks_per_sm: int
    prefetch: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.groups

    @property
    def tile(self) -> int:
        """Rows of a block."""
        return self.groups * self.rows


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the number of rows does not matter."""
    return _launch(problem, arch, *next(_splits(problem)))


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    found = [_launch(problem, arch, *split) for split in _splits(problem)]
    for base in list(found):
        found += [replace(base, prefetch=distance) for distance in (0, 2 * base.prefetch)]
        found += [replace(base, rows=rows) for rows in (1, 2, 8, 16)]
        found += [replace(base, blocks_per_sm=blocks) for blocks in range(1, base.blocks_per_sm + 3)]
        if base.threads_per_row <= _WARP:
            found.append(replace(base, groups=base.groups * 2, blocks_per_sm=max(1, base.blocks_per_sm // 2)))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    whole_groups = launch.threads_per_row in _PARTS_OF_A_WARP or launch.groups == 1
    return (
        min(asdict(launch).values()) >= 0
        and min(launch.threads, launch.rows, launch.chunk, launch.blocks_per_sm) > 0
        and problem.columns % VECTOR == 0
        and whole_groups
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and launch.threads * launch.blocks_per_sm * _LEAST_REGISTERS <= _REGISTERS
        and launch.chunk * launch.threads_per_row >= problem.vectors
        and (launch.prefetch == 0 or architecture_number(arch) >= 90)
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_WARP = 32
_PARTS_OF_A_WARP = (1, 2, 4, 8, 16, 32)
_MAX_THREADS = 1024
_USUAL_THREADS = 512  # most of a block that shares a row
_SMALL_BLOCK = 128  # threads of a block of several rows
_REGISTERS = 65536  # of a multiprocessor
_LEAST_REGISTERS = 32  # with which a thread can work at all
_ROWS = 4  # of a group
_AHEAD = 4 << 20  # bytes that are prefetched ahead
_LINE = 128  # bytes of a line of the cache


def _splits(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield threads that share a row and the vectors of each, the usual ones first."""
    vectors = problem.vectors
    usual = max(2, -(-vectors // _USUAL_THREADS))
    for chunk in dict.fromkeys((usual, 1, 2, 3, 4)):
        threads = -(-vectors // chunk)
        threads = 1 << (threads - 1).bit_length() if threads <= _WARP else -(-threads // _WARP) * _WARP
        if threads <= _USUAL_THREADS:
            yield threads, -(-vectors // threads)


def _launch(problem: Problem, arch: str, threads: int, chunk: int) -> Launch:
    hopper = architecture_number(arch) >= 90
    groups = max(1, _SMALL_BLOCK // threads) if threads <= _WARP else 1
    rows = _ROWS if chunk <= 2 else 1
    block = threads * groups
    has_more = threads > _WARP or threads * chunk > problem.vectors or (threads < _WARP and not problem.apply_u_silu)
    registers = -(-(_registers(arch, chunk, rows) + 8 * has_more) // 8) * 8
    # Each quarter of a multiprocessor gives registers to a quarter of its warps; before Hopper a block takes warps in
    # fours.
    warps = block // _WARP if hopper else -(-block // (4 * _WARP)) * 4
    fitting = _REGISTERS // (4 * _WARP * registers) * 4 // warps
    blocks = max(1, min(threads_per_sm(arch) // block, fitting))
    row_bytes = 2 * problem.columns
    prefetches = hopper and row_bytes % _LINE == 0  # not parts of lines
    ahead = max(1, _AHEAD // (2 * row_bytes * groups * rows)) if prefetches else 0
    return Launch(threads, groups, rows, chunk, blocks, ahead)


def _registers(arch: str, chunk: int, rows: int) -> int:
    """Return the registers that a thread needs without spilling, by experience with the compiler."""
    need = 64 + 16 * chunk if rows > 1 else 60 + 16 * chunk
    return need + (0 if 90 <= architecture_number(arch) < 100 else 8)
