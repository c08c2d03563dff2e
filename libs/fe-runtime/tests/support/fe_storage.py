"""``scale_blocks``: an operation whose arrays come in every form of storage that a declaration knows.

``y = x * scale * gain * factor``, one e8m0 scale for 32 columns of x. Results: y, rows or columns contiguous; the
scales again, as a view; the largest ``|y|`` and the sums over the columns, which a kernel accumulates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fe_runtime import formats
from fe_runtime.api_base import APIBase
from fe_runtime.compile import KernelSpec
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, pitched
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

NAME = "scale_blocks"
ROWS_INSIDE, COLUMNS_INSIDE = (1, 0), (0, 1)
EITHER = pitched("either", "have rows or columns of stride 1", "Copy it.", COLUMNS_INSIDE, ROWS_INSIDE)
ORDERS = {"columns": COLUMNS_INSIDE, "rows": ROWS_INSIDE}
LAYOUTS = {name: pitched(name, f"have {name} inside", "Copy it.", order) for name, order in ORDERS.items()}
VIEW = (1, 2, 0)


def scale_blocks(
    x: Any, scale: Any, factor: Any = None, *, gain: float = 1.0, inside: str = "columns", dtype: Any = "float32"
) -> TupleDict:
    return OPERATION((x, scale, factor), {"gain": gain, "inside": inside, "dtype": dtype})


class ScaleBlocks(APIBase):
    def __init__(self, x: Any, scale: Any, factor: Any, *outputs: Any, **options: Any) -> None:
        super().__init__(OPERATION, (x, scale, factor), outputs, options)

    def execute(self, x: Any, scale: Any, factor: Any, *outputs: Any, gain: float = 1.0, stream: Any = None) -> None:
        self._execute((x, scale, factor), outputs, stream, {"gain": gain})


def reference(x: Any, scale: Any, factor: Any, *, gain: float, inside: str, dtype: str) -> tuple[Any, ...]:
    """The result in whatever strides it has; the scales in their canonical form."""
    del inside
    is_torch = type(x).__module__.startswith("torch")
    packed = str(x.dtype) in ("uint8", "torch.uint8", "torch.float4_e2m1fn_x2")
    values = formats.decode(formats.unpack_fp4(x) if packed else x, "float4_e2m1fn" if packed else None)
    tiles = scale.shape[0]
    assert scale.shape == (tiles, x.shape[0], 1)  # the canonical form, whatever the caller passed
    factors = formats.decode(formats.byte_view(scale), "float8_e8m0fnu")
    spread = factors.permute(1, 0, 2) if is_torch else factors.transpose(1, 0, 2)
    parts = [spread[:, n, :] * values[:, 32 * n : 32 * (n + 1)] for n in range(tiles)]
    y = _library(x).concatenate(parts, 1) * gain
    if factor is not None:
        y = y * factor[0]
    peak = abs(y).max().reshape(1) if 0 not in y.shape else y.sum().reshape(1) - np.inf
    stored = formats.cast(y, "float4_e2m1fn") if dtype in ("uint8", "float4_e2m1fn_x2") else y
    if stored is not y:
        stored = formats.typed_view(formats.pack_fp4(stored), dtype)
    scales = formats.typed_view(formats.byte_view(scale), "float8_e8m0fnu")
    return stored, scales, peak, y.sum(1)


def _library(x: Any) -> Any:
    if type(x).__module__.startswith("torch"):
        import torch

        return torch
    return np if isinstance(x, np.ndarray) else __import__("jax").numpy


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    spec = KernelSpec.of(f"fe_storage.{NAME}", "fe_storage:build", target.arch, dtype=bound.arrays["x"].dtype)
    x = bound.arrays["x"]
    width = x.shape[1] // 2 if x.dtype == "float4_e2m1fn" else x.shape[1]
    inputs = ((x.shape[0], width), (bound.dim("T") * x.shape[0],), (1,) if bound.has("factor") else None)
    outputs = tuple(spec.shape for spec in bound.outputs if spec is not None)
    return Kernel(spec, Form(inputs, (outputs[0], (bound.dim("T") * x.shape[0],), *outputs[2:]), ("gain",)))


def _y(bound: Bound) -> OutputSpec:
    dtype, inside = str(bound.options["dtype"]), str(bound.options["inside"])
    columns = bound.dim("C") // 2 if dtype in ("uint8", "float4_e2m1fn_x2") else bound.dim("C")
    shape = (bound.dim("R"), columns)
    return OutputSpec(shape, dtype, ORDERS[inside], layout=LAYOUTS[inside], alignment=16, pairs=1)


CONTRACT = Contract(
    NAME,
    inputs=(
        Input("x", "R C", ("float32", "float4_e2m1fn"), EITHER, pairs=1, alignment=16),
        Input(
            "scale",
            "T R 1",
            ("float8_e8m0fnu",),
            view=VIEW,
            dtype_aliases={"uint8": "float8_e8m0fnu", "int8": "float8_e8m0fnu"},
            alignment=16,
        ),
        Input("factor", "1", ("float32",), also=("1 1*",), optional=True),
    ),
    options=(
        Option("gain", float, 1.0, runtime=True),
        Option("inside", str, "columns", choices=("columns", "rows")),
        Option("dtype", "dtype", "float32", choices=("float32", "float4_e2m1fn_x2", "uint8")),
    ),
    outputs=(
        Output("y", _y),
        Output(
            "scales",
            lambda bound: OutputSpec(
                (bound.dim("T"), bound.dim("R"), 1), "float8_e8m0fnu", view=VIEW, byte_aliases=("uint8",)
            ),
        ),
        Output("peak", lambda bound: OutputSpec((1,), "float32", accumulate="max", any_units=True)),
        Output("total", lambda bound: OutputSpec((bound.dim("R"),), "float32", accumulate="add")),
    ),
    dynamic=("R",),
    derived={"T": lambda bound: -(-bound.dim("C") // 32)},
)

OPERATION = Operation("fe_storage", CONTRACT, reference, find_kernel, jax_entry="fe_storage.scale_blocks_jax")
