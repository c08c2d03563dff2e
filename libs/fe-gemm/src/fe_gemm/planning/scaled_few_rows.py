"""How the product of a few block-scaled rows with many is launched on Hopper: what is static, what is valid.

The few rows are called tokens, the many weights. A block takes as many rows of weights as there are for each
multiprocessor, so that all of them read all the time, and the whole of K or a slice of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

__all__ = ["FORMATS", "Launch", "Problem", "candidates", "choose", "config", "is_valid", "shared_bytes", "split_config"]

SLOT_BYTES = 128
"""Bytes along K of a slot of the ring."""

CHUNKS = 4
"""Parts of a slot, of 32 bytes, that are multiplied one after the other."""

ATOM_ROWS = 128
"""Rows of an atom of the scale layout, which has four scales of each."""

ATOM_BYTES = 512

FORMATS = (
    ("float8_e4m3fn", "float8_e8m0fnu", 32),
    ("float8_e5m2", "float8_e8m0fnu", 32),
    ("float4_e2m1fn", "float8_e4m3fn", 16),
)
"""Element, scale and elements per scale of the operands that are multiplied: MXFP8 and NVFP4."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a product.

    Parameters
    ----------
    element, scale, vec
        Block-scaled format of both operands, MXFP8 or NVFP4: canonical dtype names, and elements per scale. Lines are
        contiguous in K.
    tokens
        Rows of tokens that fit: 16, 32, 48 or 64.
    out_dtype
        Of the product: bfloat16, float16 or float32.
    """

    element: str = "float8_e4m3fn"
    scale: str = "float8_e8m0fnu"
    vec: int = 32
    tokens: int = 16
    out_dtype: str = "bfloat16"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.element == "float4_e2m1fn" else 8

    @property
    def folds(self) -> bool:
        """Whether scales are multiplied into the operands, and not with sums over a block."""
        return self.bits == 4

    @property
    def depth(self) -> int:
        """Elements along K of a slot."""
        return SLOT_BYTES * 8 // self.bits

    @property
    def scale_columns(self) -> int:
        """Columns of atoms, of four scales for each row, that belong to a slot."""
        return self.depth // (4 * self.vec)

    @property
    def blocks(self) -> int:
        """Blocks of tokens: 8 in each."""
        return self.tokens // 8


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    rows
        Rows of weights of a block, a multiple of 32.
    row_warps
        Warps side by side along the rows.
    depth_warps
        Warps that share rows, each with a part of every slot: 1, 2 or 4.
    slots
        Slots of the ring, each 128 bytes deep.
    converters
        Warps that bring tokens, each for every so many slots.
    slices
        Into how many slices K is cut, whose sums a second kernel adds.
    """

    rows: int = 224
    row_warps: int = 14
    depth_warps: int = 1
    slots: int = 5
    converters: int = 3
    slices: int = 1

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows of a warp."""
        return self.rows // (16 * self.row_warps)

    @property
    def computing_warps(self) -> int:
        """Warps that multiply; they are the first ones, then come the one that loads and those that bring tokens."""
        return self.row_warps * self.depth_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.computing_warps + 1 + self.converters)

    @property
    def atoms(self) -> int:
        """The most atoms, one below the other, in which the scales of a block's rows lie."""
        return -(-(self.rows + ATOM_ROWS - gcd(self.rows, ATOM_ROWS)) // ATOM_ROWS)


def choose(problem: Problem, n: int, k: int, multiprocessors: int, finished: bool = False) -> Launch:
    """Return the launch for weights (N, K) on a GPU with so many multiprocessors: the first of the candidates."""
    return candidates(problem, n, k, multiprocessors, finished)[0]


def candidates(problem: Problem, n: int, k: int, multiprocessors: int, finished: bool = False) -> list[Launch]:
    """Return the launches worth timing, by expected time.

    ``finished``: another kernel runs after the product anyway, and adds slices.
    """
    extra = _MORE_SUMS_STEPS if finished else _ADDITION_STEPS
    found: dict[Launch, float] = {}
    for rows in range(32, 257, 32):
        for slices in (1, 2, 3, 4, 6, 8):
            if slices == 1 or k >= slices * _LEAST_STEPS * problem.depth:
                for launch in _with_warps(problem, rows, slices):
                    found.setdefault(launch, _time(problem, launch, n, k, multiprocessors, extra))
    return [launch for launch in sorted(found, key=found.__getitem__) if is_valid(problem, launch)][:_MOST_CANDIDATES]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a product."""
    how = launch
    return (
        (problem.element, problem.scale, problem.vec) in FORMATS
        and problem.tokens in (16, 32, 48, 64)
        and problem.out_dtype in ("bfloat16", "float16", "float32")
        and min(asdict(how).values()) >= 1
        and how.rows % 32 == 0
        and how.rows <= 256
        and how.rows == 16 * how.tiles * how.row_warps
        and how.depth_warps in (1, 2, 4)
        and how.computing_warps <= 16
        and how.converters <= 8
        and how.threads <= 20 * 32
        and _has_registers(problem, how)
        and how.slots >= max(2, how.converters)  # a converter is never a round ahead
        and shared_bytes(problem, how) <= _MOST_SHARED_BYTES
    )


def slot_bytes(problem: Problem, launch: Launch) -> int:
    """Return the shared memory of a slot: weights, their scales, tokens in float16, and their scales or none."""
    weights = launch.rows * SLOT_BYTES + launch.atoms * problem.scale_columns * ATOM_BYTES
    tokens = problem.tokens * problem.depth * 2
    factors = 0 if problem.folds else problem.tokens * CHUNKS * 4
    return weights + tokens + factors + 8


def shared_bytes(problem: Problem, launch: Launch) -> int:
    """Return the shared memory of a block, alignment included."""
    others = launch.computing_warps - launch.row_warps
    sums = others * launch.tiles * problem.blocks * 32 * 16
    return launch.slots * (slot_bytes(problem, launch) + 16) + sums + 1024


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_MOST_SHARED_BYTES = 227 * 1024
_MOST_SLOTS = 12
_MOST_CANDIDATES = 12
_LEAST_STEPS = 8
"""Slots that a slice of K takes at least."""
_START_STEPS = 4
"""What a block takes before its first product, in slots of 128 rows."""
_ADDITION_STEPS = 8
"""What the second kernel takes beside moving sums, in slots of 128 rows."""
_MORE_SUMS_STEPS = 1
"""What it takes longer to start with several slices than with one, if it runs anyway."""


def _has_registers(problem: Problem, launch: Launch) -> bool:
    """Whether the sums of a thread leave registers for the rest: it has 96, 128 with 16 warps, 168 with 12."""
    sums = 4 * problem.blocks * launch.tiles
    if launch.threads > 16 * 32:
        return sums <= 16
    simple = launch.depth_warps == launch.slices == 1
    return sums <= 32 or (launch.threads <= 12 * 32 and sums <= 64 and simple)


def _with_warps(problem: Problem, rows: int, slices: int) -> list[Launch]:
    """Return launches with 4 to 16 computing warps, and as many slots as fit.

    Slots of few rows follow each other quickly, so there are more warps that bring tokens to them.
    """
    found = []
    converters = 3 if rows >= 160 else 7
    for tiles in (1, 2, 4):
        for depth_warps in (1, 2, 4):
            row_warps = rows // (16 * tiles)
            if row_warps * tiles * 16 == rows and 4 <= row_warps * depth_warps <= 19 - converters:
                launch = Launch(rows, row_warps, depth_warps, 1, converters, slices)
                fixed = shared_bytes(problem, replace(launch, slots=0))
                room = (_MOST_SHARED_BYTES - fixed) // (slot_bytes(problem, launch) + 16)
                found.append(replace(launch, slots=min(room, _MOST_SLOTS)))
    return found


def _time(problem: Problem, launch: Launch, n: int, k: int, multiprocessors: int, addition: int) -> float:
    """Return the time of the busiest block, in slots of 128 rows; more warps and fewer of them per row are better."""
    steps = -(-k // (problem.depth * launch.slices))
    items = -(-n // launch.rows) * launch.slices
    rounds = -(-items // multiprocessors)
    work = rounds * steps * launch.rows / 128
    sums = 8 * launch.slices * problem.tokens * n / (128 * SLOT_BYTES * multiprocessors)  # written and read
    spread = 1 + 0.002 * (16 - launch.computing_warps) + 0.005 * (launch.depth_warps - 1)
    return (work + _START_STEPS) * spread + (addition + sums if launch.slices > 1 else 0)
