"""How the expansion of a block-scaled operand is launched: a choice by rules, the alternatives, and what is valid.

The operand is a batch of matrices (R, C): R rows (M or N), C columns (K), scaled in blocks along its rows. Its lines
are its rows or its columns, whichever are contiguous. A thread treats vectors of neighbours in four lines at a time, 32
lines apart: lines whose scales are neighbours in memory, whichever way the lines run. Extents are dynamic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import threads_per_sm

__all__ = [
    "FORMATS",
    "GROUP",
    "TILE",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "split_config",
    "workspace_shape",
]

FORMATS = (
    ("float8_e4m3fn", "float8_e8m0fnu", 32),
    ("float8_e5m2", "float8_e8m0fnu", 32),
    ("float4_e2m1fn", "float8_e8m0fnu", 32),
    ("float4_e2m1fn", "float8_e4m3fn", 16),
    ("float4_e2m1fn", "float8_e8m0fnu", 16),
)
"""Element, scale and elements per scale of every block-scaled format."""

TILE = 128
"""Lines of a tile: the rows of an atom of the scale layout, or the columns, which then share a block by 32."""

GROUP = 4
"""Lines that a thread treats together: number i, i + 32, i + 64 and i + 96 of a tile."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about an operand.

    Parameters
    ----------
    element, scale, vec
        A block-scaled format: canonical dtype names, and elements per scale.
    major
        The contiguous dimension: ``"k"`` (columns) or, 8-bit elements only, ``"m"`` (rows).
    grouped
        Whether the columns of one matrix belong to groups, each with a layout of scales of its own, one after the
        other. Groups are of multiples of four blocks; columns behind the last one are left out.
    ragged
        Whether the codes of each group are a compact matrix of their own, one after the other. Matters where rows are
        contiguous; otherwise it is the same memory.
    """

    element: str = "float8_e4m3fn"
    scale: str = "float8_e8m0fnu"
    vec: int = 32
    major: str = "k"
    grouped: bool = False
    ragged: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.element == "float4_e2m1fn" else 8


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
        Groups of four lines that a thread treats at the same time.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    """

    vector: int = 8
    across: int = 32
    threads: int = 256
    repeats: int = 1
    blocks_per_sm: int = 6

    @property
    def groups(self) -> int:
        """Groups of lines side by side in a block."""
        return self.threads // self.across

    @property
    def span(self) -> int:
        """Elements of a line in a block."""
        return self.across * self.vector

    @property
    def parts(self) -> int:
        """Blocks that share the lines of a tile."""
        return TILE // (GROUP * self.groups * self.repeats)


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for an operand on an architecture such as ``"sm_90a"``."""
    few = problem.bits == 8 and problem.major == "k"
    return _filled(problem, Launch(repeats=1 if few else 2), arch)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    return [launch for launch in dict.fromkeys(_candidates(problem, arch)) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch expands an operand on an architecture."""
    return (
        (problem.element, problem.scale, problem.vec) in FORMATS
        and (problem.major == "k" or (problem.major == "m" and problem.bits == 8))
        and not (problem.ragged and not problem.grouped)
        and min(asdict(launch).values()) > 0
        and launch.vector in (8, 16, 32)
        and launch.vector <= min(problem.vec, _STEP_BITS // problem.bits)
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and launch.threads % launch.across == 0
        and (TILE // GROUP) % (launch.groups * launch.repeats) == 0
    )


def workspace_shape(problem: Problem, rows: int, columns: int, batches: int) -> tuple[int, int]:
    """Return the shape of the bf16 workspace for an operand (rows, columns, batches): lines, and elements of a line."""
    lines, length = (rows, columns) if problem.major == "k" else (columns, rows)
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
_REGISTERS = 65536  # of a multiprocessor
_PITCH = 8  # elements: 16 bytes of bf16
_STEP_BITS = 128  # of which the length of a line is a multiple


def _filled(problem: Problem, launch: Launch, arch: str) -> Launch:
    """Return a launch with as many blocks on a multiprocessor as its registers and threads allow."""
    registers = -(-_registers(problem, launch) // 8) * 8
    threads = min(_REGISTERS // registers, threads_per_sm(arch))
    return replace(launch, blocks_per_sm=max(1, threads // launch.threads))


def _registers(problem: Problem, launch: Launch) -> int:
    """Return the registers that a thread needs, by experience with the compiler."""
    words = GROUP * launch.repeats * launch.vector * problem.bits // 32
    if problem.bits == 4:
        return 22 + 3 * words
    return (22 if problem.major == "k" else 28) + 2 * words


def _candidates(problem: Problem, arch: str) -> Iterator[Launch]:
    yield choose(problem, arch)
    for vector, across in ((8, 32), (8, 16), (8, 64), (16, 16), (16, 32), (32, 8), (32, 16)):
        for threads in (128, 256):
            for repeats in (1, 2, 4):
                full = _filled(problem, Launch(vector, across, threads, repeats), arch)
                yield full
                yield replace(full, blocks_per_sm=max(1, full.blocks_per_sm * 3 // 4))
