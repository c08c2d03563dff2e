"""What is static about a dense operation's kernel: the product, its launches, how its operands are brought to it, what
serves few rows of them, and the order of its arguments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from . import convert as launch_convert
from . import expand as launch_expand
from . import few_rows, launches
from .few_rows import FewRows
from .launches import Launches
from .problem import Problem

__all__ = ["Dense", "Operands", "config", "split_config"]


@dataclass(frozen=True, slots=True)
class Operands:
    """How A and B are brought to the core.

    Parameters
    ----------
    way
        ``"direct"``: the core takes them as they are. Otherwise each goes to a bf16 workspace first, of the same major:
        ``"blocks"``: codes times their scales; ``"values"``: FP8 values without scales; ``"split"``: float32 values as
        parts side by side along K.
    element
        Canonical dtype of what is brought to a workspace.
    scale, vec
        Of ``"blocks"``: the rest of the format (:data:`fe_gemm.planning.expand.FORMATS`).
    """

    way: str = "direct"
    element: str | None = None
    scale: str | None = None
    vec: int = 0

    @property
    def parts(self) -> int:
        """How many times as deep as K the product of the core is."""
        return len(launch_convert.PARTS["a"]) if self.way == "split" else 1

    @property
    def form(self) -> tuple[str, str, int] | None:
        """Format of block-scaled operands; ``None`` for others."""
        return None if self.element is None or self.scale is None else (self.element, self.scale, self.vec)

    def workspace(self, name: str, major: str) -> launch_expand.Problem | launch_convert.Problem | None:
        """Return what is done to ``"a"`` or ``"b"``, if anything; ``major``: ``"k"`` where rows are contiguous."""
        major = "k" if major == "k" else "m"
        if self.element is None:
            return None
        if self.scale is None:
            return launch_convert.Problem(self.element, major, name)
        return launch_expand.Problem(self.element, self.scale, self.vec, major)


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense operation.

    Parameters
    ----------
    problem
        The product that the core computes, of operands in workspaces where there are some.
    launches
        How the core is launched.
    multiprocessors
        Of the GPU.
    arguments
        Names of the kernel's arguments, in order: ``a``, ``b``, for block-scaled operands ``sfa`` and ``sfb``, the
        workspaces ``a_values`` and ``b_values`` where there are some, ``sums`` where few rows need them, and what the
        epilogue names; ``old_amax`` and ``old_dprob`` are what the results of these names hold so far.
    operands
        How A and B are brought to the core.
    few_rows
        What serves few rows of A, past the core: of block-scaled operands.
    """

    problem: Problem
    launches: Launches
    multiprocessors: int
    arguments: tuple[str, ...]
    operands: Operands = Operands()
    few_rows: FewRows = field(default_factory=FewRows)

    @property
    def workspaces(self) -> dict[str, launch_expand.Problem | launch_convert.Problem]:
        """What is done to the operands that go to a workspace, by name."""
        majors = {"a": self.problem.a_major, "b": self.problem.b_major}
        found = {name: self.operands.workspace(name, major) for name, major in majors.items()}
        return {name: how for name, how in found.items() if how is not None}

    def scratch(self, m: int, n: int, k: int, batches: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the workspaces of a call, in the order and by the names of the arguments.

        Whatever the extents are, all are there; those that a call has no use for are as small as can be.
        """
        few, finish = self.few_rows.of(m, batches), self.few_rows.finish
        launch = self.launches.many if few is None or finish is None else finish
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, how in self.workspaces.items():
            rows = m if name == "a" else n
            shape = _NOTHING if few is not None else _workspace_shape(how, rows, k, batches)
            found[f"{name}_values"] = shape, "bfloat16"
        if finish is not None:
            shape = _NOTHING if few is None else (few.slices * m, -(-n // _STEP) * _STEP)
            found["sums"] = shape, "float32"
        for name in self.problem.scratch:
            found[name] = (-(-n // launch.group_columns), batches, m), "float32"
        return found


def config(dense: Dense) -> dict[str, str | int | bool | None]:
    """Return the flat configuration of a kernel, as :meth:`fe_runtime.compile.KernelSpec.of` takes it."""
    own = {"arguments": " ".join(dense.arguments), "multiprocessors": dense.multiprocessors}
    few = {} if dense.operands.form is None else few_rows.config(dense.few_rows)
    return {**launches.config(dense.problem, dense.launches), **own, **asdict(dense.operands), **few}


def split_config(flat: dict[str, Any]) -> Dense:
    """Return what :func:`config` was made of."""
    problem, how = launches.split_config(flat)
    operands = Operands(**{part.name: flat[part.name] for part in fields(Operands)})
    few = FewRows() if operands.form is None else few_rows.split_config(flat, operands.form)
    return Dense(problem, how, flat["multiprocessors"], tuple(flat["arguments"].split()), operands, few)


_STEP = 8
"""Elements of which the lines of a workspace are multiples: 16 bytes and more."""
_NOTHING = (1, _STEP)


def _workspace_shape(
    how: launch_expand.Problem | launch_convert.Problem, rows: int, columns: int, batches: int
) -> tuple[int, int]:
    if isinstance(how, launch_convert.Problem):
        return launch_convert.workspace_shape(how, rows, columns, batches)
    return launch_expand.workspace_shape(how, rows, columns, batches)
