"""How the kernels of the Engram gate are launched: a choice by rules, the alternatives, and what is valid.

Forward: a block takes one stream of a few tokens, with the stream's weight in registers. Backward: one block a token
makes the coefficients of its gradient; then blocks walk over the tokens of some columns, all streams of them, with the
sums for the weight in registers, and write them as a row of partial sums.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

from fe_runtime.architecture import shared_memory_per_sm

__all__ = [
    "MOST_STREAMS",
    "Backward",
    "Forward",
    "Problem",
    "Whole",
    "backward_candidates",
    "choose_backward",
    "choose_forward",
    "choose_whole",
    "config",
    "forward_candidates",
    "is_valid_backward",
    "is_valid_forward",
    "partial_rows",
    "shared_bytes",
    "split_config",
]

MOST_STREAMS = 16
"""Streams whose sums a thread can hold in registers, one column of each at least."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call: streams of a token, and values of a stream."""

    streams: int
    width: int

    @property
    def vector(self) -> int:
        """Neighbouring values that one access moves: 16 bytes of bf16 where every stream starts at such a multiple."""
        return gcd(self.width, _VECTOR)


@dataclass(frozen=True, slots=True)
class Forward:
    """How the forward is spread.

    Parameters
    ----------
    threads
        Threads of a block, which share a stream of a token.
    chunk
        Vectors of a thread. Fewer than the stream needs means that it is read twice.
    tokens
        Tokens of a block.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    """

    threads: int
    chunk: int
    tokens: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Backward:
    """How the gradient is spread.

    Parameters
    ----------
    sum_threads, sum_chunk
        Threads of a block that makes the coefficients of a token, and vectors that each of them loads at once.
    threads
        Threads of a block that applies them: each has one vector of columns, of all streams.
    vector
        Values of such a vector.
    splits
        Blocks that share the tokens of the same columns, if there are tokens enough. It fixes the order of the sums.
    blocks_per_sm
        Blocks that must fit on a multiprocessor.
    """

    sum_threads: int
    sum_chunk: int
    threads: int
    vector: int
    splits: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Whole:
    """How the gradient is spread where a token fits in shared memory.

    Parameters
    ----------
    threads
        Threads of a block: each has one vector of columns, of all streams.
    blocks_per_sm
        Blocks that must fit on a multiprocessor.
    blocks
        Blocks in all, if there are tokens enough. It fixes the order of the sums.
    """

    threads: int
    blocks_per_sm: int
    blocks: int

    @property
    def splits(self) -> int:
        """Blocks that share the tokens of the same columns: all."""
        return self.blocks


def choose_forward(problem: Problem) -> Forward:
    """Return the launch of the forward; the number of tokens does not matter."""
    vectors = problem.width // problem.vector
    chunk = 5 if vectors % (5 * _WARP) == 0 else 4
    threads = _whole_warps(vectors, chunk)
    if threads > _MAX_THREADS:
        threads = _LONG
    return Forward(threads, min(chunk, -(-vectors // threads)), _TOKENS, max(1, _AT_WORK // threads))


def forward_candidates(problem: Problem) -> list[Forward]:
    """Return the launches worth timing, the chosen one first."""
    first = choose_forward(problem)
    vectors = problem.width // problem.vector
    found = [first]
    for chunk in (2, 3, 4, 5, 6):
        threads = _whole_warps(vectors, chunk)
        for tokens in (1, 2, 4, 8, 16):
            for at_work in (384, 512, 640, 768):
                found.append(Forward(threads, chunk, tokens, max(1, at_work // threads)))
    return [launch for launch in dict.fromkeys(found) if is_valid_forward(problem, launch)]


def is_valid_forward(problem: Problem, launch: Forward) -> bool:
    """Whether a launch computes a problem."""
    del problem
    whole = launch.threads % _WARP == 0 and launch.threads <= _MAX_THREADS
    return min(asdict(launch).values()) > 0 and whole and launch.threads * launch.blocks_per_sm <= _MOST_AT_WORK


def choose_backward(problem: Problem, sm_count: int) -> Backward:
    """Return the launch of the gradient on a GPU of so many multiprocessors."""
    vectors = problem.width // problem.vector
    sum_chunk = 2 if problem.streams <= _FEW_STREAMS else 1
    sum_threads = min(_whole_warps(vectors, sum_chunk), _MAX_THREADS)
    vector = min(problem.vector, max(1, _MOST_VALUES // (1 << (problem.streams - 1).bit_length())))
    threads = min(_APPLY_THREADS, _whole_warps(problem.width // vector, 1))
    tiles = -(-(problem.width // vector) // threads)
    is_easy = tiles * threads * vector == problem.width and problem.streams <= _MANY_STREAMS
    blocks_per_sm = (_APPLY_AT_WORK if is_easy else _HARD_AT_WORK) // threads
    splits = max(1, blocks_per_sm * sm_count // tiles)
    return Backward(sum_threads, sum_chunk, threads, vector, splits, blocks_per_sm)


def choose_whole(problem: Problem, arch: str, sm_count: int) -> Whole | None:
    """Return the launch of the gradient with each token in shared memory, or ``None`` where it does not fit there."""
    threads = _whole_warps(problem.width // problem.vector, 1)
    if problem.streams > _FEW_STREAMS or problem.vector < _VECTOR or threads > _WHOLE_AT_WORK:
        return None
    room = shared_memory_per_sm(arch) // (shared_bytes(problem) + _SYSTEM)
    blocks_per_sm = min(room, _WHOLE_AT_WORK // threads)
    return Whole(threads, blocks_per_sm, blocks_per_sm * sm_count) if blocks_per_sm else None


def shared_bytes(problem: Problem) -> int:
    """Return the bytes of shared memory of a block: three operands of each stream, the value, the weight."""
    streams = problem.streams
    threads = _whole_warps(problem.width // problem.vector, 1)
    meeting = 4 * (threads // _WARP + 4) * streams * 2
    return threads * problem.vector * (2 * (3 * streams + 1) + 4 * streams) + meeting


def backward_candidates(problem: Problem, sm_count: int) -> list[Backward]:
    """Return the launches worth timing, the chosen one first."""
    first = choose_backward(problem, sm_count)
    found = [first]
    for threads in (64, 128, 160, 256, 320):
        tiles = -(-(problem.width // first.vector) // threads)
        for at_work in (256, 384, 512):
            blocks = max(1, at_work // threads)
            splits = max(1, blocks * sm_count // tiles)
            found.append(replace(first, threads=threads, blocks_per_sm=blocks, splits=splits))
    vectors = problem.width // problem.vector
    found += [
        replace(first, sum_chunk=chunk, sum_threads=min(_whole_warps(vectors, chunk), _MAX_THREADS))
        for chunk in (1, 2, 3)
    ]
    return [launch for launch in dict.fromkeys(found) if is_valid_backward(problem, launch)]


def is_valid_backward(problem: Problem, launch: Backward) -> bool:
    """Whether a launch computes a problem."""
    sizes = (launch.sum_threads, launch.threads)
    return (
        min(asdict(launch).values()) > 0
        and problem.streams <= MOST_STREAMS
        and problem.vector % launch.vector == 0
        and all(size % _WARP == 0 and size <= _MAX_THREADS for size in sizes)
        and launch.threads * launch.blocks_per_sm <= _MOST_AT_WORK
    )


def partial_rows(launch: Backward | Whole, tokens: int) -> int:
    """Return how many blocks share the tokens of the same columns; each writes one row of sums."""
    return max(1, min(launch.splits, tokens))


def config(problem: Problem, launch: Forward | Backward | Whole) -> dict[str, int]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any], kind: type[Any]) -> tuple[Problem, Any]:
    """Return what :func:`config` was made of; ``kind`` is the launch's class."""
    problem, launch = ({f.name: flat[f.name] for f in fields(known)} for known in (Problem, kind))
    return Problem(**problem), kind(**launch)


_VECTOR = 8
_WARP = 32
_MAX_THREADS = 1024
_LONG = 512  # threads of a block whose stream does not fit in registers
_TOKENS = 4
_AT_WORK = 512  # threads of a multiprocessor, of the forward: with 128 registers each
_MOST_AT_WORK = 2048
_FEW_STREAMS = 4  # of which a thread can load two vectors each
_MOST_VALUES = 32  # of a thread of the gradient: columns times streams
_APPLY_THREADS = 128
_APPLY_AT_WORK = 384  # threads of a multiprocessor: with 168 registers each
_MANY_STREAMS = 8
_WHOLE_AT_WORK = 640  # threads of a multiprocessor: with 96 registers each
_SYSTEM = 1024  # bytes of shared memory that the system keeps of each block
_HARD_AT_WORK = 256  # where there is more to keep: many streams, or columns past the end


def _whole_warps(vectors: int, chunk: int) -> int:
    """Return the threads that share so many vectors, ``chunk`` each."""
    needed = -(-vectors // chunk)
    return -(-needed // _WARP) * _WARP
