"""How the kernel of ``rmsnorm_silu_pad`` is launched: a choice by rules, the alternatives, and what is valid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import gcd
from typing import Any

__all__ = ["Launch", "Problem", "candidates", "choose", "config", "is_valid", "split_config"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    channels
        Values of a pixel.
    has_input_bias, has_previous, has_residual, has_residual_bias, has_sum
        Which optional inputs there are, and whether the sum is an output.
    pixel_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every pixel of the arrays of frames.
    channel_alignment
        The same for the vectors over the channels.
    """

    channels: int
    has_input_bias: bool = False
    has_previous: bool = False
    has_residual: bool = False
    has_residual_bias: bool = False
    has_sum: bool = False
    pixel_alignment: int = 16
    channel_alignment: int = 16

    @property
    def vector(self) -> int:
        """Neighbouring values that a thread treats at once."""
        return gcd(self.channels, self.pixel_alignment // 2)

    @property
    def vectors(self) -> int:
        """Vectors of a pixel."""
        return self.channels // self.vector


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads_per_pixel
        Threads of one block that share a pixel: a power of two up to 32, or all threads of the block.
    pixels
        Pixels side by side in a block.
    chunk
        Vectors that a thread holds.
    """

    threads_per_pixel: int
    pixels: int
    chunk: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_pixel * self.pixels


def choose(problem: Problem) -> Launch | None:
    """Return the launch for a problem, or ``None`` if a pixel has more channels than the registers of a block hold."""
    return next(_launches(problem), None)


def candidates(problem: Problem) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    return list(dict.fromkeys(_launches(problem)))


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem."""
    whole = launch.threads_per_pixel in _PARTS_OF_A_WARP or launch.pixels == 1
    return (
        min(asdict(launch).values()) > 0
        and whole
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.chunk * launch.threads_per_pixel >= problem.vectors
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


_WARP = 32
_PARTS_OF_A_WARP = (1, 2, 4, 8, 16, 32)
_MAX_THREADS = 512
_BLOCK = 128  # threads of a block of several pixels
_MOST_VECTORS = 6  # of a thread
_IDLE = 1.13  # threads per useful thread that are tolerated at the end of a pixel


def _launches(problem: Problem) -> Iterator[Launch]:
    """Yield the valid launches: few idle threads first, then 32 bytes in flight per thread, then more."""
    order = (2, 3, 4, 1, 5, 6)
    splits = [(_team_size(-(-problem.vectors // count)), count) for count in order]
    launches = [_launch(problem, threads) for threads, _ in splits if threads <= _MAX_THREADS]
    fitting = [launch for launch in launches if launch.chunk <= _MOST_VECTORS]
    yield from sorted(fitting, key=lambda launch: launch.threads_per_pixel * launch.chunk > _IDLE * problem.vectors)


def _launch(problem: Problem, threads: int) -> Launch:
    pixels = max(1, _BLOCK // threads) if threads <= _WARP else 1
    return Launch(threads, pixels, -(-problem.vectors // threads))


def _team_size(threads: int) -> int:
    if threads > _WARP:
        return -(-threads // _WARP) * _WARP
    return 1 << (threads - 1).bit_length()
