"""How ``gemm_proj_rope_mxfp8`` is launched: what is static about it, a choice by rules, and what is valid.

A block computes tiles of 128 tokens and the 192 features of one head. Nothing depends on the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import tiles
from .tiles import CONSUMERS, Launch

__all__ = ["BLOCK", "HEAD", "Problem", "candidates", "choose", "config", "is_valid", "shared_bytes", "split_config"]

HEAD = 192
"""Features of a head: 128, and 64 that are rotated."""

BLOCK = 32
"""Features, tokens or inputs that share a scale."""

TILE_M = 128

STAGED_BYTES = 2 * 64 * HEAD
"""Codes of both directions that a warp group stages: 64 tokens of a head."""

WARP_BYTES = 2 * 4 * HEAD
"""What a warp keeps of its tokens: for each feature the largest magnitude and the factor."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static.

    Parameters
    ----------
    w_major
        ``"k"``: rows of w are output features; ``"n"``: rows of w are input features.
    scaled
        Whether x and w are MXFP8, to be expanded to bf16 first.
    """

    w_major: str = "k"
    scaled: bool = False


def choose(problem: Problem, heads: int, k: int, arch: str) -> Launch:
    """Return the launch for a number of heads and K = ``k``."""
    del problem, heads, k, arch
    return _roomy(Launch(TILE_M, HEAD, cluster_m=2, store_buffers=1))


def candidates(problem: Problem, heads: int, k: int, arch: str) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    found = [choose(problem, heads, k, arch)]
    for cluster in ((1, 1), (2, 1), (1, 2)):
        for band in (4, 8, 16):
            found.append(_roomy(Launch(TILE_M, HEAD, *cluster, store_buffers=1, band=band)))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem."""
    if min(launch.cluster_m, launch.cluster_n, launch.band) < 1:
        return False
    return (
        problem.w_major in ("k", "n")
        and (launch.tile_m, launch.tile_n) == (TILE_M, HEAD)
        and launch.store_buffers == 1
        and launch.slots >= 2
        and max(launch.cluster_m, launch.cluster_n) <= 2
        and shared_bytes(launch) <= tiles.MOST_SHARED_BYTES
    )


def shared_bytes(launch: Launch) -> int:
    """Return the shared memory of a block, alignment included."""
    own = CONSUMERS * (STAGED_BYTES + 4 * WARP_BYTES)
    return launch.slots * (launch.slot_bytes + 16) + own + 1024


def config(problem: Problem, launch: Launch, multiprocessors: int) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    flat = {name: getattr(launch, name) for name in _LAUNCH}
    return {"w_major": problem.w_major, "scaled": problem.scaled, "multiprocessors": multiprocessors, **flat}


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch, int]:
    """Return what :func:`config` was made of."""
    launch = Launch(**{name: flat[name] for name in _LAUNCH})
    return Problem(flat["w_major"], flat["scaled"]), launch, flat["multiprocessors"]


_LAUNCH = ("tile_m", "tile_n", "cluster_m", "cluster_n", "slots", "store_buffers", "band")


def _roomy(launch: Launch) -> Launch:
    """Return a launch with as many slots as fit."""
    fixed = shared_bytes(replace(launch, slots=0))
    return replace(launch, slots=min(8, (tiles.MOST_SHARED_BYTES - fixed) // (launch.slot_bytes + 16)))
