"""What is static about the gradients of experts' weights, and how they are launched: a choice by rules.

W[e] (M, N) is the sum over the tokens t of expert e of A[:, t] B[t, :]. Every expert's W has the same tiles; how long a
tile takes is proportional to the expert's tokens, which are known on the device only. The experts are treated by
descending number of tokens, so that what comes last is short. M, N, T, E and the sizes of the groups are dynamic.

Groups may have any sizes where both operands lie token by token. Along a contiguous dimension, TMA starts at multiples
of 16 bytes only. So with an operand whose tokens are contiguous, groups begin at multiples of :data:`TOKENS`, and only
the last one ends anywhere; where its experts' tokens are matrices of their own, all sizes are such multiples. W of an
expert for which that does not hold is NaN; those of the others are right, and nothing else is touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from . import expand as launch_expand
from . import launches, tiles
from .dense import Operands
from .grouped import table_bytes
from .problem import Problem as Product
from .tiles import Launch, roomy

__all__ = [
    "GROUP_BYTES",
    "MAPS",
    "TOKENS",
    "Plan",
    "Problem",
    "Turns",
    "candidates",
    "choose",
    "config",
    "is_valid",
    "split_config",
    "workspace_bytes",
]

MAPS = ("a", "b", "c")
"""Arrays that may have a tensor map for each expert."""

TOKENS = 8
"""Neighbouring tokens, 16 bytes of 16-bit values, at whose multiples groups begin where tokens are contiguous."""

GROUP_BYTES = 16
"""What a tile has to know of its expert, besides the maps: four words. Twice as many follow for all experts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is static about a call.

    Parameters
    ----------
    dtype
        Of the operands that the tensor cores multiply: bfloat16 or float16; bfloat16 if they are expanded.
    c_dtype
        Of W: bfloat16, float16 or float32.
    a_major, b_major
        The contiguous dimension: ``"k"``, the tokens, or ``"m"``; ``"k"`` or ``"n"``.
    accumulates
        Whether W is added to what is there.
    discrete
        Whether each W has an address of its own.
    ragged
        Whether the tokens of each expert are a compact matrix of their own. Matters for operands with contiguous
        tokens; in the others it is the same memory.
    factors
        Whether W is multiplied by the product of two numbers for each expert.
    operands
        How A and B are brought to the core: as they are, or ``"blocks"``: codes and scales.
    b_turned
        Whether B is given as (N, T).
    """

    dtype: str = "bfloat16"
    c_dtype: str = "bfloat16"
    a_major: str = "m"
    b_major: str = "n"
    accumulates: bool = False
    discrete: bool = False
    ragged: bool = False
    factors: bool = False
    operands: Operands = field(default_factory=Operands)
    b_turned: bool = False

    @property
    def product(self) -> Product:
        """The product of the core: its K is the tokens."""
        return Product(self.dtype, self.c_dtype, self.a_major, self.b_major)

    @property
    def majors(self) -> dict[str, str]:
        """The contiguous dimensions of the operands by name."""
        return {"a": self.a_major, "b": self.b_major}

    @property
    def ragged_maps(self) -> tuple[str, ...]:
        """Operands that TMA reads where each expert's tokens are a matrix of their own; expanded ones are not."""
        if not self.ragged or self.operands.way != "direct":
            return ()
        return tuple(name for name, major in self.majors.items() if major == "k")

    @property
    def maps(self) -> tuple[str, ...]:
        """Arrays with maps for each expert, in the order of the workspace."""
        return MAPS if self.discrete else MAPS[:2]

    @property
    def scales_w(self) -> bool:
        """Whether W is multiplied by a number of the expert's: by the factors, or by NaN where TMA cannot read it."""
        return self.factors or "k" in (self.a_major, self.b_major)

    @property
    def workspaces(self) -> dict[str, launch_expand.Problem]:
        """What is done to the operands that go to a workspace, by name."""
        found = {}
        for name, major in self.majors.items():
            how = self.operands.workspace(name, major)
            if isinstance(how, launch_expand.Problem):
                found[name] = replace(how, grouped=True, ragged=self.ragged)
        return found

    @property
    def is_consistent(self) -> bool:
        """Whether the parts fit together."""
        return (
            self.product.is_consistent
            and self.dtype in ("bfloat16", "float16")
            and self.c_dtype in ("bfloat16", "float16", "float32")
            and self.operands.way in ("direct", "blocks")
            and not (self.operands.way == "blocks" and self.dtype != "bfloat16")
            and not (self.operands.element == "float4_e2m1fn" and (self.a_major, self.b_major) != ("k", "k"))
            and not (self.factors and self.operands.way != "blocks")
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem with its launch, the multiprocessors of the GPU, and the names of the kernel's arguments in order.

    Names: ``a`` (M, T), ``b`` (T, N), ``sfa``, ``sfb``, ``offsets`` (E,), ``c`` (E, M, N) or ``addresses`` (E,),
    ``scale_a`` and ``scale_b`` (E,), the workspace ``groups`` of :func:`workspace_bytes` bytes, ``a_values`` and
    ``b_values`` for expanded operands. ``old_c`` stands for ``c`` where it is named as what W is added to;
    ``address_bytes`` (8 E,) for ``addresses`` in another dtype; ``token`` (M, N) is not touched.

    ``dynamic``: clusters take tiles when they are ready for one, from a counter; otherwise they have :class:`Turns`.
    """

    problem: Problem
    launch: Launch
    multiprocessors: int
    arguments: tuple[str, ...]
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """The tiles of a cluster among ``clusters``: one in each turn, of ``tiles`` tiles that become shorter.

    A turn gives each cluster one tile; every other turn in the opposite order, so that nobody always has the longest.
    Integers, or integers of the device.
    """

    cluster: Any
    clusters: Any
    tiles: Any

    @property
    def count(self) -> Any:
        """How many tiles the cluster has."""
        full = self.tiles // self.clusters
        rest = self.tiles - full * self.clusters
        return full + (rest - self._place(full) + self.clusters - 1) // self.clusters

    def number(self, turn: Any) -> Any:
        """Return the number of the cluster's tile in a turn."""
        return turn * self.clusters + self._place(turn)

    def _place(self, turn: Any) -> Any:
        return self.cluster + (turn & 1) * (self.clusters - 1 - 2 * self.cluster)


def choose(problem: Problem, m: int, n: int, arch: str) -> Launch:
    """Return the launch for W of M = ``m`` and N = ``n``: the first of those measured best that is valid."""
    del arch
    shapes = _NARROW if n <= 128 else _LOW if m <= 128 else _LARGE
    valid = (roomy(problem.product, launch) for launch in (*shapes, *_NARROW))
    return next(launch for launch in valid if is_valid(problem, launch))


def candidates(problem: Problem, m: int, n: int, arch: str) -> list[Launch]:
    """Return the launches worth timing, the chosen one first."""
    found = [choose(problem, m, n, arch), *tiles.candidates(problem.product, n, 0, arch)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: Problem, launch: Launch) -> bool:
    """Whether a launch computes a problem. The tokens of a tile are never spread over blocks."""
    return problem.is_consistent and launch.cluster_k == 1 and tiles.is_valid(problem.product, launch)


def workspace_bytes(experts: int) -> int:
    """Return the size of the workspace ``groups``, which starts at a multiple of 128 bytes."""
    return table_bytes(experts, len(MAPS)) + (experts + 2) * GROUP_BYTES


def config(plan: Plan) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    own = {name: value for name, value in asdict(plan.problem).items() if name != "operands"}
    product = launches.config(plan.problem.product, plan.launch)
    rest = {"multiprocessors": plan.multiprocessors, "arguments": " ".join(plan.arguments), "dynamic": plan.dynamic}
    return {**product, **own, **asdict(plan.problem.operands), **rest}


def split_config(flat: dict[str, Any]) -> Plan:
    """Return what :func:`config` was made of."""
    named = {entry.name: flat[entry.name] for entry in fields(Problem) if entry.name != "operands"}
    operands = Operands(**{entry.name: flat[entry.name] for entry in fields(Operands)})
    _, how = launches.split_config(flat | {"accumulates": False})
    problem = Problem(**named, operands=operands)
    return Plan(problem, how.many, flat["multiprocessors"], tuple(flat["arguments"].split()), flat["dynamic"])


_LARGE = (Launch(128, 256, cluster_m=2),)
_LOW = (Launch(128, 256),)
_NARROW = (Launch(128, 128), Launch(128, 64, store_buffers=1))
"""Of large, low and narrow W, in the order of preference."""
