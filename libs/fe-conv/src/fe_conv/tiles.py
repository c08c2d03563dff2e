"""How the kernels of ``causal_conv1d`` are launched: which kernel, how the work is cut, what else is valid.

A launch never depends on the number of sequences or tokens: a kernel serves any. Only how many tokens a walk of
``rows`` has does (:func:`walk_tokens`, :func:`tiles_of`), and the kernel is told so when it runs.

* ``rows``: channels are neighbours in memory. A thread holds a vector of channels and walks over tokens.
* ``runs``: tokens are neighbours in memory. A thread holds vectors of tokens of one channel.
* ``any``: every other case; a thread computes a few values, tap by tap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import gcd
from typing import Any

from fe_runtime.architecture import shared_memory_per_sm, threads_per_sm

__all__ = [
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "halo",
    "is_valid",
    "partials_shape",
    "shared_bytes",
    "split_config",
    "tiles_of",
    "walk_tokens",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call, but for the number of channels.

    Parameters
    ----------
    backward
        The gradient instead of the convolution.
    channel_last
        x is (B, T, D); otherwise (B, D, T).
    x_dtype, weight_dtype
        Canonical names; the bias is of ``x_dtype``.
    width
        Taps of the filter.
    activation
        ``"identity"`` or ``"silu"``.
    has_bias, has_labels, has_initial, has_final
        Which operands there are: bias, seq_idx, initial states, final states (backward: their gradient).
    offsets
        Dtype of cu_seqlens, ``None`` without.
    load_alignment, store_alignment, parameter_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every row of x (and dy), of y (dx), and of
        weight and bias.
    """

    backward: bool
    channel_last: bool
    x_dtype: str
    weight_dtype: str
    width: int
    activation: str = "silu"
    has_bias: bool = False
    has_labels: bool = False
    has_initial: bool = False
    has_final: bool = False
    offsets: str | None = None
    load_alignment: int = 16
    store_alignment: int = 16
    parameter_alignment: int = 8

    @property
    def size(self) -> int:
        """Bytes of a value of x."""
        return _BYTES[self.x_dtype]

    @property
    def is_dense(self) -> bool:
        """Whether every row of the batch is one sequence."""
        return self.offsets is None and not self.has_labels

    @property
    def is_fast(self) -> bool:
        """Whether a kernel other than ``any`` serves it."""
        return self.width in _FAST_WIDTHS and self.x_dtype != "float64" and (self.channel_last or self.is_dense)

    @property
    def sums(self) -> int:
        """Parameter gradients of a channel: the taps, and the bias if there is one."""
        return self.width + self.has_bias


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    kernel
        ``"rows"``, ``"runs"`` or ``"any"``.
    vector
        Neighbouring values that a thread loads at once.
    lanes
        Threads of a block side by side along the dimension of unit stride.
    groups
        Sets of ``lanes`` threads in a block: ``rows`` puts them along the tokens, the others along the other dimension.
    unroll
        Vectors (of x, and as many of dy) that a thread loads together, for ``rows`` the tokens of a chunk; for ``any``,
        values that it computes.
    tokens
        Tokens that a set of lanes (``runs``) treats; for ``any``, of a partial sum; for ``rows``, of the longest walk
        (see :func:`walk_tokens`).
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    stages
        Room that each thread of ``rows`` has in shared memory, in times ``unroll`` tokens: what it works on, and what
        is copied there meanwhile. 0: it loads into registers.
    """

    kernel: str
    vector: int
    lanes: int
    groups: int
    unroll: int
    tokens: int
    blocks_per_sm: int = 1
    stages: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups

    @property
    def width(self) -> int:
        """Channels that a block of ``rows`` covers."""
        return self.lanes * self.vector


def choose(problem: Problem, channels: int, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``."""
    if not problem.is_fast:
        return _any(problem)
    if not problem.channel_last:
        return _runs(problem, unroll=2)
    vector = gcd(channels, _USUAL_PIECE // problem.size)
    for usual in _usual_rows(problem):
        launch = replace(usual, vector=vector)
        if is_valid(problem, launch, channels, arch):
            return launch
    return replace(_usual_rows(problem)[-1], vector=vector, stages=0)


def candidates(problem: Problem, channels: int, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    found = [choose(problem, channels, arch)]
    found += _alternatives(problem, channels, found[0])
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, channels, arch)]


def is_valid(problem: Problem, launch: Launch, channels: int, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    if launch.kernel not in ("rows", "runs", "any"):
        return False
    if min(launch.vector, launch.lanes, launch.groups, launch.unroll, launch.tokens, launch.blocks_per_sm) < 1:
        return False
    if launch.lanes % _WARP or launch.threads > _MAX_THREADS:
        return False
    if launch.threads * launch.blocks_per_sm > threads_per_sm(arch):
        return False
    if launch.kernel == "any":
        return launch.vector == 1 and launch.stages == 0 and (problem.is_dense or launch.unroll == 1)
    if not problem.is_fast or launch.vector * problem.size > _ACCESS or launch.vector & (launch.vector - 1):
        return False
    if launch.kernel == "runs":
        whole = launch.tokens == launch.lanes * launch.vector * launch.unroll and launch.stages == 0
        return not problem.channel_last and launch.lanes == _WARP and whole and launch.vector >= halo(problem)
    return (
        problem.channel_last
        and channels % launch.vector == 0
        and launch.unroll >= problem.width - 1
        and launch.tokens % launch.unroll == 0
        and (launch.stages == 0 or (launch.stages > 1 and _is_async(problem, launch.vector)))
        and launch.blocks_per_sm * (shared_bytes(problem, launch) + _RESERVED) <= shared_memory_per_sm(arch)
    )


def shared_bytes(problem: Problem, launch: Launch) -> int:
    """Return the bytes of shared memory of a block of ``rows``."""
    operands = 1 + problem.backward
    room = operands * launch.stages * launch.unroll * launch.threads * launch.vector * problem.size
    meeting = problem.backward and launch.groups > 1
    return room + (4 * problem.sums * launch.groups * launch.width if meeting else 0)


def walk_tokens(launch: Launch, batch: Any, tokens: Any, channels: Any, smallest: Any = min, largest: Any = max) -> Any:
    """Return how many tokens each walk of the convolution by ``rows`` has.

    ``launch.tokens``, or fewer, but not under ``unroll`` (and, with stages, not under what they hold), where that
    would leave some of the blocks idle that :data:`MULTIPROCESSORS` hold, twice over. The launcher computes it by this
    very function, from the integers and with the minimum and maximum of the device language.
    """
    blocks = 2 * MULTIPROCESSORS * launch.blocks_per_sm
    pieces = (channels + (launch.width - 1)) // launch.width
    chunks = batch * tokens * pieces // (blocks * launch.groups * launch.unroll)
    fewest, most = max(1, launch.stages), max(1, launch.tokens // launch.unroll)
    return smallest(largest(chunks, fewest), most) * launch.unroll


@lru_cache(maxsize=256)
def tiles_of(launch: Launch, batch: int, tokens: int, channels: int) -> int:
    """Return into how many tiles, of ``groups`` walks each, the gradient by ``rows`` cuts every row of the batch.

    Walks have at most ``launch.tokens`` tokens and, if there are so many, at least 32. Among these the number of tiles
    is such that the blocks come out even: it minimises how often :data:`MULTIPROCESSORS` are filled, times what a walk
    takes. A tile is a row of the partial sums, from whose number the launcher gets the length of the walks:
    ``ceil(tokens / (tiles * groups))``, rounded up to whole chunks of ``unroll``. So the sums, and the order in which
    they are added, depend on nothing but the extents.
    """

    def length(tiles: int) -> int:
        return -(-tokens // (tiles * launch.groups * launch.unroll)) * launch.unroll

    def cost(tiles: int) -> int:
        return -(-across * tiles // slots) * (length(tiles) + _STARTING)

    slots, across = MULTIPROCESSORS * launch.blocks_per_sm, batch * -(-channels // launch.width)
    fewest = max(1, -(-tokens // (launch.tokens * launch.groups)))
    most = min(max(2 * fewest, -(-_TURNS * slots // max(1, across))), tokens // (_SHORTEST * launch.groups))
    if across * fewest >= _TURNS * slots or most <= fewest:
        return fewest
    return min(range(fewest, most + 1), key=lambda tiles: (cost(tiles), tiles))


def halo(problem: Problem) -> int:
    """Return the tokens of the piece of a run that holds the W-1 next to a vector: a power of two."""
    return 1 << (problem.width - 2).bit_length()


def partials_shape(problem: Problem, launch: Launch, batch: int, tokens: int, channels: int) -> tuple[int, int]:
    """Return the shape of the partial sums of the parameter gradients: a row per tile, the sums of all channels."""
    tiles = tiles_of(launch, batch, tokens, channels) if launch.kernel == "rows" else -(-tokens // launch.tokens)
    return batch * tiles, problem.sums * channels


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


MULTIPROCESSORS = 132
"""Multiprocessors that the work is cut for, on every GPU, so that results do not depend on it."""

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FAST_WIDTHS = (2, 3, 4)
_WARP = 32
_MAX_THREADS = 1024
_ACCESS = 16  # bytes of the widest load
_NARROWEST_COPY = 4  # bytes of an asynchronous copy
_RESERVED = 1024  # bytes of shared memory of each block that the system keeps for itself
_SHORTEST = 32  # tokens of a walk of the gradient: at its ends it treats 2 * (W - 1) more
_STARTING = 16  # tokens that a walk could treat in the time that it takes to begin and to end
_TURNS = 8  # how often the multiprocessors are filled, at least, where it does not matter that the last time is partial
_USUAL_PIECE = 8  # bytes of a vector: narrower ones cost more instructions, wider ones leave fewer warps room


def _is_async(problem: Problem, vector: int) -> bool:
    """Whether vectors can be copied to shared memory asynchronously."""
    return min(vector * problem.size, problem.load_alignment) >= _NARROWEST_COPY


def _usual_rows(problem: Problem) -> tuple[Launch, ...]:
    """Return launches of ``rows`` in order of preference, vectors aside; each needs less room than those before."""
    if not problem.backward:
        blocks = 4 if problem.has_labels else 8 if problem.is_dense else 5  # telling sequences apart takes registers
        return (Launch("rows", 1, _WARP, groups=4, unroll=8, tokens=16, blocks_per_sm=blocks),)
    usual = Launch("rows", 1, _WARP, groups=4, unroll=4, tokens=512, blocks_per_sm=4, stages=2)
    roomy = replace(usual, blocks_per_sm=3)
    if problem.has_labels or problem.has_initial or problem.has_final:  # these take up to 168 registers
        return (roomy,)
    return (replace(usual, stages=3) if problem.has_bias else usual, roomy)


def _runs(problem: Problem, unroll: int) -> Launch:
    vector = _ACCESS // problem.size
    return Launch("runs", vector, _WARP, 4, unroll, _WARP * vector * unroll)


def _any(problem: Problem) -> Launch:
    return Launch("any", 1, _WARP, 4, unroll=8 if problem.is_dense else 1, tokens=256)


def _alternatives(problem: Problem, channels: int, usual: Launch) -> Iterator[Launch]:
    if usual.kernel == "runs":
        yield from (replace(_runs(problem, unroll), groups=groups) for unroll in (1, 2, 4) for groups in (2, 4, 8))
    if usual.kernel != "rows":
        return
    for piece, lanes, groups, unroll, blocks, stages in _BACKWARD if problem.backward else _FORWARD:
        vector = gcd(channels, piece // problem.size)
        for tokens in (256, 512, 1024) if problem.backward else (32, 64, 128) if stages else (16, 32, 64):
            yield Launch("rows", vector, lanes, groups, unroll, tokens, blocks, stages)


_FORWARD = (  # bytes of a vector, lanes, groups, unroll, blocks_per_sm, stages
    (8, 32, 4, 8, 8, 0),
    (8, 64, 2, 8, 8, 0),
    (8, 32, 8, 8, 4, 0),
    (8, 32, 4, 4, 8, 0),
    (16, 32, 4, 8, 4, 0),
    (16, 32, 4, 4, 4, 0),
    (16, 64, 2, 8, 4, 0),
    (8, 32, 4, 8, 8, 2),
    (8, 32, 4, 8, 6, 2),
    (8, 32, 4, 4, 8, 4),
    (8, 64, 2, 8, 8, 2),
    (16, 32, 4, 8, 4, 2),
    (16, 32, 4, 8, 3, 3),
    (16, 32, 4, 4, 4, 3),
    (16, 32, 4, 4, 5, 3),
    (16, 64, 2, 8, 4, 2),
    (16, 128, 1, 4, 4, 3),
    (16, 128, 1, 8, 4, 2),
)

_BACKWARD = (
    (8, 32, 4, 8, 4, 2),
    (8, 32, 4, 8, 4, 3),
    (8, 32, 4, 8, 3, 3),
    (8, 32, 4, 4, 4, 2),
    (8, 32, 4, 4, 4, 4),
    (8, 32, 4, 4, 5, 3),
    (8, 64, 2, 8, 4, 2),
    (8, 128, 1, 8, 4, 2),
    (8, 32, 8, 8, 2, 2),
    (16, 32, 4, 8, 2, 2),
    (16, 32, 4, 8, 2, 3),
    (16, 32, 4, 4, 2, 4),
    (16, 32, 4, 4, 3, 3),
    (16, 32, 2, 8, 4, 2),
    (16, 64, 2, 8, 2, 2),
    (16, 128, 1, 8, 2, 2),
    (16, 32, 8, 8, 1, 2),
    (16, 32, 8, 8, 1, 0),
    (8, 32, 4, 8, 4, 0),
)
