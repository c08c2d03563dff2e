"""``add_rows``: ``total += sum_k x[rows[k]]`` in place; returns the sum, or (``add_rows_silently``) nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from fe_runtime.api_base import APIBase
from fe_runtime.compile import KernelSpec
from fe_runtime.contract import Bound, Contract, Input, Output, OutputSpec
from fe_runtime.errors import DtypeError, InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.values import Read

PARTS = 2


def add_rows(total: Any, x: Any, rows: Any, *, stream: Any = None, backend: str = "auto") -> Any:
    return ADD_ROWS.outputs((total, x, rows), {}, stream=stream, backend=backend)[0]


def add_rows_silently(total: Any, x: Any, rows: Any, *, backend: str = "auto") -> Any:
    SILENT.outputs((total, x, rows), {}, backend=backend)
    return total


def add_rows_jax(total: Any, x: Any, rows: Any, *, backend: str = "auto") -> Any:
    from fe_runtime.jax.entry import entry

    added, new_total = entry(ADD_ROWS, (total, x, rows), {}, backend)
    return new_total, added


class AddRows(APIBase):
    def __init__(self, total: Any, x: Any, rows: Any, added: Any) -> None:
        super().__init__(ADD_ROWS, (total, x, rows), (added,), {})

    def execute(self, total: Any, x: Any, rows: Any, added: Any, current_stream: Any = None) -> None:
        self._execute((total, x, rows), (added,), current_stream)


class AddRowsSilently(APIBase):
    def __init__(self, total: Any, x: Any, rows: Any) -> None:
        super().__init__(SILENT, (total, x, rows), (), {})

    def execute(self, total: Any, x: Any, rows: Any, current_stream: Any = None) -> None:
        self._execute((total, x, rows), (), current_stream)


def reference(total: Any, x: Any, rows: Any) -> tuple[Any, Any]:
    xp = array_namespace(x)
    added = xp.sum(xp.take(x, rows, axis=0), axis=0)
    return added, total + added


def check_values(bound: Bound, read: Read) -> None:
    wrong = [int(row) for row in read("rows") if not 0 <= row < bound.dim("N")]
    if wrong:
        rule = f"name rows 0 to {bound.dim('N') - 1}"
        raise InvalidArgumentError(explain(bound.operation, "rows", rule, wrong, "Drop them."))


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    columns, silent = bound.dim("C"), not bound.outputs
    builder = "fe_toy.kernels.add_rows:build"
    spec = KernelSpec.of("fe_toy.add_rows", builder, target.arch, columns=columns, silent=silent)
    inputs = ((columns,), (bound.dim("N"), columns), (bound.dim("K"),))
    outputs = () if silent else ((columns,),)
    return Kernel(spec, Form(inputs, outputs, scratch=(((PARTS, columns), "float32"),), related=True))


CONTRACT = Contract(
    "add_rows",
    inputs=(
        Input("total", "C", ("float32",), mutated=True),
        Input("x", "N C", ("float32",)),
        Input("rows", "K", ("int32",)),
    ),
    outputs=(Output("added", lambda bound: OutputSpec((bound.dim("C"),), "float32")),),
    dynamic=("N", "K"),
    errors={"dtype": DtypeError},
)

ADD_ROWS = Operation(
    "fe_toy", CONTRACT, reference, find_kernel, check_values=check_values, jax_entry="fe_toy.add_rows_jax"
)

SILENT = Operation(
    "fe_toy",
    replace(CONTRACT, operation="add_rows_silently", outputs=()),
    lambda *arrays: reference(*arrays)[1:],
    find_kernel,
    jax_entry="fe_toy.add_rows_jax",
)


def expected(total: Any, x: Any, rows: Any) -> tuple[Any, Any]:
    """Return the new total and the sum, added one row after the other in float64."""
    added = np.zeros(np.shape(x)[1])
    for row in np.asarray(rows):
        added = added + np.asarray(x)[row]
    return np.asarray(total) + added, added
