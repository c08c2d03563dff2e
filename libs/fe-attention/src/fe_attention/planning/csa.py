"""How the kernels of the CSA compressor are launched: a choice by rules, the alternatives, and what is valid.

A thread has some neighbouring channels of a few entries of a window; short windows are one thread's. The gradient's
blocks walk over the rows, with the sums for the bias in registers, and write them as a row of partial sums.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

__all__ = [
    "MOST_ENTRIES",
    "Launch",
    "Problem",
    "backward_candidates",
    "choose_backward",
    "choose_forward",
    "config",
    "forward_candidates",
    "is_valid",
    "partial_rows",
    "split_config",
]

MOST_ENTRIES = 256
"""Tokens of the longest window that is served."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call: channels of a row, tokens of a block, blocks of a window."""

    head_dim: int
    ratio: int
    coff: int

    @property
    def entries(self) -> int:
        """Tokens of a window."""
        return self.ratio * self.coff

    @property
    def columns(self) -> int:
        """Columns of kv."""
        return self.coff * self.head_dim


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    vector
        Neighbouring channels of a thread.
    across
        Threads side by side along the channels of a row.
    groups
        Threads that share the windows of the same channels, every so many entries each.
    rows
        Rows side by side in a block.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    splits
        Blocks that share the rows of the same channels, if there are rows enough: it fixes the order of the bias's
        sums. 0 for the forward, where each block has its own rows.
    """

    vector: int
    across: int
    groups: int
    rows: int
    blocks_per_sm: int
    splits: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.across * self.groups * self.rows

    def tiles(self, problem: Problem) -> int:
        """Return the blocks side by side along the channels of a row."""
        return -(-problem.head_dim // (self.vector * self.across))

    def share(self, problem: Problem) -> int:
        """Return the entries of a thread."""
        return -(-problem.entries // self.groups)


def choose_forward(problem: Problem) -> Launch:
    """Return the launch of the forward; tokens and sequences do not matter."""
    vector = gcd(problem.head_dim, 8)
    if problem.entries <= _SHORT:
        across = min(64, _power_of_two(problem.head_dim // vector))
        return Launch(vector, across, 1, max(1, _BLOCK // across), 3)
    groups = _groups(problem)
    return Launch(vector, _ACROSS, groups, 1, max(1, _MOST // (_ACROSS * groups)))


def forward_candidates(problem: Problem) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    first = choose_forward(problem)
    found = [first]
    for vector in (8, 4, 2):
        for threads in (64, 128, 256):
            for blocks in (1, 2, 3, 4, 6):
                if problem.entries <= _SHORT:
                    across = min(128, _power_of_two(problem.head_dim // vector))
                    found.append(Launch(vector, across, 1, max(1, threads // across), blocks))
                else:
                    found.append(replace(first, vector=vector, groups=threads // _ACROSS, blocks_per_sm=blocks))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def choose_backward(problem: Problem, sm_count: int) -> Launch:
    """Return the launch of the gradient on a GPU of so many multiprocessors."""
    if problem.entries <= _SHORT:
        vector = gcd(problem.head_dim, 4)
        across = min(128, _power_of_two(problem.head_dim // vector))
        launch = Launch(vector, across, 1, max(1, _BACKWARD // across), 1)
    else:
        groups = min(_groups(problem), _MOST // _WIDE)
        vector = gcd(problem.head_dim, 4 if -(-problem.entries // groups) <= _SHARE else 2)
        launch = Launch(vector, _WIDE, groups, 1, _MOST // (_WIDE * groups))
    return _with_splits(problem, launch, sm_count)


def backward_candidates(problem: Problem, sm_count: int) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    first = choose_backward(problem, sm_count)
    found = [first]
    for vector in (8, 4, 2):
        for threads in (128, 256, 512):
            for at_work in (256, 384, 512, 768):
                if problem.entries <= _SHORT:
                    across = min(128, _power_of_two(problem.head_dim // vector))
                    how = replace(first, vector=vector, across=across, rows=max(1, threads // across))
                else:
                    how = replace(first, vector=vector, groups=threads // first.across)
                how = replace(how, blocks_per_sm=max(1, at_work // how.threads))
                found.append(_with_splits(problem, how, sm_count))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem."""
    numbers = {name: value for name, value in asdict(launch).items() if name != "splits"}
    across, groups = launch.across, launch.groups
    whole_warps = groups == 1 or (across in (8, 16, 32) and groups % (_WARP // across) == 0)
    return (
        min(numbers.values()) > 0
        and launch.splits >= 0
        and problem.entries <= MOST_ENTRIES
        and problem.head_dim % launch.vector == 0
        and launch.vector in (1, 2, 4, 8)
        and whole_warps
        and launch.share(problem) <= _SHORT
        and launch.threads % _WARP == 0
        and launch.threads <= 1024
        and launch.threads * launch.blocks_per_sm <= 2048
    )


def partial_rows(launch: Launch, rows: int) -> int:
    """Return how many blocks share the rows of the same channels; each writes one row of sums."""
    return max(1, min(launch.splits, -(-rows // launch.rows)))


def config(problem: Problem, launch: Launch) -> dict[str, Any]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    flat = asdict(launch)
    return asdict(problem) | {("block_rows" if name == "rows" else name): value for name, value in flat.items()}


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    known = {**flat, "rows": flat["block_rows"]}
    problem, launch = ({f.name: known[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_WARP = 32
_BLOCK = 128  # threads of a block of short windows
_BACKWARD = 384  # of one of the gradient: with 168 registers each
_SHORT = 8  # entries that a thread can hold in registers
_ACROSS = 8  # threads along the channels where a window is shared: 128 bytes of bf16
_WIDE = 16  # the same for the gradient, of half as many channels each
_SHARE = 4  # entries of a thread then
_MOST = 512  # threads of a multiprocessor that share windows: with 128 registers each


def _groups(problem: Problem) -> int:
    return max(_WARP // _ACROSS, _power_of_two(-(-problem.entries // _SHARE)))


def _with_splits(problem: Problem, launch: Launch, sm_count: int) -> Launch:
    return replace(launch, splits=max(1, launch.blocks_per_sm * sm_count // launch.tiles(problem)))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << (max(1, number) - 1).bit_length()
