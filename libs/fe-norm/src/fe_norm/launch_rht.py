"""How the kernel of ``rmsnorm_rht_amax`` is launched: a choice by rules, the alternatives, and what is valid.

A *team* of threads treats one row at a time. Short rows go to parts of a warp, so that none waits for another. Longer
ones go to teams of several warps, side by side in a block as large as can be: on an H200 that is 6 to 10 % faster than
one team that walks through the rows of a group (4036 against 3667 GB/s for rows of 8192). Where there are no rows or no
registers for several teams, one team takes the whole block and loads the next row while it works on the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import architecture_number, threads_per_sm

__all__ = [
    "VECTOR",
    "Launch",
    "Problem",
    "candidates",
    "choose",
    "config",
    "folded_rows",
    "is_valid",
    "loads_weight_late",
    "split_config",
]

VECTOR = 8
"""Values of a thread's vector: two neighbouring threads share a block of 16."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    columns
        Values in a row, a multiple of 16.
    group
        Rows whose maximum one block finds: see :func:`folded_rows`.
    has_partials
        Whether these maxima are partial, and a second kernel folds them.
    x_dtype, weight_dtype
        bfloat16, float16 or float32; the output has the dtype of x.
    x_alignment, o_alignment, weight_alignment
        Largest power of two up to 16 that divides, in bytes, the start of every row of x, of every row of o, and of
        the weight.
    """

    columns: int
    group: int
    has_partials: bool = False
    x_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    x_alignment: int = 16
    o_alignment: int = 16
    weight_alignment: int = 16

    @property
    def vectors(self) -> int:
        """Vectors in a row."""
        return self.columns // VECTOR

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.columns * _BYTES[self.x_dtype]


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is spread.

    Parameters
    ----------
    threads_per_row
        Threads of a team: a power of two from 2 to 32, or whole warps.
    teams
        Teams that share the rows of a group, a power of two; each walks through ``group / teams`` rows.
    groups
        Groups of rows side by side in a block, a power of two.
    chunk
        Vectors that a thread holds at once; fewer than the row needs means that the row is read twice.
    ahead
        Rows that a team loads before it needs them: 0 or 1.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    prefetch
        How many blocks ahead rows are brought to the second-level cache; 0: not at all.
    lead
        0: a team brings the rows of the same number in that block. Otherwise it brings its own rows, so many before it
        works on them, and after its last one the first ones of that block.
    """

    threads_per_row: int
    teams: int
    groups: int
    chunk: int
    ahead: int = 0
    blocks_per_sm: int = 1
    prefetch: int = 0
    lead: int = 0

    @property
    def threads_per_group(self) -> int:
        """Threads that share a group of rows."""
        return self.threads_per_row * self.teams

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_group * self.groups

    def is_one_pass(self, problem: Problem) -> bool:
        """Whether a row stays in the registers of its team."""
        return self.chunk * self.threads_per_row >= problem.vectors


def folded_rows(rows_per_cta: int) -> int:
    """Return of how many rows one block finds the maximum; a second kernel folds the maxima if these are not all.

    Groups of very many rows would leave most of the GPU idle.
    """
    if rows_per_cta <= _MOST_ROWS:
        return rows_per_cta
    return next(rows for rows in range(_MOST_ROWS, 0, -1) if rows_per_cta % rows == 0)


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch for a problem on an architecture such as ``"sm_90a"``; the number of rows does not matter."""
    threads, chunk = _split(problem, arch)
    if threads > _WARP and (found := _several_teams(problem, arch)) is not None:
        return found
    return _launch(problem, arch, threads, chunk)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches worth timing for a problem, the chosen one first."""
    bases = [choose(problem, arch)]
    for chunk in (1, 2, 3, 4, 6, 8, 12, 16):
        threads = _team_size(-(-problem.vectors // chunk))
        if threads > _MAX_THREADS:
            continue
        base = _launch(problem, arch, threads, -(-problem.vectors // threads))
        several = [replace(base, teams=teams, groups=1) for teams in (2, 4, 8) if teams * threads <= _MAX_THREADS]
        for other in (base, *several):
            ahead = int(problem.group > other.teams)
            bases += [_filled(problem, replace(other, ahead=rows), arch) for rows in {0, ahead}]
    found = list(bases)
    for base in bases:
        found += [replace(base, prefetch=distance) for distance in (0, 2 * base.prefetch)]
        found += [replace(base, prefetch=_SMS * base.blocks_per_sm, lead=rows) for rows in (1, 2)]
        found.append(replace(base, blocks_per_sm=max(1, base.blocks_per_sm * 3 // 4)))
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch computes a problem on an architecture."""
    number = launch.teams * launch.groups
    whole_teams = launch.threads_per_row % _WARP == 0 and number <= _MOST_BARRIERS
    return (
        min(asdict(launch).values()) >= 0
        and min(launch.threads, launch.blocks_per_sm, launch.chunk) > 0
        and launch.ahead <= 1
        and (launch.threads_per_row in _PARTS_OF_A_WARP or whole_teams)
        and all(_is_power_of_two(count) for count in (launch.teams, launch.groups))
        and problem.group % launch.teams == 0
        and launch.threads % _WARP == 0
        and launch.threads <= _MAX_THREADS
        and launch.threads * launch.blocks_per_sm <= threads_per_sm(arch)
        and (launch.is_one_pass(problem) or number == 1)
        and launch.lead * launch.teams <= problem.group
        and (launch.prefetch == 0 or (_can_prefetch(problem, arch) and launch.is_one_pass(problem)))
    )


def config(problem: Problem, launch: Launch) -> dict[str, str | int | bool]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    return asdict(problem) | asdict(launch)


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


def loads_weight_late(problem: Problem, launch: Launch) -> bool:
    """Whether the weight is loaded vector by vector for each row, because a share of it takes too many registers."""
    return launch.chunk * _weight_words(problem) > _MOST_WEIGHT_WORDS or not launch.is_one_pass(problem)


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WARP = 32
_PARTS_OF_A_WARP = (2, 4, 8, 16, 32)
_MAX_THREADS = 1024
_MOST_BARRIERS = 15  # of teams of several warps
_USUAL_THREADS = 512  # of a block that shares a row
_TEAM_CHUNK = 4  # vectors of a thread in a team beside others
_BLOCK = 256  # threads of a block of several teams
_MOST_ROWS = 16  # that one block folds
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 255  # of a thread
_WORDS_IN_FLIGHT = 8  # registers of x that a thread should have under way
_MOST_WORDS = 16  # registers of a row with which a team is still best
_MOST_WEIGHT_WORDS = 32
_IDLE = 1.13  # threads per useful thread that are tolerated at the end of a row
_AHEAD = 4 << 20  # bytes that are prefetched ahead
_SMS = 132  # multiprocessors of Hopper: so many times the blocks of one run side by side


def _words(problem: Problem) -> int:
    """Return the registers of a vector of x; narrow accesses leave part of each empty."""
    size = _BYTES[problem.x_dtype]
    return VECTOR if problem.x_alignment < 4 or size == 4 else VECTOR * size // 4


def _weight_words(problem: Problem) -> int:
    size = _BYTES[problem.weight_dtype]
    return VECTOR if problem.weight_alignment < 4 or size == 4 else VECTOR * size // 4


def _split(problem: Problem, arch: str) -> tuple[int, int]:
    """Return how many threads share a row, and how many vectors each holds at once."""
    splits = [split for split in _splits(problem) if _fits(problem, arch, *split)]
    tight = [split for split in splits if split[0] * split[1] <= _IDLE * problem.vectors]
    without_barriers = [split for split in tight if split[0] <= _WARP]
    if splits:
        return (without_barriers or tight or [min(splits, key=lambda split: split[0] * split[1])])[0]
    for threads in (_USUAL_THREADS, _MAX_THREADS):
        chunk = -(-problem.vectors // threads)
        if _fits(problem, arch, threads, chunk):
            return threads, chunk
    return _split_in_passes(problem)


def _several_teams(problem: Problem, arch: str) -> Launch | None:
    """Return the launch with teams of several warps side by side, if that leaves each thread its registers."""
    threads = _team_size(-(-problem.vectors // _TEAM_CHUNK))
    teams = 1
    while problem.group % (2 * teams) == 0 and 2 * teams <= min(_MOST_BARRIERS, _MAX_THREADS // threads):
        teams *= 2
    launch = Launch(threads, teams, 1, _TEAM_CHUNK, blocks_per_sm=max(1, _MAX_THREADS // (teams * threads)))
    registers = _REGISTERS // (launch.threads * launch.blocks_per_sm)
    need = _registers(problem, launch, arch) + (8 if problem.group > 2 * teams else 0)  # a longer walk takes more
    if teams == 1 or not launch.is_one_pass(problem) or need > registers:
        return None
    if threads * _TEAM_CHUNK > _IDLE * problem.vectors:
        return None
    ahead = _SMS * launch.blocks_per_sm if _prefetch(problem, launch, arch) else 0
    return replace(launch, prefetch=ahead, lead=int(ahead > 0))


def _splits(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the ways to keep a row in the registers of a block of usual size, fewest vectors per thread first."""
    least, most = (-(-bound // _words(problem)) for bound in (_WORDS_IN_FLIGHT, _MOST_WORDS))
    for count in range(least, most + 1):
        threads = _team_size(-(-problem.vectors // count))
        if threads <= _USUAL_THREADS:
            yield threads, -(-problem.vectors // threads)


def _split_in_passes(problem: Problem) -> tuple[int, int]:
    """Return the same for rows that are read twice: few and full chunks."""
    most = max(1, _MOST_WORDS // _words(problem))
    chunks = -(-problem.vectors // (_USUAL_THREADS * most))
    return _USUAL_THREADS, -(-problem.vectors // (_USUAL_THREADS * chunks))


def _fits(problem: Problem, arch: str, threads: int, chunk: int) -> bool:
    registers = _registers(problem, _shape(problem, threads, chunk), arch)
    return registers <= min(_MAX_REGISTERS, _REGISTERS // max(threads, _BLOCK))


def _team_size(threads: int) -> int:
    if threads > _WARP:
        return -(-threads // _WARP) * _WARP
    return max(2, 1 << (threads - 1).bit_length())


def _launch(problem: Problem, arch: str, threads: int, chunk: int) -> Launch:
    return _filled(problem, _shape(problem, threads, chunk), arch)


def _filled(problem: Problem, launch: Launch, arch: str) -> Launch:
    """Return a launch with the blocks and the prefetch that suit it."""
    if not launch.is_one_pass(problem):
        return launch
    return replace(launch, blocks_per_sm=_blocks(problem, launch, arch), prefetch=_prefetch(problem, launch, arch))


def _shape(problem: Problem, threads: int, chunk: int) -> Launch:
    """Return the launch with teams side by side, as many as make a block of usual size."""
    one_pass = chunk * threads >= problem.vectors
    if threads > _WARP:
        return Launch(threads, 1, 1, chunk, ahead=int(one_pass and problem.group > 1))
    teams = 1
    while problem.group % (2 * teams) == 0 and 2 * teams * threads <= _BLOCK:
        teams *= 2
    groups = max(1, _BLOCK // (teams * threads))
    return Launch(threads, teams, groups, chunk, ahead=int(problem.group > teams))


def _registers(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the registers that a thread needs without spilling, by experience with the compiler."""
    need = (1 + launch.ahead) * launch.chunk * _words(problem) + (40 if launch.groups > 1 else 32)
    need += 0 if 90 <= architecture_number(arch) < 100 else 8
    need += 12 if min(problem.x_alignment, problem.o_alignment, problem.weight_alignment) < 16 else 0
    if loads_weight_late(problem, launch):
        return need + 6 * launch.chunk
    return need + launch.chunk * _weight_words(problem)


def _blocks(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the blocks for which there are registers."""
    registers = -(-_registers(problem, launch, arch) // 8) * 8
    return max(1, min(threads_per_sm(arch), _REGISTERS // registers) // launch.threads)


def _prefetch(problem: Problem, launch: Launch, arch: str) -> int:
    """Return how many blocks ahead to prefetch: not parts of cache lines."""
    if not _can_prefetch(problem, arch) or problem.row_bytes % 128:
        return 0
    return max(1, _AHEAD // (problem.row_bytes * problem.group * launch.groups))


def _can_prefetch(problem: Problem, arch: str) -> bool:
    return architecture_number(arch) >= 90 and problem.x_alignment == 16 and problem.row_bytes % 16 == 0


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
