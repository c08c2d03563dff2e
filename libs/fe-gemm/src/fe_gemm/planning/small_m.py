"""How the product of a few block-scaled rows with many is launched: what is static, what is valid, how K is cut.

The few rows are called tokens, the many weights. A block keeps the tokens of its slice of K in shared memory and walks
over tiles of 128 rows of the weights; its warps share a slice, and the slices' sums are added in a second pass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fe_runtime.architecture import shared_memory_per_sm

__all__ = [
    "SmallLaunch",
    "SmallProblem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "slices",
    "split_config",
]

QUARTERS = 4
"""Parts of a tile, of 32 rows, whose scales are neighbours."""


@dataclass(frozen=True, slots=True)
class SmallProblem:
    """What is static about a product.

    Parameters
    ----------
    element, scale, vec
        Block-scaled format of the weights: canonical dtype names, and elements per scale. Lines are contiguous in K.
    token_element
        Element of the tokens, of the same width; scale and vec are those of the weights.
    tokens
        Rows of tokens that fit: 8, 16, 24 or 32.
    out_dtype
        Of the product: bfloat16, float16 or float32.
    """

    element: str = "float8_e4m3fn"
    scale: str = "float8_e8m0fnu"
    vec: int = 32
    token_element: str = "float8_e4m3fn"
    tokens: int = 16
    out_dtype: str = "bfloat16"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.element == "float4_e2m1fn" else 8

    @property
    def per_lane(self) -> int:
        """Elements of a row that a thread treats at once: 16 bytes."""
        return 128 // self.bits

    @property
    def depth(self) -> int:
        """Part of K that a warp treats at once: four threads share a row."""
        return 4 * self.per_lane


@dataclass(frozen=True, slots=True)
class SmallLaunch:
    """How the work is spread.

    Parameters
    ----------
    depth_warps
        Warps that share a slice of K.
    stages
        Steps of a warp whose codes have room in shared memory; all but one are under way.
    slice_steps
        Steps in the longest slice of K.
    quarters
        Quarters of a tile of which a warp multiplies 16 rows each: 4, or 2 for twice as many warps with half the work.
    """

    depth_warps: int = 4
    stages: int = 3
    slice_steps: int = 32
    quarters: int = 4

    @property
    def row_warps(self) -> int:
        """Warps side by side along the 128 rows of a tile."""
        return 8 // self.quarters

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes that a thread copies for a step: codes of two rows of each quarter, and two of scales."""
        return 2 * self.quarters + 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.depth_warps


def choose(problem: SmallProblem, arch: str) -> SmallLaunch:
    """Return the launch for a product on an architecture such as ``"sm_90a"``: the first of the candidates."""
    return candidates(problem, arch)[0]


def candidates(problem: SmallProblem, arch: str) -> list[SmallLaunch]:
    """Return the launches worth timing, the best known first: four warps, much room for tokens."""
    found = []
    for warps, quarters in ((4, 4), (2, 4), (6, 4), (8, 4), (3, 2), (4, 2), (2, 2)):
        for room in (64 << 10, 32 << 10, 16 << 10):
            steps = room // (problem.tokens * problem.depth * 2)
            found += [SmallLaunch(warps, stages, steps, quarters) for stages in (4, 3, 2)]
    valid = [launch for launch in found if is_valid(problem, launch, arch)]
    deepest = {(launch.depth_warps, launch.slice_steps, launch.quarters): launch for launch in reversed(valid)}
    return [launch for launch in valid if launch in deepest.values()]


def is_valid(problem: SmallProblem, launch: SmallLaunch, arch: str) -> bool:
    """Whether a launch computes a product on an architecture."""
    return (
        min(asdict(launch).values()) > 0
        and problem.tokens in (8, 16, 24, 32)
        and launch.stages >= 2
        and launch.quarters in (2, 4)
        and launch.threads <= 512
        and problem.element in _SCALES
        and (problem.scale, problem.vec) in _SCALES[problem.element]
        and problem.out_dtype in ("bfloat16", "float16", "float32")
        and _SCALES.get(problem.token_element) == _SCALES[problem.element]
        and shared_bytes(problem, launch) <= _most_shared_bytes(arch)
    )


def shared_bytes(problem: SmallProblem, launch: SmallLaunch) -> int:
    """Return the shared memory of a block: codes and scales under way, tokens, sums of the warps."""
    ring = launch.stages * launch.threads * 16 * launch.vectors
    tokens = problem.tokens * launch.slice_steps * problem.depth * 2
    return ring + tokens + launch.threads * problem.tokens * 2 * launch.quarters


def slices(problem: SmallProblem, launch: SmallLaunch, n: int, k: int, multiprocessors: int) -> int:
    """Return into how many slices K is cut: so many that their tokens have room, and more where blocks would be idle.

    A slice is not cut below two steps for each warp. 0: there are too few multiprocessors for such a K.
    """
    steps, tiles = -(-k // problem.depth), -(-n // 128)
    least = -(-steps // launch.slice_steps)
    if least > multiprocessors:
        return 0
    most = max(least, min(multiprocessors, steps // (2 * launch.depth_warps)))
    return min(range(least, most + 1), key=lambda count: _rounds(count, tiles, multiprocessors))


def config(problem: SmallProblem, launch: SmallLaunch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[SmallProblem, SmallLaunch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (SmallProblem, SmallLaunch))
    return SmallProblem(**problem), SmallLaunch(**launch)


_E8M0_32 = ("float8_e8m0fnu", 32)
_SCALES = {
    "float8_e4m3fn": (_E8M0_32,),
    "float8_e5m2": (_E8M0_32,),
    "float4_e2m1fn": (_E8M0_32, ("float8_e8m0fnu", 16), ("float8_e4m3fn", 16)),
}  # of each element, with the elements per scale


def _most_shared_bytes(arch: str) -> int:
    return shared_memory_per_sm(arch) - 1024


def _rounds(count: int, tiles: int, multiprocessors: int) -> float:
    """Return the time of the busiest block, in tiles of whole K, and a little for each slice that is added later."""
    return -(-tiles // (multiprocessors // count)) / count * (1 + 0.01 * count)
