"""How the kernel of ``vision_rope_backward`` is launched: a choice by rule, the alternatives, and what is valid.

A block takes a tile of tokens of some heads. A thread takes one of them: a vector of either half of the channels of
its token, in Q, K and V, so the table entries that it loads serve all heads of the block twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import architecture_number, threads_per_sm

__all__ = [
    "COLUMNS",
    "ROWS",
    "SCATTERED",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "split_config",
]

ROWS = "rows"
"""The channels of a head lie side by side."""

COLUMNS = "columns"
"""The tokens of a channel lie side by side."""

SCATTERED = "scattered"
"""Neither: every value is loaded on its own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about the arrays of a call; the number of tokens, and what follows from it, is not.

    Parameters
    ----------
    heads, channels
        Heads of a token, channels of a head.
    q, k, v
        Where the neighbours of a gradient lie: :data:`ROWS`, :data:`COLUMNS` or :data:`SCATTERED`.
    packed
        Whether the tokens of a head lie side by side in Q and V.
    q_alignment, k_alignment, v_alignment
        For rows, the largest power of two up to 16 that divides, in bytes, the start of every row; else 2.
    out_alignment, table_alignment
        The same of the output and the tables.
    table_rank
        2 for tables (T, D/2), 3 for (T, 1, D/2).
    stored
        Whether the gradients are passed as they are stored, (H, T, D), (H, D, T), (H, T, D), instead of (T, H, D).
    """

    heads: int
    channels: int
    q: str = ROWS
    k: str = COLUMNS
    v: str = ROWS
    packed: bool = True
    q_alignment: int = 16
    k_alignment: int = 2
    v_alignment: int = 16
    out_alignment: int = 16
    table_alignment: int = 16
    table_rank: int = 3
    stored: bool = False

    @property
    def vector(self) -> int:
        """Neighbouring channels that a thread treats at once; they divide half a head."""
        return next(vector for vector in (8, 4, 2, 1) if self.channels // 2 % vector == 0)

    @property
    def vectors(self) -> int:
        """Vectors in half a head."""
        return self.channels // 2 // self.vector

    @property
    def staged(self) -> int:
        """Gradients that are transposed in shared memory."""
        return (self.q, self.k, self.v).count(COLUMNS)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads
        Threads of a block.
    tokens, heads
        The tile of a block.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    prefetch
        How many blocks ahead the tile is brought to the second-level cache; 0: not at all.
    """

    threads: int
    tokens: int
    heads: int
    blocks_per_sm: int
    prefetch: int = 0

    def head_tiles(self, problem: Problem) -> int:
        """Blocks that share the heads of a tile of tokens."""
        return -(-problem.heads // self.heads)

    def rounds(self, problem: Problem) -> int:
        """Vectors of a thread in a head."""
        return -(-self.tokens * problem.vectors // self.threads)

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block."""
        return _shared(problem, self.tokens, self.heads)


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the number of tokens does not matter."""
    return replace(_launch(problem, arch, 256, 64, 1), prefetch=0)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    found = [choose(problem, arch)]
    for threads, tokens in ((128, 32), (256, 64), (512, 128)):
        for heads in (1, 2, 4):
            base = _launch(problem, arch, threads, tokens, heads)
            found += [base, replace(base, prefetch=0), replace(base, prefetch=2 * base.prefetch)]
            found.append(replace(base, blocks_per_sm=max(1, base.blocks_per_sm * 3 // 4)))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    return (
        min(asdict(launch).values()) >= 0
        and min(launch.threads, launch.tokens, launch.heads, launch.blocks_per_sm) > 0
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and launch.tokens in _TOKENS
        and (launch.tokens >= _RUN or not problem.staged)
        and launch.heads <= problem.heads
        and launch.shared_bytes(problem) <= _SHARED_BYTES
        and (launch.prefetch == 0 or _can_prefetch(problem, arch))
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | {f"launch_{name}": value for name, value in asdict(launch).items()}


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem = Problem(**{field.name: flat[field.name] for field in fields(Problem)})
    return problem, Launch(**{field.name: flat[f"launch_{field.name}"] for field in fields(Launch)})


_WARP = 32
_MAX_THREADS = 1024
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
_RUN = 8  # tokens of an access of 16 bytes
_SHARED_BYTES = 48 << 10  # what every architecture gives a block without being asked
_AHEAD = 4 << 20  # bytes that are prefetched ahead


def _launch(problem: Problem, arch: str, threads: int, tokens: int, heads: int) -> Launch:
    """Return a launch of about these dimensions: fewer tokens where a thread would have several vectors of a head,
    fewer heads where shared memory would hold back other blocks."""
    most = threads * 5 // 4
    least = _RUN if problem.staged else 1
    while tokens > least and (tokens * problem.vectors > most or _shared(problem, tokens, 1) > _SHARED_BYTES):
        tokens //= 2
    rounds = -(-tokens * problem.vectors // most)
    threads = -(-tokens * problem.vectors // (rounds * _WARP)) * _WARP
    blocks = max(1, min(_resident(problem, arch), threads_per_sm(arch)) // threads)
    heads = min(heads, problem.heads)
    while heads > 1 and _shared(problem, tokens, heads) > min(_SHARED_BYTES, 2 * _SHARED_BYTES // blocks):
        heads //= 2
    launch = Launch(threads, tokens, heads, blocks)
    if not _can_prefetch(problem, arch):
        return launch
    tile = 3 * launch.heads * launch.tokens * problem.channels * 2
    return replace(launch, prefetch=max(1, _AHEAD // tile))


def _shared(problem: Problem, tokens: int, heads: int) -> int:
    return problem.staged * heads * tokens * problem.channels * 2


def _resident(problem: Problem, arch: str) -> int:
    """Return how many threads of a multiprocessor there are registers for, by experience with the compiler."""
    if _can_prefetch(problem, arch) and architecture_number(arch) < 100 and problem.channels <= 256:
        return 1024
    return 768 if (problem.q, problem.k, problem.v) == (ROWS, ROWS, ROWS) else 512


def _can_prefetch(problem: Problem, arch: str) -> bool:
    aligned = problem.q_alignment == problem.v_alignment == 16
    native = (problem.q, problem.k, problem.v) == (ROWS, COLUMNS, ROWS)
    return architecture_number(arch) >= 90 and problem.packed and native and aligned and problem.channels % 8 == 0
