"""How the gradients of ``gemm_swiglu`` are launched: a pass over the stored product, then two matrix products.

The pass makes dX, the gradient of the product before its activation, rounded to the dtype of A and B, in a workspace.
Then dA = dX B, a sum over N, and dB = dX^T A, a sum over M. A thread of the pass treats neighbours along the contiguous
dimension of dC, of columns of up and those of gate that belong to them. All extents are dynamic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fe_runtime.architecture import threads_per_sm

from . import launches
from .launches import Launches, choose_launches
from .problem import Problem as Product

__all__ = [
    "BLOCK",
    "Launch",
    "Plan",
    "Problem",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "pass_config",
    "plan",
    "split_config",
    "split_pass_config",
    "workspace_shape",
]

BLOCK = 32
"""Columns of up that are followed by as many of gate."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    dtype
        Of A, B, dX and the gradients: bfloat16 or float16.
    dc_dtype, ab12_dtype, dab12_dtype
        bfloat16 or float16; of AB12 and its gradient also float32, float8_e4m3fn or float8_e5m2. ``None``: no gradient
        of AB12.
    a_major, b_major
        The contiguous dimension: ``"k"`` or ``"m"``, ``"k"`` or ``"n"``.
    major
        Of dC, and so of dX: ``"n"`` or ``"m"``.
    ab12_major, dab12_major
        Likewise. Where they differ from ``major``, values are read one by one.
    """

    dtype: str = "bfloat16"
    dc_dtype: str = "bfloat16"
    ab12_dtype: str = "bfloat16"
    dab12_dtype: str | None = None
    a_major: str = "k"
    b_major: str = "k"
    major: str = "n"
    ab12_major: str = "n"
    dab12_major: str = "n"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the kernel's arguments, in order."""
        incoming = ("dc",) if self.dab12_dtype is None else ("dc", "dab12")
        return (*incoming, "a", "b", "ab12", "da", "db", "dx", "alpha")

    @property
    def da(self) -> Product:
        """The product dA = dX B: M rows, K columns, a sum over N."""
        return Product(
            self.dtype,
            self.dtype,
            a_major="k" if self.major == "n" else "m",
            b_major="k" if self.b_major == "n" else "n",
            c_major="n" if self.a_major == "k" else "m",
            alpha=True,
        )

    @property
    def db(self) -> Product:
        """The product dB = dX^T A: N rows, K columns, a sum over M, which no alignment restricts where it is not the
        contiguous dimension."""
        return Product(
            self.dtype,
            self.dtype,
            a_major="k" if self.major == "m" else "m",
            b_major="k" if self.a_major == "m" else "n",
            c_major="n" if self.b_major == "k" else "m",
            alpha=True,
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """How the pass is spread.

    Parameters
    ----------
    vector
        Neighbours of up, and of gate, that a thread treats.
    threads
        Threads of a block.
    blocks_per_sm
        Blocks that must fit on a multiprocessor: it bounds the registers.
    """

    vector: int = 8
    threads: int = 256
    blocks_per_sm: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem with all its launches: the pass, the products dA and dB on so many multiprocessors."""

    problem: Problem
    launch: Launch
    da: Launches
    db: Launches
    multiprocessors: int


def plan(problem: Problem, n: int, k: int, arch: str, multiprocessors: int) -> Plan:
    """Return the launches for N = ``n`` and K = ``k``; the number of rows does not matter."""
    da = choose_launches(problem.da, k, n, arch, multiprocessors)
    db = choose_launches(problem.db, k, 0, arch, multiprocessors)  # a sum of unknown length is not cut
    only = next((launch for rows, launch in db.few if n <= rows), db.many)  # its rows are known: N
    return Plan(problem, choose(problem, arch), da, Launches((), only), multiprocessors)


def choose(problem: Problem, arch: str) -> Launch:
    """Return the launch of the pass on an architecture such as ``"sm_90a"``."""
    return _filled(problem, Launch(), arch)


def candidates(problem: Problem, arch: str) -> list[Launch]:
    """Return the launches of the pass worth timing, the chosen one first."""
    found = [choose(problem, arch)]
    for vector in (8, 4, 16):
        for threads in (128, 256, 512):
            full = _filled(problem, Launch(vector, threads), arch)
            found += [full, replace(full, blocks_per_sm=max(1, full.blocks_per_sm // 2))]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch, arch)]


def is_valid(problem: Problem, launch: Launch, arch: str) -> bool:
    """Whether a launch of the pass computes a problem on an architecture."""
    most = 16 if problem.major == "n" else 8  # M is a multiple of 8 where it is the contiguous dimension
    return (
        problem.da.is_consistent
        and launch.vector in (4, 8, 16)
        and launch.vector <= most
        and launch.threads % 32 == 0
        and 0 < launch.threads <= 1024
        and 0 < launch.blocks_per_sm <= _most_blocks(problem, launch, arch)
    )


def workspace_shape(problem: Problem, m: int, n: int, batches: int) -> tuple[int, int]:
    """Return the shape of the workspace for dX (M, N, L): its lines, and the values of a line."""
    return (batches * m, n) if problem.major == "n" else (batches * n, m)


def config(how: Plan) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    products = {"da_": (how.problem.da, how.da), "db_": (how.problem.db, how.db)}
    flat = {prefix + key: value for prefix, known in products.items() for key, value in launches.config(*known).items()}
    return {**pass_config(how.problem, how.launch), "multiprocessors": how.multiprocessors, **flat}


def split_config(flat: dict[str, Any]) -> Plan:
    """Return what :func:`config` was made of."""
    problem, launch = split_pass_config(flat)
    da, db = (
        launches.split_config({key.removeprefix(prefix): value for key, value in flat.items() if key[:3] == prefix})[1]
        for prefix in ("da_", "db_")
    )
    return Plan(problem, launch, da, db, flat["multiprocessors"])


def pass_config(problem: Problem, launch: Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of the pass alone."""
    return asdict(problem) | asdict(launch)


def split_pass_config(flat: dict[str, Any]) -> tuple[Problem, Launch]:
    """Return what :func:`pass_config` was made of."""
    problem, launch = ({f.name: flat[f.name] for f in fields(kind)} for kind in (Problem, Launch))
    return Problem(**problem), Launch(**launch)


def _filled(problem: Problem, launch: Launch, arch: str) -> Launch:
    """Return a launch with as many blocks on a multiprocessor as its registers and threads allow."""
    return replace(launch, blocks_per_sm=max(1, _most_blocks(problem, launch, arch)))


def _most_blocks(problem: Problem, launch: Launch, arch: str) -> int:
    """Return the blocks for which a multiprocessor has threads, and registers by experience with the compiler."""
    bits = _BITS[problem.dc_dtype] + 2 * _BITS[problem.ab12_dtype] + 2 * _BITS.get(problem.dab12_dtype or "", 0)
    addresses = 36 if problem.dab12_dtype is None else 44
    registers = -(-(addresses + launch.vector * bits // 32) // 8) * 8
    return min(_REGISTERS // registers, threads_per_sm(arch)) // launch.threads


_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
_REGISTERS = 65536  # of a multiprocessor
