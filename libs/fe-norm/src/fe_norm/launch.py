"""How the row kernels of fe_norm are launched: a choice by hand-tuned rules, the alternatives, and what is valid.

The rules were found by timing on an H200 (rows of bfloat16, 0.5 GB read and written, cold cache). What matters there:

* about 32 bytes of x in flight per thread, from one long row or two short ones; few idle threads at the row's end;
* blocks of 64 to 512 threads, so that some load while others store; a row of 16 KB is read by 512 threads;
* rows brought to the second-level cache about two microseconds before their block starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

from fe_runtime.architecture import architecture_number, threads_per_sm

__all__ = [
    "NVFP4_VECTOR",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "loads_parameters_late",
    "split_config",
]

NVFP4_VECTOR = 8
"""Values of a thread's vector for NVFP4: two neighbouring threads share a block of 16."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    columns
        Values in a row.
    x_dtype, weight_dtype
        bfloat16, float16 or float32; ``weight_dtype`` ``None``: no weight.
    out_format
        bfloat16, float16, float32, float8_e4m3fn or nvfp4.
    has_bias, has_scale
        Which other optional operands there are.
    x_alignment, o_alignment, weight_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every row of x (and of the residual and the
        sum), of every row of o, and of weight and bias.
    bias_dtype
        ``None``: as the weight, float32 without one.
    activation
        ``None`` or ``"silu"``.
    has_residual
        Whether a residual of the dtype and alignment of x is added first, and the sum stored.
    has_rstd
        Whether the reciprocal root mean square of each row is stored.
    """

    columns: int
    x_dtype: str
    out_format: str
    weight_dtype: str | None = None
    has_bias: bool = False
    has_scale: bool = False
    x_alignment: int = 16
    o_alignment: int = 16
    weight_alignment: int = 16
    bias_dtype: str | None = None
    activation: str | None = None
    has_residual: bool = False
    has_rstd: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.columns * _BYTES[self.x_dtype]

    @property
    def is_quantised(self) -> bool:
        """Whether the output has 8 bits or fewer: then arithmetic counts as much as memory."""
        return self.out_format not in _BYTES


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    vector
        Neighbouring values that a thread treats at once.
    threads_per_row
        Threads of one block that share a row: a power of two up to 32, or all threads of the block.
    groups
        Rows side by side in a block.
    rows
        Rows that a group of threads holds at the same time.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    chunk
        Vectors that a thread holds at once; fewer than the row needs means that the row is read twice.
    prefetch
        How many blocks ahead rows are brought to the second-level cache; 0: not at all.
    """

    vector: int
    threads_per_row: int
    groups: int
    rows: int
    blocks_per_sm: int
    chunk: int
    prefetch: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.groups

    @property
    def tile(self) -> int:
        """Rows of a block."""
        return self.groups * self.rows

    def is_one_pass(self, problem: Problem) -> bool:
        """Whether a row stays in the registers of its threads."""
        return self.chunk * self.threads_per_row * self.vector >= problem.columns


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the number of rows does not matter."""
    threads, chunk = _split(problem, arch)
    two_rows = chunk * _words(problem) < _WORDS_IN_FLIGHT and not problem.is_quantised
    return _launch(problem, arch, threads, chunk, rows=2 if two_rows else 1)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    bases = [choose(problem, arch)]
    bases += [_launch(problem, arch, *split, rows) for split in _splits(problem) for rows in (1, 2)]
    found = list(bases)
    for base in bases:
        found += [replace(base, prefetch=distance) for distance in (0, 2 * base.prefetch)]
        found.append(replace(base, blocks_per_sm=max(1, base.blocks_per_sm * 3 // 4)))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    whole_groups = launch.threads_per_row in _PARTS_OF_A_WARP or launch.groups == 1
    pairs = problem.out_format != "nvfp4" or (launch.vector == NVFP4_VECTOR and launch.threads_per_row % 2 == 0)
    return (
        min(asdict(launch).values()) >= 0
        and min(launch.vector, launch.tile, launch.blocks_per_sm, launch.chunk) > 0
        and problem.columns % launch.vector == 0
        and whole_groups
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and pairs
        and (launch.is_one_pass(problem) or launch.tile == 1)
        and (launch.prefetch == 0 or (_can_prefetch(problem, arch) and launch.is_one_pass(problem)))
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def loads_parameters_late(problem: Problem, launch: Launch) -> bool:
    """Whether weight and bias are loaded vector by vector, because a thread's whole share takes too many registers."""
    return _parameter_words(problem, launch.chunk) > _MOST_WORDS


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WARP = 32
_PARTS_OF_A_WARP = (1, 2, 4, 8, 16, 32)
_MAX_THREADS = 1024
_USUAL_THREADS = 512  # of a block that shares a row
_SMALL_BLOCK = 128  # threads of a block of several rows
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 255  # of a thread
_WORDS_IN_FLIGHT = 8  # registers of x that a thread should have under way
_MOST_WORDS = 32  # registers of x with which a block of the usual size is still best
_IDLE = 1.13  # threads per useful thread that are tolerated at the end of a row
_NEAR, _FAR = 4 << 20, 8 << 20  # bytes that are prefetched ahead, for rows below and from 32 KB


def _vector(problem: Problem) -> int:
    if problem.out_format == "nvfp4":
        return NVFP4_VECTOR
    return gcd(problem.columns, problem.x_alignment // _BYTES[problem.x_dtype])


def _words(problem: Problem) -> int:
    """Return the registers of a vector of x; narrow accesses leave part of each empty."""
    size = _BYTES[problem.x_dtype]
    narrow = problem.x_alignment < 4 and size < 4
    return _vector(problem) if narrow else -(-_vector(problem) * size // 4)


def _split(problem: Problem, arch: str) -> tuple[int, int]:
    """Return how many threads share a row, and how many vectors each holds at once."""
    vectors = problem.columns // _vector(problem)
    splits = [split for split in _splits(problem) if _fits(problem, arch, *split)]
    tight = [split for split in splits if split[0] * split[1] <= _IDLE * vectors]
    if splits:
        return tight[0] if tight else min(splits, key=lambda split: split[0] * split[1])
    for threads in (_MAX_THREADS, _USUAL_THREADS):
        chunk = -(-vectors // threads)
        if _fits(problem, arch, threads, chunk):
            return threads, chunk
    return _split_in_passes(problem, arch, vectors)


def _split_in_passes(problem: Problem, arch: str, vectors: int) -> tuple[int, int]:
    """Return the same for rows that are read twice: few and full chunks."""
    for threads in (_MAX_THREADS, _USUAL_THREADS):
        most = max([count for count in range(1, 17) if _fits(problem, arch, threads, count)], default=0)
        if most:
            break
    chunks = -(-vectors // (threads * max(1, most)))
    return threads, -(-vectors // (threads * chunks))


def _fits(problem: Problem, arch: str, threads: int, chunk: int) -> bool:
    launch = Launch(_vector(problem), threads, 1, 1, 1, chunk)
    return _registers(problem, launch, arch) <= min(_MAX_REGISTERS, _REGISTERS // max(threads, _SMALL_BLOCK))


def _splits(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the ways to keep a row in the registers of a block of usual size, fewest vectors per thread first."""
    vectors, words = problem.columns // _vector(problem), _words(problem)
    least = -(-_WORDS_IN_FLIGHT // words)
    if problem.out_format == "nvfp4" and vectors >= 4 * _WARP:
        least *= 2
    most = max(least, _MOST_WORDS // words)
    if words >= 4 and vectors <= _SMALL_BLOCK and not problem.is_quantised:
        least = 1
    for count in range(least, most + 1):
        threads = _group_size(-(-vectors // count), 2 if problem.out_format == "nvfp4" else 1)
        if threads <= _USUAL_THREADS:
            yield threads, -(-vectors // threads)


def _parameter_words(problem: Problem, chunk: int) -> int:
    """Return the registers of a thread's share of weight and bias."""
    dtypes = [problem.weight_dtype] if problem.weight_dtype else []
    dtypes += [problem.bias_dtype or problem.weight_dtype or "float32"] if problem.has_bias else []
    return sum(chunk * max(1, _vector(problem) * _BYTES[dtype] // 4) for dtype in dtypes)


def _group_size(threads: int, least: int) -> int:
    if threads > _WARP:
        return -(-threads // _WARP) * _WARP
    return max(least, 1 << (threads - 1).bit_length())


def _launch(problem: Problem, arch: str, threads: int, chunk: int, rows: int) -> Launch:
    groups = max(1, _SMALL_BLOCK // threads) if threads <= _WARP else 1
    launch = Launch(_vector(problem), threads, groups, rows, 1, chunk)
    if not launch.is_one_pass(problem):
        return replace(launch, groups=1, rows=1)
    return replace(launch, blocks_per_sm=_blocks(problem, launch, arch), prefetch=_prefetch(problem, launch, arch))


def _registers(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the registers that a thread needs without spilling, by experience with the compiler.

    The values of x and of the residual, 16 words each of weight and bias (not all are there at once), and what
    arithmetic takes.
    """
    chunk = launch.chunk
    x_words = chunk * _words(problem)
    parameters = max(1, (problem.weight_dtype is not None) + problem.has_bias)
    need = (1 + problem.has_residual) * launch.rows * x_words
    need += min(max(x_words, _parameter_words(problem, chunk)), 16 * parameters)
    need += (2 * chunk + 2) * parameters if loads_parameters_late(problem, launch) else 0
    need += 8 if problem.has_bias else 0
    need += 4 if problem.has_rstd and x_words >= _MOST_WORDS else 0
    if not 90 <= architecture_number(arch) < 100:  # the numbers are Hopper's; others need a little more
        need += 10 if problem.out_format == "float32" else 4
    if problem.out_format == "nvfp4":
        return need + 28 + 3 * chunk
    need += 24 if problem.out_format == "float32" else 16
    need -= 8 if problem.x_dtype == "float32" else 0
    need += 5 + 3 * chunk if launch.tile > 1 else 0
    return need + (0 if launch.is_one_pass(problem) else 32 if problem.has_bias or problem.has_residual else 12)


def _blocks(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the blocks for which there are registers, up to where more of them no longer help."""
    limit = threads_per_sm(arch)
    wanted = limit * 3 // 4 if launch.threads <= 256 else limit
    registers = -(-_registers(problem, launch, arch) // 8) * 8
    # Before Hopper the compiler counts on registers being given out to four warps at a time.
    threads = launch.threads if architecture_number(arch) >= 90 else -(-launch.threads // 128) * 128
    return max(1, min(wanted // launch.threads, _REGISTERS // (registers * threads)))


def _prefetch(problem: Problem, launch: Launch, arch: str) -> int:
    """Return how many blocks ahead to prefetch: not parts of cache lines, not short rows that cost much arithmetic."""
    short = problem.is_quantised and problem.row_bytes < 4096
    if not _can_prefetch(problem, arch) or problem.row_bytes % 128 or short:
        return 0
    ahead = _NEAR if problem.row_bytes < 32768 else _FAR
    return max(1, ahead // ((1 + problem.has_residual) * problem.row_bytes * launch.tile))


def _can_prefetch(problem: Problem, arch: str) -> bool:
    return architecture_number(arch) >= 90 and problem.x_alignment == 16 and problem.row_bytes % 16 == 0
