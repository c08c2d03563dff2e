"""How the kernels over tokens, heads and channels are launched: a choice by rule, the alternatives, and what is valid.

``tail_rope`` and ``rope_qdq_inplace`` stream an array (tokens, heads, channels) through the registers of their
threads. A block takes a tile: some tokens with all their heads, or some heads of one token, or a part of a very long
row. What matters for a stream is bytes under way: 64 in each thread, from accesses of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import lcm
from typing import Any

from fe_runtime.architecture import architecture_number, threads_per_sm

__all__ = ["TAIL", "Launch", "Problem", "candidates", "choose", "config", "is_valid", "split_config"]

TAIL = 64
"""Channels that are rotated, the last ones of a row."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about the array of a call.

    Parameters
    ----------
    heads, columns
        Heads of a token, channels of a head.
    rank
        2 for (tokens, channels), 3 for (tokens, heads, channels).
    packed
        Whether the heads of a token lie side by side in x.
    x_alignment, out_alignment, table_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every row of x, of the output, and of the
        tables.
    mode
        How groups are quantised, such as ``"fp4/32/ue8m0"``; ``None``: not at all.
    """

    heads: int
    columns: int
    rank: int = 3
    packed: bool = True
    x_alignment: int = 16
    out_alignment: int = 16
    table_alignment: int = 16
    mode: str | None = None

    @property
    def vector(self) -> int:
        """Neighbouring channels that a thread treats at once; they divide the row and its tail."""
        return next(vector for vector in (8, 4, 2) if self.columns % vector == 0)

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.columns // self.vector


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads
        Threads of a block.
    count
        Vectors of a thread.
    tokens, heads, vectors
        The tile of a block: tokens, heads of each, vectors of each head.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    prefetch
        How many blocks ahead the tile is brought to the second-level cache; 0: not at all.
    """

    threads: int
    count: int
    tokens: int
    heads: int
    vectors: int
    blocks_per_sm: int
    prefetch: int = 0

    @property
    def tile(self) -> int:
        """Vectors of a block."""
        return self.tokens * self.heads * self.vectors

    def head_tiles(self, problem: Problem) -> int:
        """Blocks that share the heads of a token."""
        return -(-problem.heads // self.heads)

    def vector_tiles(self, problem: Problem) -> int:
        """Blocks that share a row."""
        return -(-problem.vectors // self.vectors)


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the number of tokens does not matter."""
    return _launch(problem, arch, _SLOTS, _COUNT)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    bases = [choose(problem, arch)]
    bases += [_launch(problem, arch, count * threads, count) for count in (2, 4, 8) for threads in (128, 256, 512)]
    found = list(bases)
    for base in bases:
        found += [replace(base, prefetch=distance) for distance in (0, base.prefetch // 2, 2 * base.prefetch)]
        found += [replace(base, blocks_per_sm=max(1, base.blocks_per_sm * part // 4)) for part in (2, 3)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    whole_tokens = launch.tokens == 1 or launch.heads == problem.heads
    whole_rows = launch.tokens * launch.heads == 1 or launch.vectors == problem.vectors
    return (
        min(asdict(launch).values()) >= 0
        and min(launch.threads, launch.count, launch.tile, launch.blocks_per_sm) > 0
        and launch.heads <= problem.heads
        and launch.vectors <= problem.vectors
        and whole_tokens
        and whole_rows
        and (launch.vectors == problem.vectors or launch.vectors % _LANES_OF_A_GROUP == 0)
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.count >= launch.tile
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and (launch.prefetch == 0 or _can_prefetch(problem, launch, arch))
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | {f"launch_{name}": value for name, value in asdict(launch).items()}


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of; other entries are left alone."""
    problem = Problem(**{field.name: flat[field.name] for field in fields(Problem)})
    return problem, Launch(**{field.name: flat[f"launch_{field.name}"] for field in fields(Launch)})


_WARP = 32
_MAX_THREADS = 1024
_MOST_THREADS = 128  # of a block, as a rule; with more, and more vectors each, an H200 is 2 to 16 % slower
_COUNT = 2  # vectors of a thread: 32 bytes under way
_SLOTS = _COUNT * _MOST_THREADS
_LANES_OF_A_GROUP = 4  # threads that share the largest group that is quantised together
_AHEAD = 4 << 20  # bytes that are prefetched ahead
_SHORTEST_RUN = 1024  # bytes worth an instruction that prefetches them


def _launch(problem: Problem, arch: str, slots: int, count: int) -> Launch:
    """Return a launch of about ``slots`` vectors a block, ``count`` of them a thread."""
    vectors = min(problem.vectors, slots)
    rows = slots // vectors
    if rows >= problem.heads:
        tokens, heads = rows // problem.heads, problem.heads
    else:
        tokens, heads = 1, -(-problem.heads // -(-problem.heads // rows))
    threads, count = min(_splits(tokens * heads * vectors, vectors, slots // count, count))[1:]
    blocks = max(1, min(_resident(problem, arch, tokens, count), threads_per_sm(arch)) // threads)
    launch = Launch(threads, count, tokens, heads, vectors, blocks)
    if not _can_prefetch(problem, launch, arch):
        return launch
    return replace(launch, prefetch=max(1, _AHEAD // (launch.tile * problem.vector * 2)))


def _splits(tile: int, vectors: int, most: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (badness, threads, count) of the ways to spread a tile: few idle threads, whole rows at a time, and about
    ``count`` vectors a thread."""
    whole = lcm(_WARP, vectors)
    for step in {_WARP, whole} if whole <= most else {_WARP}:
        for threads in range(step, most + 1, step):
            each = -(-tile // threads)
            if each <= 2 * count:
                idle = threads * each - tile
                badness = 100 * idle // tile + 15 * abs(each - count) + (20 if threads % vectors else 0)
                yield badness + (threads < most // 2) * 5, threads, each


def _resident(problem: Problem, arch: str, tokens: int, count: int) -> int:
    """Return how many threads of a multiprocessor there are registers for, by experience with the compiler."""
    aligned = problem.x_alignment == problem.out_alignment == problem.table_alignment == 16
    simple = _is_power(problem.heads) and _is_power(problem.columns) and problem.columns >= 128
    if not (90 <= architecture_number(arch) < 100 and aligned and problem.packed and simple):
        return 1024 if problem.mode is None else 768 if count <= _COUNT else 512
    if problem.mode is None:
        return 1536 if tokens == 1 else 1280
    return 1280 if problem.heads == 1 or problem.heads >= 32 else 1024


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _can_prefetch(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether the tile consists of long runs that begin and end at multiples of 16 bytes."""
    run = launch.heads * problem.columns * 2
    return (
        architecture_number(arch) >= 90
        and problem.packed
        and problem.x_alignment == 16
        and problem.heads % launch.heads == 0
        and launch.vectors == problem.vectors
        and run % 16 == 0
        and run >= _SHORTEST_RUN
        and launch.tokens <= launch.threads
    )
