"""What is static about a grouped product's kernel, and how it is launched: a choice by rules.

The rows of A are in groups, one after the other; group e, which ends at ``offsets[e]``, is multiplied by the weights of
expert e. How many rows there are, and how they are spread over the groups, is not known when a kernel is compiled. So a
kernel comes with launches by the average number of rows of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import launches, tiles
from .launches import Launches
from .problem import CELL, Problem, Sheet
from .tiles import Launch, roomy

__all__ = [
    "MAP_BYTES",
    "Grouped",
    "GroupedProblem",
    "candidates",
    "choose_launches",
    "config",
    "is_valid",
    "line_of",
    "split_config",
    "table_bytes",
]

MAP_BYTES = 128
"""Bytes of a tensor map."""

EPILOGUES = ("unfused", "glu", "dglu")
ACTIVATIONS = {
    "swiglu": (),
    "geglu": ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min"),
    "situglu": ("situ_beta1", "situ_beta2"),
}
"""The gated activations with their scalars."""
_WIDE = ("float32", "float16", "bfloat16")


def table_bytes(groups: int, arrays: int) -> int:
    """Return the bytes of a table with a map for each group and each of so many arrays."""
    return groups * arrays * MAP_BYTES


def line_of(row: Any, group: Any) -> Any:
    """Return the line of a workspace in which the sums of the cell that begins in a row of a group lie.

    Groups may begin in any row, but the lines of two of them never meet.
    """
    return row // CELL + group


@dataclass(frozen=True, slots=True)
class GroupedProblem(Problem):
    """A product X = alpha[e] A B_e^T of groups of rows, and what is made of X.

    A (M, K) and the results are row-major. Besides what a :class:`~fe_gemm.planning.problem.Problem` says:

    Parameters
    ----------
    epilogue
        ``"unfused"``: without a bias, pre = X and C = X prob; with one, both are X + bias prob. ``"glu"``: pre = X +
        bias, and C (M, N / 2) = activation(pre) prob; columns alternate in blocks of 32: gate, up. ``"dglu"``: X, with
        the factor alpha[e]^2, is the gradient of an activation, but for prob; upstream (M, 2N), times beta[e], are its
        gates and ups; C (M, 2N) are their gradients, dprob the sums over the rows of X activation, dbias those of C
        over the rows of each group.
    b_major
        ``"k"``: the weights of a group are (N, K), row-major; ``"n"``: (K, N).
    discrete
        Whether the weights of each group have an address of their own.
    bias_dtype
        float32, float16 or bfloat16, if there is a bias (E, N).
    activation
        One of :data:`ACTIVATIONS`; ``None`` for ``"unfused"``.
    weighted
        Whether there is a prob; otherwise it is 1.
    beta
        Whether there is a beta; otherwise it is 1.
    rounds
        Whether X is rounded to bfloat16 before anything is made of it.
    dprob, dbias
        Whether they are wanted: ``"new"``, or ``"added"`` to what is there (rounded before); otherwise ``None``.
    keeps
        Whether the activation times prob is wanted too: act (M, N), bfloat16.
    """

    epilogue: str = "unfused"
    discrete: bool = False
    bias_dtype: str | None = None
    activation: str | None = None
    weighted: bool = True
    beta: bool = False
    rounds: bool = False
    dprob: str | None = None
    dbias: str | None = None
    keeps: bool = False

    @property
    def grouped(self) -> bool:
        """Whether the rows of A are in groups."""
        return True

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that are read besides operands and offsets: upstream (M, 2N), alpha and beta (E,), bias
        (E, N), prob (M,)."""
        wanted = {
            "upstream": self.upstream_dtype is not None,
            "alpha": True,
            "beta": self.beta,
            "bias": self.bias_dtype is not None,
            "prob": self.weighted,
        }
        return tuple(name for name, present in wanted.items() if present)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the arrays that are written: pre and C, dprob (M,), dbias (E, 2N) bfloat16, act."""
        wanted = {
            "pre": self.pre_dtype is not None,
            "c": True,
            "dprob": self.dprob is not None,
            "dbias": self.dbias is not None,
            "act": self.keeps,
        }
        return tuple(name for name, present in wanted.items() if present)

    @property
    def outputs(self) -> tuple[Sheet, ...]:
        """The matrices that leave, in the order in which the pieces of a strip do."""
        found = [self._output("c", self.c_dtype, self.result_columns)]
        if self.pre_dtype is not None:
            found.insert(0, self._output("pre", self.pre_dtype, CELL))
        if self.keeps:
            found.append(self._output("act", "bfloat16", CELL))
        return tuple(found)

    @property
    def scratch(self) -> tuple[str, ...]:
        """Names of the epilogue's workspaces: :meth:`Grouped.scratch` says how large they are."""
        wanted = {"partials": self.dprob is not None, "column_partials": self.dbias is not None}
        return tuple(name for name, present in wanted.items() if present)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars of a call, float32."""
        return () if self.activation is None else ACTIVATIONS[self.activation]

    @property
    def result_columns(self) -> int:
        """How many columns of C belong to 64 columns of X."""
        return {"glu": CELL // 2, "dglu": 2 * CELL}.get(self.epilogue, CELL)

    @property
    def upstream(self) -> Sheet | None:
        """The matrix that comes in beside the product."""
        return None if self.upstream_dtype is None else Sheet("upstream", self.upstream_dtype, "n", 2 * CELL)

    @property
    def adds_dprob(self) -> bool:
        """Whether dprob is added to what is there."""
        return self.dprob == "added"

    @property
    def adds_dbias(self) -> bool:
        """Whether dbias is added to what is there."""
        return self.dbias == "added"

    @property
    def sum_bytes(self) -> int:
        """Shared memory in which a warp group adds up columns: those of a cell, for four warps, twice."""
        return 0 if self.dbias is None else 2 * 4 * CELL * 4

    @property
    def maps(self) -> tuple[str, ...]:
        """Arrays with a tensor map for each group: the results, and weights with addresses."""
        return (*(sheet.name for sheet in self.outputs), *(["b"] if self.discrete else []))

    @property
    def is_consistent(self) -> bool:
        """Whether the parts fit together."""
        gradient = self.epilogue == "dglu"
        return (
            self.dtype in ("bfloat16", "float16")
            and self.epilogue in EPILOGUES
            and (self.a_major, self.c_major) == ("k", "n")
            and self.c_dtype in _WIDE
            and self.pre_dtype in (None, *(() if gradient else _WIDE))
            and self.bias_dtype in (None, *(() if gradient else _WIDE))
            and self.upstream_dtype in (_WIDE if gradient else (None,))
            and not (self.alpha or self.amax or self.accumulates)
            and self.scale_dtype is None
            and self.activation in ((None,) if self.epilogue == "unfused" else tuple(ACTIVATIONS))
            and (self.weighted or self.epilogue != "unfused")
            and (gradient or not (self.beta or self.rounds or self.dprob or self.dbias or self.keeps))
            and {self.dprob, self.dbias} <= {None, "new", "added"}
        )


@dataclass(frozen=True, slots=True)
class Grouped:
    """A grouped operation's kernel.

    Parameters
    ----------
    problem
        The product.
    launches
        Launches by the average number of rows of a group.
    multiprocessors
        Of the GPU.
    arguments
        Names of the kernel's arguments, in any order: ``a`` (M, K), ``offsets`` (E,), ``b`` (E, N, K) or ``addresses``
        (E,) int64, or their bytes (8 E,), what :attr:`GroupedProblem.inputs`, ``results`` and ``scalars`` name, and the
        workspaces of :meth:`scratch`.
    byte_addresses
        Whether addresses come as bytes.
    """

    problem: GroupedProblem
    launches: Launches
    multiprocessors: int
    arguments: tuple[str, ...]
    byte_addresses: bool = False

    def scratch(self, groups: int, m: int, n: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the workspaces of a call, by the names of the arguments."""
        problem, width = self.problem, self.launches.many.group_columns
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if problem.dprob is not None:  # for the columns of each warp group
            found["partials"] = (-(-n // width), m), "float32"
        if problem.dbias is not None:  # for the rows of each cell
            found["column_partials"] = (m // CELL + groups, 2 * n), "float32"
        return {**found, "maps": ((table_bytes(groups, len(problem.maps)),), "uint8")}


def choose_launches(problem: GroupedProblem, n: int, k: int, groups: int, arch: str, multiprocessors: int) -> Launches:
    """Return the launches for so many groups and weights (N, K), on a GPU with so many multiprocessors."""
    del k, arch
    few = []
    wide = next(launch for shape in _MANY_ROWS if is_valid(problem, launch := roomy(problem, shape)))
    for rows, shapes in _FEW_ROWS.items():
        valid = [launch for shape in shapes if is_valid(problem, launch := roomy(problem, shape))]
        busy = [launch for launch in valid if groups * -(-n // launch.tile_n) >= _BUSY * multiprocessors]
        if problem.dprob is not None:  # its partial sums have the width of one kind of tile
            busy, valid = ([x for x in found if x.group_columns == wide.group_columns] for found in (busy, valid))
        few += [(rows, launch) for launch in (busy or valid[-1:])[:1]]
    return Launches(tuple(few), wide)


def candidates(problem: GroupedProblem, n: int, k: int, groups: int, arch: str, multiprocessors: int) -> list[Launch]:
    """Return the launches worth timing, whatever the number of rows; the chosen one for many rows first."""
    found = [choose_launches(problem, n, k, groups, arch, multiprocessors).many]
    for tile in ((128, 256), (256, 128), (128, 192), (128, 128), (64, 256), (64, 128)):
        for cluster in ((1, 1), (2, 1), (1, 2)):
            buffers = 1 if tile[0] == CELL else 2
            found += [roomy(problem, Launch(*tile, *cluster, store_buffers=buffers, band=band)) for band in (4, 8, 16)]
    return [launch for launch in dict.fromkeys(found) if is_valid(problem, launch)]


def is_valid(problem: GroupedProblem, launch: Launch) -> bool:
    """Whether a launch computes a problem. The blocks of a cluster share operands and never the depth of a tile."""
    crowded = problem.epilogue == "glu" and problem.c_dtype == "float32" and problem.bias_dtype is not None
    return (
        tiles.is_valid(problem, launch)
        and launch.cluster_k == 1
        and not (crowded and launch.accumulators(problem) > _MOST_CROWDED_ACCUMULATORS)
    )


def config(grouped: Grouped) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    own = {field.name: getattr(grouped, field.name) for field in fields(Grouped)[2:]}
    return {**launches.config(grouped.problem, grouped.launches), **own, "arguments": " ".join(grouped.arguments)}


def split_config(flat: dict[str, Any]) -> Grouped:
    """Return what :func:`config` was made of."""
    problem, how = launches.split_into(GroupedProblem, flat)
    own = {field.name: flat[field.name] for field in fields(Grouped)[2:]}
    return Grouped(problem, how, **{**own, "arguments": tuple(flat["arguments"].split())})


_FEW_ROWS = {
    64: (Launch(64, 256, store_buffers=1), Launch(64, 128, store_buffers=1)),
    384: (Launch(128, 256), Launch(128, 128), Launch(128, 128, store_buffers=1)),
}
"""By the average number of rows of a group, the tiles to try, widest first. Reading the weights once is all that counts
for the fewest. Timed on an H200: those of 64 rows."""
_MANY_ROWS = (Launch(128, 256), Launch(128, 128))
"""Timed on an H200 with 256 to 4096 rows of a group: clusters that share weights gain nothing, and with groups of
different sizes one of their tiles is often empty."""

_MOST_CROWDED_ACCUMULATORS = 96
"""Registers of a thread that may hold sums where a gated activation with a bias is stored in float32: with 128, a few
others do not fit."""

_BUSY = 0.8
"""Share of the multiprocessors that have to have a tile, if each group has one row of tiles."""
