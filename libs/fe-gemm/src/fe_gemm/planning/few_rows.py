"""How block-scaled operands with few rows of A are multiplied: which kernels leave sums, and who finishes them.

Expanded weights would be written and read again, several times what they are. So kernels for few rows read them as they
are and leave sums in float32, one matrix for each slice of K, and another one makes the results of them. How many rows
a call has is known when it is launched; scratch memory is what that call needs.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from . import scaled_few_rows, small_m
from .problem import Problem
from .scaled_few_rows import Launch as HopperLaunch
from .scaled_few_rows import Problem as HopperProblem
from .small_m import SmallLaunch, SmallProblem
from .tiles import Launch, is_valid

__all__ = ["FewRows", "Sums", "choose_few_rows", "config", "finishing_launch", "split_config"]

Format = tuple[str, str, int]
"""Canonical dtype names of elements and scales, and elements per scale."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A kernel that leaves sums.

    Parameters
    ----------
    problem, launch
        What it is: of :mod:`.scaled_few_rows` or of :mod:`.small_m`.
    slices
        Into how many slices K is cut.
    """

    problem: HopperProblem | SmallProblem
    launch: HopperLaunch | SmallLaunch
    slices: int

    @property
    def rows(self) -> int:
        """The most rows of A."""
        return self.problem.tokens


@dataclass(frozen=True, slots=True)
class FewRows:
    """What serves few rows of A.

    Parameters
    ----------
    sums
        Kernels, those for more rows later; none if few rows are expanded as others are.
    finish
        The tiles in which their sums are finished.
    why_not
        The reason, if there are none.
    """

    sums: tuple[Sums, ...] = ()
    finish: Launch | None = None
    why_not: str = ""

    def of(self, rows: int, batches: int) -> Sums | None:
        """Return the kernel for products with so many rows of A, if there is one."""
        return next((sums for sums in self.sums if rows <= sums.rows and batches == 1), None)


def choose_few_rows(problem: Problem, form: Format, n: int, k: int, arch: str, multiprocessors: int) -> FewRows:
    """Return what serves few rows of block-scaled operands.

    Parameters
    ----------
    problem
        The product and its epilogue.
    form
        Format of the operands.
    n, k
        Extents.
    arch, multiprocessors
        Of the GPU.
    """
    if (problem.a_major, problem.b_major) != ("k", "k"):
        return FewRows(why_not="K is not contiguous in both operands")
    if k < _LEAST_DEPTH:
        return FewRows(why_not="a short K is quickly expanded")
    if n <= _SMALL[0] and k <= _SMALL[1]:
        n, k = _SMALL
    if form in scaled_few_rows.FORMATS:
        found = tuple(_hopper_sums(form, rows, n, k, multiprocessors) for rows in _HOPPER_ROWS)
    else:
        found = tuple(_small_sums(form, rows, n, k, arch, multiprocessors) for rows in _SMALL_ROWS)
    if min(sums.slices for sums in found) == 0:
        return FewRows(why_not="K is too long for so few multiprocessors")
    return FewRows(found, finishing_launch(problem))


def finishing_launch(problem: Problem) -> Launch:
    """Return the tiles in which sums are finished: the narrowest that the epilogue allows."""
    tiles = [Launch(*tile, slots=2, store_buffers=buffers) for tile in _TILES for buffers in (1, 2)]
    return next(launch for launch in tiles if is_valid(problem, launch))


def config(few: FewRows) -> dict[str, str]:
    """Return the flat configuration, part of that of a kernel: an entry for each kernel, and one in words."""
    if few.finish is None:
        return {_KEY: f"expanded: {few.why_not}"}
    limits = ", ".join(str(sums.rows) for sums in few.sums)
    kernels = {f"{_SUMS}{sums.rows}": _written(sums.launch, slices=sums.slices) for sums in few.sums}
    return {_KEY: f"up to {limits} without expansion, one batch", **kernels, _FINISH: _written(few.finish)}


def split_config(flat: dict[str, Any], form: Format) -> FewRows:
    """Return what :func:`config` was made of, for operands of a format."""
    if _FINISH not in flat:
        return FewRows(why_not=flat[_KEY].removeprefix("expanded: "))
    limits = sorted(int(key.removeprefix(_SUMS)) for key in flat if key.startswith(_SUMS))
    kernels = tuple(_sums_of(form, rows, _read(flat[f"{_SUMS}{rows}"])) for rows in limits)
    return FewRows(kernels, Launch(**_read(flat[_FINISH])))


_KEY, _SUMS, _FINISH = "few_rows", "few_rows_up_to_", "few_rows_finish"

_LEAST_DEPTH = 256
"""K with which sums take no more memory than expanded weights: a class's workspace is large enough for fewer rows."""
_SMALL = (4096, 1024)
"""N and K of the largest weights that are read too quickly for launches to differ: all are launched as these are."""
_HOPPER_ROWS = (16, 32, 64)
_SMALL_ROWS = (16, 32)
_TILES = ((64, 128), (64, 256), (128, 64), (128, 128), (128, 256))


def _hopper_sums(form: Format, rows: int, n: int, k: int, multiprocessors: int) -> Sums:
    problem = _hopper_problem(form, rows)
    launch = scaled_few_rows.choose(problem, n, k, multiprocessors, finished=True)
    return Sums(problem, launch, launch.slices)


def _small_sums(form: Format, rows: int, n: int, k: int, arch: str, multiprocessors: int) -> Sums:
    problem = _small_problem(form, rows)
    launch = small_m.choose(problem, arch)
    return Sums(problem, launch, small_m.slices(problem, launch, n, k, multiprocessors))


def _hopper_problem(form: Format, rows: int) -> HopperProblem:
    return HopperProblem(*form, tokens=rows, out_dtype="float32")


def _small_problem(form: Format, rows: int) -> SmallProblem:
    return SmallProblem(*form, form[0], rows, "float32")


def _sums_of(form: Format, rows: int, numbers: dict[str, int]) -> Sums:
    if form in scaled_few_rows.FORMATS:
        return Sums(_hopper_problem(form, rows), HopperLaunch(**numbers), numbers["slices"])
    slices = numbers.pop("slices")
    return Sums(_small_problem(form, rows), SmallLaunch(**numbers), slices)


def _written(launch: Launch | HopperLaunch | SmallLaunch, **more: int) -> str:
    return " ".join(f"{name} {value:d}" for name, value in (asdict(launch) | more).items())


def _read(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", text)}
