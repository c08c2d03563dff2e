"""How the gradient of row normalisation is launched: a choice by rules, the alternatives, and what is valid.

A fixed number of blocks walk over the rows, each with its own sums for weight and bias in registers. A row's operands
are copied to shared memory some rows before their turn. What counts: some 64 KB under way on each multiprocessor, at
least two blocks on it so that one works while another meets at its barrier, and no spilled registers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

from fe_runtime.architecture import architecture_number, shared_memory_per_sm, threads_per_sm

__all__ = [
    "BackwardLaunch",
    "BackwardProblem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "partial_rows",
    "shared_bytes",
    "split_config",
]


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """What is static about a call.

    Parameters
    ----------
    columns
        Values in a row.
    x_dtype, dout_dtype
        bfloat16, float16 or float32: of what was normalised (and its gradients), and of the output's gradient.
    weight_dtype, bias_dtype
        The same, or ``None``: absent.
    activation
        ``None`` or ``"silu"``.
    has_residual
        Whether the gradient of the sum is added.
    has_rstd
        Whether the reciprocal root mean square is given rather than computed again.
    x_alignment, dout_alignment, weight_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every row of x and of the sum's gradient, of
        every row of the output's gradient, and of weight and bias.
    """

    columns: int
    x_dtype: str
    dout_dtype: str
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    activation: str | None = None
    has_residual: bool = False
    has_rstd: bool = True
    x_alignment: int = 16
    dout_alignment: int = 16
    weight_alignment: int = 16

    @property
    def row_bytes(self) -> int:
        """Bytes that are read of a row."""
        x, dout = _BYTES[self.x_dtype], _BYTES[self.dout_dtype]
        return self.columns * ((1 + self.has_residual) * x + dout)

    @property
    def sums(self) -> int:
        """Sums over all rows that are made for each column."""
        return (self.weight_dtype is not None) + (self.bias_dtype is not None)


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """How the work is spread.

    Parameters
    ----------
    vector
        Neighbouring values that a thread treats at once.
    threads_per_row
        Threads of one block that share a row: a power of two up to 32, or all threads of the block.
    groups
        Rows side by side in a block.
    chunk
        Vectors of a thread. Fewer than the row needs means that the row is read twice and the sums stay in memory.
    stages
        Rows of a group that have room in shared memory: the one at work and those under way.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    blocks
        Blocks in all, if there are rows enough. It fixes the order of the sums over rows.
    overlap
        Whether the kernel that adds the blocks' sums starts before they are complete, and waits (sm_90).
    """

    vector: int
    threads_per_row: int
    groups: int
    chunk: int
    stages: int
    blocks_per_sm: int
    blocks: int
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.groups

    def is_one_pass(self, problem: BackwardProblem) -> bool:
        """Whether a row's sums stay in the registers of its threads."""
        return self.chunk * self.threads_per_row * self.vector >= problem.columns


def choose(problem: BackwardProblem, arch: str, sm_count: int) -> BackwardLaunch:
    """Return the launch for a problem on a GPU; the number of rows does not matter."""
    found = _wide(problem, arch, sm_count) or _usual(problem, arch, sm_count) or _long(problem, sm_count)
    return replace(found, overlap=_hopper(arch))


def candidates(problem: BackwardProblem, arch: str, sm_count: int) -> list[BackwardLaunch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    first = choose(problem, arch, sm_count)
    vectors = problem.columns // _vector(problem)
    found = [first, replace(first, overlap=False)]
    for threads in (8, 16, 32, 64, 128, 256, 512, 1024):
        chunk = -(-vectors // threads)
        if chunk > 8 or threads > 2 * vectors:
            continue
        for width in (128, 256):
            for stages in (2, 3, 4):
                for blocks in (1, 2, 3, 4, 6):
                    groups = max(1, width // threads) if threads <= _WARP else 1
                    found.append(
                        BackwardLaunch(
                            first.vector, threads, groups, chunk, stages, blocks, blocks * sm_count, _hopper(arch)
                        )
                    )
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: BackwardProblem, launch: BackwardLaunch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    whole_groups = launch.threads_per_row in _PARTS_OF_A_WARP or launch.groups == 1
    numbers = {name: value for name, value in asdict(launch).items() if name != "overlap"}
    return (
        min(numbers.values()) > 0
        and problem.columns % launch.vector == 0
        and whole_groups
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and (
            launch.stages > 1 and _fits(problem, launch, arch)
            if launch.is_one_pass(problem)
            else launch.groups == 1 and launch.threads_per_row > _WARP
        )
        and (_hopper(arch) or not launch.overlap)
    )


def config(problem: BackwardProblem, launch: BackwardLaunch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[BackwardProblem, BackwardLaunch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (BackwardProblem, BackwardLaunch))
    return BackwardProblem(**problem), BackwardLaunch(**launch)


def partial_rows(launch: BackwardLaunch, rows: int) -> int:
    """Return how many blocks work on a number of rows; each writes one row of sums."""
    return max(1, min(launch.blocks, -(-rows // launch.groups)))


def shared_bytes(problem: BackwardProblem, launch: BackwardLaunch) -> int:
    """Return the bytes of shared memory of a block."""
    if not launch.is_one_pass(problem):
        return _SMALL
    values = launch.vector * launch.chunk
    x, dout = _BYTES[problem.x_dtype], _BYTES[problem.dout_dtype]
    stage = launch.threads * values * ((1 + problem.has_residual) * x + dout)
    bias = problem.bias_dtype if problem.activation else None  # its values count under an activation only
    parameters = sum(_BYTES[dtype] for dtype in (problem.weight_dtype, bias) if dtype)
    return launch.stages * stage + values * launch.threads_per_row * parameters + _SMALL


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WARP = 32
_PARTS_OF_A_WARP = (1, 2, 4, 8, 16, 32)
_MAX_THREADS = 1024
_BLOCK = 256  # threads of a block of several rows
_LONG = 512  # threads of a block that keeps its sums in memory
_REGISTERS = 65536  # of a multiprocessor
_WIDE = 512  # threads of a block that shares a long row
_SPLITS = ((32, 4), (128, 2), (256, 4), (512, 4), (512, 8), (1024, 4))  # threads that share a row, and their vectors
_MOST_WORDS = 64  # registers of sums that a thread can hold
_ENOUGH = 448  # threads that should be at work on a multiprocessor
_MOST_BLOCKS = 4  # on a multiprocessor: each costs a row of sums, which the second kernel reads
_UNDER_WAY = 64 << 10  # bytes that a multiprocessor should wait for
_SMALL = 256  # bytes of shared memory through which the threads of a row meet, rounded up


def _vector(problem: BackwardProblem) -> int:
    return gcd(problem.columns, problem.x_alignment // _BYTES[problem.x_dtype])


def _words_of_sums(problem: BackwardProblem) -> int:
    """Return the registers per vector that live as long as the block, or as the row: those of SiLU's gradient."""
    return _vector(problem) * (problem.sums + (problem.activation is not None))


def _threads(vectors: int, threads: int, chunk: int) -> int:
    """Return the threads that share a row: no more than it needs."""
    needed = -(-vectors // chunk)
    if threads > _WARP:
        return -(-needed // _WARP) * _WARP
    return 1 << (needed - 1).bit_length()


def _at_work(launch: BackwardLaunch) -> int:
    return launch.threads * launch.blocks_per_sm


def _wide(problem: BackwardProblem, arch: str, sm_count: int) -> BackwardLaunch | None:
    """Return the launch for rows of 6 KB and more: as few blocks as keep a multiprocessor busy.

    On an H200 two blocks for rows of 4096 and one for rows of 8192 are 10 and 7 % faster than three and two of half
    the threads, the early start of the second kernel included.
    """
    vectors = problem.columns // _vector(problem)
    chunk = -(-vectors // _WIDE)
    if vectors < _WIDE * 3 // 4 or chunk * _words_of_sums(problem) > _MOST_WORDS:
        return None
    threads = _threads(vectors, _WIDE, chunk)
    blocks = max(1, round(2 * _WIDE / (threads * chunk)))
    for stages in (3, 2):
        launch = BackwardLaunch(_vector(problem), threads, 1, chunk, stages, blocks, blocks * sm_count)
        if blocks <= _by_registers(problem, launch) and _fits(problem, launch, arch):
            return launch
    return None


def _usual(problem: BackwardProblem, arch: str, sm_count: int) -> BackwardLaunch | None:
    """Return the launch for shorter rows, and for those with much to add up."""
    vectors = problem.columns // _vector(problem)
    best = None
    for threads, most in _SPLITS:
        chunk = -(-vectors // threads)
        if chunk > most or chunk * _words_of_sums(problem) > _MOST_WORDS:
            continue
        found = _launch(problem, arch, sm_count, _threads(vectors, threads, chunk))
        if found is not None and (best is None or _at_work(found) > _at_work(best)):
            best = found
        if best is not None and _at_work(best) >= _ENOUGH:
            break
    return best


def _launch(problem: BackwardProblem, arch: str, sm_count: int, threads: int) -> BackwardLaunch | None:
    """Return the launch for a split of the row with enough bytes under way, or as many as fit."""
    vector = _vector(problem)
    chunk = -(-problem.columns // (vector * threads))
    groups = max(1, _BLOCK // threads) if threads <= _WARP else 1
    found = None
    for stages in (2, 3, 4):
        launch = BackwardLaunch(vector, threads, groups, chunk, stages, 1, sm_count)
        most = min(_MOST_BLOCKS, threads_per_sm(arch) // launch.threads, _by_registers(problem, launch))
        fitting = [n for n in range(1, most + 1) if _fits(problem, replace(launch, blocks_per_sm=n), arch)]
        if not fitting or (found is not None and fitting[-1] < found.blocks_per_sm):
            break
        found = replace(launch, blocks_per_sm=fitting[-1], blocks=fitting[-1] * sm_count)
        if (stages - 1) * groups * problem.row_bytes * fitting[-1] >= _UNDER_WAY:
            break
    return found


def _long(problem: BackwardProblem, sm_count: int) -> BackwardLaunch:
    """Return the launch for rows whose sums do not fit into registers, or that do not fit into shared memory."""
    return BackwardLaunch(_vector(problem), _LONG, 1, 1, 1, 1, sm_count)


def _by_registers(problem: BackwardProblem, launch: BackwardLaunch) -> int:
    """Return the blocks for which a multiprocessor has registers, by experience with the compiler."""
    tail = launch.chunk * launch.threads_per_row * launch.vector > problem.columns
    need = launch.chunk * _words_of_sums(problem) + 5 * launch.vector + 16 + 10 * (tail and problem.has_residual)
    return _REGISTERS // (-(-need // 8) * 8 * launch.threads)


def _fits(problem: BackwardProblem, launch: BackwardLaunch, arch: str) -> bool:
    """Whether the blocks' shared memory fits; the system keeps 1 KB for itself in each."""
    return launch.blocks_per_sm * (shared_bytes(problem, launch) + 1024) <= shared_memory_per_sm(arch)


def _hopper(arch: str) -> bool:
    return architecture_number(arch) >= 90
