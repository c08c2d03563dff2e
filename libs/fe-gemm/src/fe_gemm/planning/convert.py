"""How the conversion of an operand to bf16 is launched: a choice by rules, the alternatives, and what is valid.

The operand is a batch of matrices (R, C): R rows (M or N), C columns (K), without scales. Its lines are its rows or its
columns, whichever are contiguous; a thread treats vectors of neighbours at the same place in several lines. Extents are
dynamic.

FP8 values are bf16 values. A float32 value is split into its nearest bf16 value, the head, and the bf16 value that is
nearest to the rest, the tail; head and tail of a and b make three products, a_head b_head + a_head b_tail +
a_tail b_head, which differ from a b by no more than 2^-15 of it. They are one product of matrices of three parts side
by side along K, which differ for A and B (:data:`PARTS`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "DTYPES",
    "PARTS",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "split_config",
    "workspace_shape",
]

DTYPES = ("float8_e4m3fn", "float8_e5m2", "float32")
"""What is converted."""

PARTS = {"a": ("head", "plain_head", "tail"), "b": ("head", "tail", "plain_head")}
"""The parts of a split operand along K. A plain head is zero where the head is infinite or NaN, and so is the tail."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about an operand.

    Parameters
    ----------
    dtype
        One of :data:`DTYPES`; lines are multiples of 16 bytes long.
    major
        The contiguous dimension: ``"k"`` (columns) or ``"m"`` (rows).
    side
        Which operand of the product it is, ``"a"`` or ``"b"``; it counts for float32.
    """

    dtype: str = "float8_e4m3fn"
    major: str = "k"
    side: str = "a"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 32 if self.dtype == "float32" else 8

    @property
    def parts(self) -> tuple[str, ...]:
        """What is made of the operand, from one end of K to the other."""
        return PARTS[self.side] if self.dtype == "float32" else ("value",)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    vector
        Neighbouring elements that a thread treats at once.
    across
        Threads side by side along a line.
    threads
        Threads of a block.
    repeats
        Lines of which a thread has a vector.
    """

    vector: int = 8
    across: int = 32
    threads: int = 256
    repeats: int = 4

    @property
    def groups(self) -> int:
        """Lines that a block treats side by side."""
        return self.threads // self.across

    @property
    def lines(self) -> int:
        """Lines of a block."""
        return self.groups * self.repeats

    @property
    def span(self) -> int:
        """Elements of a line in a block."""
        return self.across * self.vector


def choose(problem: Problem) -> Launch:
    """Return the launch for an operand."""
    return Launch(vector=4) if problem.dtype == "float32" else Launch()


def candidates(problem: Problem) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    found = [choose(problem)]
    for vector in (4, 8, 16):
        for across in (16, 32, 64):
            for threads in (128, 256):
                found += [Launch(vector, across, threads, repeats) for repeats in (2, 4, 8)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch converts an operand."""
    return (
        problem.dtype in DTYPES
        and problem.major in ("k", "m")
        and problem.side in PARTS
        and launch.vector in ((4,) if problem.dtype == "float32" else (8, 16))
        and launch.across in (8, 16, 32, 64, 128)
        and launch.threads in range(_WARP, _MAX_THREADS + 1, _WARP)
        and launch.threads % launch.across == 0
        and launch.repeats in range(1, 9)
    )


def workspace_shape(problem: Problem, rows: int, columns: int, batches: int) -> tuple[int, int]:
    """Return the shape of the bf16 workspace for an operand (rows, columns, batches): lines, and elements of a line."""
    depth = len(problem.parts) * columns
    lines, length = (rows, depth) if problem.major == "k" else (depth, rows)
    return lines * batches, -(-length // _PITCH) * _PITCH


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_WARP = 32
_MAX_THREADS = 1024
_PITCH = 8  # elements: 16 bytes of bf16
