"""Which launch of the core serves how many rows of A: a choice by measured rules.

The number of rows is not known when a kernel is compiled. So a kernel comes with a launch for few rows, where reading B
is all that counts, and one for many; its launcher takes the one that fits.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from .problem import Problem
from .tiles import Launch, choose, is_valid, roomy

__all__ = ["Launches", "choose_launches", "config", "split_config", "split_into"]

AnyProblem = TypeVar("AnyProblem", bound=Problem)


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches by the number of rows of A.

    Parameters
    ----------
    few
        Pairs of a number of rows and the launch for no more than so many, in ascending order.
    many
        The launch for more rows.
    """

    few: tuple[tuple[int, Launch], ...]
    many: Launch

    @property
    def all(self) -> tuple[Launch, ...]:
        """The launches, that for many rows last."""
        return (*(launch for _, launch in self.few), self.many)


def choose_launches(problem: Problem, n: int, k: int, arch: str, multiprocessors: int) -> Launches:
    """Return the launches for products with N = ``n`` and K = ``k`` on a GPU with so many multiprocessors."""
    many = choose(problem, n, k, arch)
    if problem.epilogue == "dsrelu":  # its partial sums have the width of one kind of tile
        return Launches((), many)
    few = []
    for rows, shapes in _FEW_ROWS.items():
        launch = _few_rows(problem, rows, shapes, (n, k), multiprocessors)
        if launch is not None:
            few.append((rows, launch))
    return Launches(tuple(few), many)


def _few_rows(
    problem: Problem, rows: int, shapes: tuple[Launch, ...], extents: tuple[int, int], multiprocessors: int
) -> Launch | None:
    """Return the first launch whose blocks give most multiprocessors work; else the last one, with K in parts.

    Launches that are for K in parts need a long one.
    """
    n, k = extents
    depth = _LEAST_STEPS * problem.depth
    valid = [launch for shape in shapes if is_valid(problem, launch := roomy(problem, shape))]
    valid = [launch for launch in valid if launch.cluster_k == 1 or k >= launch.cluster_k * depth]
    if not valid:
        return None
    for launch in valid:
        blocks = -(-rows // launch.tile_m) * -(-n // launch.tile_n) * launch.cluster_k
        if blocks >= _BUSY * multiprocessors:
            return launch
    last = valid[-1]
    parts = min(_MOST_PARTS, multiprocessors // -(-n // last.tile_n), k // depth)
    split = roomy(problem, replace(last, cluster_k=max(1, parts)))
    return split if is_valid(problem, split) else last


_FEW_ROWS = {
    64: (Launch(64, 256, store_buffers=1), Launch(64, 128, store_buffers=1)),
    128: (Launch(128, 128), Launch(64, 128, cluster_m=2, store_buffers=1), Launch(128, 64, store_buffers=1)),
}
"""By the number of rows, the tiles to try, widest first. Timed on an H200: those of 64 rows with N = 4096, 8192 and
28672, those of 128 with N = 4096 and 8192."""

_BUSY = 0.8
"""Share of the multiprocessors that have to have a tile."""
_MOST_PARTS = 2
_LEAST_STEPS = 8
"""Slots that a part of K takes at least."""


def config(problem: Problem, launches: Launches | Launch) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    if isinstance(launches, Launch):
        launches = Launches((), launches)
    few = {f"{_FEW}{rows}": _written(launch) for rows, launch in launches.few}
    return {**asdict(problem), **few, _MANY: _written(launches.many)}


def split_config(flat: dict[str, Any]) -> tuple[Problem, Launches]:
    """Return what :func:`config` was made of."""
    return split_into(Problem, flat)


def split_into(kind: type[AnyProblem], flat: dict[str, Any]) -> tuple[AnyProblem, Launches]:
    """Return what :func:`config` was made of, for a kind of problem."""
    problem = kind(**{field.name: flat[field.name] for field in fields(kind)})
    rows = sorted(int(key.removeprefix(_FEW)) for key in flat if key.startswith(_FEW))
    return problem, Launches(tuple((limit, _read(flat[f"{_FEW}{limit}"])) for limit in rows), _read(flat[_MANY]))


_FEW = "launch_up_to_"
_MANY = "launch"


def _written(launch: Launch) -> str:
    return " ".join(f"{name} {value:d}" for name, value in asdict(launch).items())


def _read(text: str) -> Launch:
    return Launch(**{name: int(value) for name, value in re.findall(r"(\w+) (\d+)", text)})
