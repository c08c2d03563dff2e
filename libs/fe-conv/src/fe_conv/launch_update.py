"""How the kernels of ``causal_conv1d_update`` are launched: a rule, the alternatives, and what is valid.

A step reads and writes ``2*L + 2`` values for each row and channel and does little else. The fast kernel keeps the
state of a thread's channels in registers; it wants some 40 to 80 bytes under way per thread, from several rows that
share their filter. Any other layout, several tokens at once, and a state used as a ring take the general kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = [
    "MAX_LENGTH",
    "MAX_WIDTH",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "general",
    "is_valid",
    "split_config",
]

MAX_WIDTH = 32
"""Taps that a thread holds."""

MAX_LENGTH = 8
"""Places of a slot that the fast kernel holds in registers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    dtype, weight_dtype, bias_dtype
        bfloat16, float16 or float32; ``bias_dtype`` ``None``: no bias.
    width
        Taps of a filter.
    activation
        ``"identity"`` or ``"silu"``.
    indexed, ring
        Whether there are ``conv_state_indices`` and ``cache_seqlens``.
    tokens
        Whether x has a dimension of tokens.
    layout
        ``"row"``: the places of a channel are neighbours, then the channels; ``"plane"``: channels are neighbours;
        ``"any"``.
    length
        Places of a slot; 0 for the general kernel, which takes any number.
    channels
        Largest power of two up to 8 that divides the number of channels.
    x_alignment, state_alignment, weight_alignment, bias_alignment, out_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every run of neighbours of an operand.
    """

    dtype: str
    width: int
    activation: str
    weight_dtype: str
    bias_dtype: str | None = None
    indexed: bool = False
    ring: bool = False
    tokens: bool = False
    layout: str = "any"
    length: int = 0
    channels: int = 1
    x_alignment: int = 2
    state_alignment: int = 2
    weight_alignment: int = 2
    bias_alignment: int = 2
    out_alignment: int = 2

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return BYTES[self.dtype]

    @property
    def is_fast(self) -> bool:
        """Whether the state of a thread's channels stays in registers."""
        return self.layout != "any"


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread: ``vector`` neighbouring channels of ``rows`` rows in each of ``threads`` threads.

    ``blocks_per_sm`` blocks must fit on a multiprocessor: it bounds the registers.
    """

    vector: int
    threads: int
    rows: int
    blocks_per_sm: int = 4


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the extents do not matter."""
    del arch
    return _launch(problem, _vector(problem) if problem.is_fast else 1, _THREADS, 1)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    found = [choose(problem, arch), *(_launch(problem, *choice) for choice in _choices(problem))]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    del arch
    whole = launch.threads % 32 == 0 and 0 < launch.threads <= 1024
    fits = 0 < launch.blocks_per_sm <= _REGISTERS // (launch.threads * _registers(problem, launch.vector, launch.rows))
    if not problem.is_fast:
        one = launch.vector == launch.rows == 1
        return whole and fits and one and problem.length == 0 and 0 < problem.width <= MAX_WIDTH
    return (
        whole
        and launch.vector > 0
        and fits
        and problem.channels % launch.vector == 0
        and 0 < launch.rows <= 8
        and not (problem.ring or problem.tokens)
        and 0 < problem.width - 1 <= problem.length <= MAX_LENGTH
    )


def general(problem: Problem) -> Problem:
    """Return the problem for the general kernel: without what it does not look at."""
    size, weight_size = problem.size, BYTES[problem.weight_dtype]
    return replace(
        problem,
        layout="any",
        length=0,
        channels=1,
        x_alignment=size,
        state_alignment=size,
        weight_alignment=weight_size,
        bias_alignment=BYTES[problem.bias_dtype or problem.dtype],
        out_alignment=size,
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_THREADS = 128
_REGISTERS = 65536  # of a multiprocessor
_USUAL_THREADS = 1024  # on a multiprocessor: enough, and it leaves 64 registers to each
_MOST_REGISTERS = 128  # of a thread


def _launch(problem: Problem, vector: int, threads: int, rows: int) -> Launch:
    blocks = _REGISTERS // (threads * _registers(problem, vector, rows))
    return Launch(vector, threads, rows, max(1, min(blocks, _USUAL_THREADS // threads)))


def _registers(problem: Problem, vector: int, rows: int) -> int:
    """Return the registers that a thread needs at most, by experience with the compiler."""
    if not problem.is_fast:
        return 48 + 4 * problem.width
    words = -(-vector * (problem.length + 1) * problem.size // 4)
    return 32 + rows * (words + 4) + vector * (problem.width + (problem.bias_dtype is not None)) + vector * 2


def _vector(problem: Problem) -> int:
    """Return as many channels as one access of the alignment reaches.

    More of them per thread, or several rows, are slower on an H200 (18.5 against 21.4 us for slots of three tokens).
    """
    if problem.layout == "plane":
        wanted = min(problem.x_alignment, problem.state_alignment, problem.out_alignment) // problem.size
        fitting = [v for v in _VECTORS if v <= wanted]
    else:
        each, width = problem.length * problem.size, min(16, problem.state_alignment)
        fitting = [v for v in _VECTORS if v * each <= width] or [1]
    possible = [v for v in fitting if problem.channels % v == 0 and _registers(problem, v, 1) <= _MOST_REGISTERS]
    return max(possible, default=1)


def _choices(problem: Problem) -> Iterator[tuple[int, int, int]]:
    for vector in (v for v in _VECTORS if v <= problem.channels):
        for threads in (64, 128, 256):
            for rows in (1, 2, 4, 8) if problem.is_fast else (1,):
                yield vector, threads, rows


_VECTORS = (1, 2, 4, 8)
