"""How ``mhc_projection_backward`` is launched: a choice by rules, the alternatives, and what is valid.

A block walks down a strip of columns over one of ``splits`` ranges of rows. What counts: some 48 KB under way on each
multiprocessor, about as many blocks as run at once (or a multiple), and no spilled registers. The number of rows
decides nothing here: a compiled kernel serves any.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from fe_runtime.architecture import architecture_number, shared_memory_per_sm, threads_per_sm

__all__ = [
    "MOST_COEFFICIENTS",
    "STEP_ROWS",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "shared_bytes",
    "split_config",
]

MOST_COEFFICIENTS = 64
"""Largest N: a thread keeps its share of weight and of its gradient in registers."""

STEP_ROWS = 16
"""Rows that a warp treats at once: the depth of one tensor-core instruction."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    coefficients
        N, rows of the weight: 1 to 64.
    columns
        Kc, columns of x and of the weight: a multiple of 8.
    """

    coefficients: int
    columns: int

    @property
    def tiles(self) -> int:
        """Groups of eight coefficients, the last one filled up with zeros."""
        return -(-self.coefficients // 8)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    vector
        Neighbouring columns of a thread, in four rows at a time: 8 or 4.
    warps
        Warps of a block, side by side, each with ``8 * vector`` columns.
    stages
        Steps of 16 rows that have room in shared memory: the one at work and those under way.
    chunk
        Rows whose coefficients the block brings at once.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    splits
        Ranges of rows, at most: each costs a partial sum of the size of the weight. Fixes the order of the sum.
    overlap
        Whether the kernel that adds the partial sums starts before they are complete, and waits (sm_90).
    """

    vector: int
    warps: int
    stages: int
    chunk: int
    blocks_per_sm: int
    splits: int
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32

    @property
    def strip(self) -> int:
        """Columns of a block."""
        return self.warps * 8 * self.vector

    def strips(self, problem: Problem) -> int:
        """Return the blocks side by side."""
        return -(-problem.columns // self.strip)


def choose(problem: Problem, arch: str, sm_count: int) -> Launch:
    """Return the launch for a problem on a GPU."""
    vector = 8 if problem.tiles <= 4 else 4
    launch = Launch(vector, 4, 4, 32, 2, 1, architecture_number(arch) >= 90)
    while launch.stages > 2 and not _fits(problem, launch, arch):
        launch = replace(launch, stages=launch.stages - 1)
    return replace(launch, splits=_splits(problem, launch, sm_count))


def candidates(problem: Problem, arch: str, sm_count: int) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    first = choose(problem, arch, sm_count)
    found = [first, replace(first, overlap=False)]
    spreads = product((first.vector, 4), ((4, 2), (2, 4), (8, 1), (4, 3), (2, 6), (4, 1)), (32, 64), (3, 4, 5, 6))
    for vector, (warps, blocks), chunk, stages in spreads:
        launch = Launch(vector, warps, stages, chunk, blocks, 1, first.overlap)
        fewest = _splits(problem, launch, sm_count)
        found += [replace(launch, splits=splits) for splits in sorted({fewest, 2 * fewest, 8})]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    return (
        0 < problem.coefficients <= MOST_COEFFICIENTS
        and problem.columns > 0
        and problem.columns % 8 == 0
        and launch.vector in (4, 8)
        and launch.warps in (1, 2, 4, 8)
        and launch.stages >= 2
        and launch.chunk in (16, 32, 64)
        and launch.chunk <= launch.threads
        and launch.blocks_per_sm >= 1
        and launch.splits >= 1
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and _registers(problem, launch) <= min(_MOST_REGISTERS, _REGISTERS // (launch.threads * launch.blocks_per_sm))
        and _fits(problem, launch, arch)
        and (architecture_number(arch) >= 90 or not launch.overlap)
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


def shared_bytes(problem: Problem, launch: Launch) -> int:
    """Return the bytes of shared memory of a block: the steps of x, and two chunks of coefficients."""
    steps = launch.stages * launch.threads * 4 * launch.vector * 2
    coefficients = launch.chunk // STEP_ROWS * problem.tiles * 2 * 32 * 16
    return steps + 2 * (coefficients + launch.chunk * 4)


_REGISTERS = 65536  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_MOST_SPLITS = 32
_BUSY = 0.9  # share of the places for blocks that should be taken


def _splits(problem: Problem, launch: Launch, sm_count: int) -> int:
    """Return the fewest splits that keep the multiprocessors busy to the end, or those that do it best."""
    places = launch.blocks_per_sm * sm_count

    def busy(splits: int) -> float:
        blocks = launch.strips(problem) * splits
        return blocks / (-(-blocks // places) * places)

    enough = (splits for splits in range(1, _MOST_SPLITS + 1) if busy(splits) >= _BUSY)
    return next(enough, 0) or max(range(1, _MOST_SPLITS + 1), key=busy)


def _registers(problem: Problem, launch: Launch) -> int:
    """Return the registers that a thread needs, by experience with the compiler.

    Its shares of the weight and of the gradient, the pairs of coefficients that it brings, and a step of x.
    """
    pairs = -(-launch.chunk * problem.tiles * 4 // launch.threads)
    return 4 * launch.vector * problem.tiles + 7 * pairs + 6 * launch.vector + 36


def _fits(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether the blocks' shared memory fits; the system keeps 1 KB for itself in each."""
    return launch.blocks_per_sm * (shared_bytes(problem, launch) + 1024) <= shared_memory_per_sm(arch)
