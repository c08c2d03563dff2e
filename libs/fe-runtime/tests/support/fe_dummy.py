"""``scale_rows``: an operation with one of everything that a contract can declare, for the tests of the centre.

``y = x * weight * scale (+ bias)`` per row in blocks of ``group`` channels, and the sum of ``y`` over all rows.
The kernel is a name only: the tests put a stand-in where kernels are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fe_runtime.api_base import APIBase
from fe_runtime.compile import KernelSpec
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec, Rule, merged_strides
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Form, Kernel, NoKernel, Plan, Target
from fe_runtime.tuple_dict import TupleDict

LIBRARY = "fe_dummy"
NAME = "scale_rows"


def scale_rows(
    x: Any,
    weight: Any,
    bias: Any = None,
    mixer: Any = None,
    *,
    scale: float = 1.0,
    group: int | None = None,
    total: bool = True,
    mode: str = "plain",
    out_dtype: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> TupleDict:
    options = {"scale": scale, "group": group, "total": total, "mode": mode, "out_dtype": out_dtype}
    return OPERATION((x, weight, bias, mixer), options, stream=stream, backend=backend)


class ScaleRows(APIBase):
    def __init__(
        self,
        sample_x: Any,
        sample_weight: Any,
        sample_y: Any,
        sample_total: Any = None,
        sample_bias: Any = None,
        *,
        scale: float = 1.0,
        group: int | None = None,
        total: bool = True,
        out_dtype: Any = None,
        backend: str = "auto",
    ) -> None:
        options = {"scale": scale, "group": group, "total": total, "out_dtype": out_dtype}
        inputs = (sample_x, sample_weight, sample_bias, None)
        super().__init__(OPERATION, inputs, (sample_y, sample_total), options, backend)
        self.group = group

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        self.group = bound.options["group"]  # type: ignore[assignment]

    def execute(
        self, x: Any, weight: Any, y: Any, total: Any = None, bias: Any = None, current_stream: Any = None
    ) -> None:
        self._execute((x, weight, bias, None), (y, total), current_stream)


def reference(
    x: Any, weight: Any, bias: Any, mixer: Any, *, scale: float, group: int, total: bool, mode: str, out_dtype: str
) -> tuple[Any, Any]:
    from fe_runtime.dtypes import framework_dtype

    del mixer, group, mode
    if type(x).__module__.startswith("torch"):
        import torch

        y = x.to(torch.float32) * weight.to(torch.float32) * scale
        y = y if bias is None else y + bias.to(torch.float32)
        rows: Any = y.reshape(-1, y.shape[-1]).sum(0) if total else None
        return y.to(framework_dtype(out_dtype, "torch")), rows  # type: ignore[call-overload]
    z = x.astype(np.float32) * weight.astype(np.float32) * np.float32(scale)
    z = z if bias is None else z + bias.astype(np.float32)
    summed = z.reshape(math.prod(z.shape[:-1]), z.shape[-1]).sum(0) if total else None
    return z.astype(framework_dtype(out_dtype, "numpy")), summed


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    if target.capability < (8, 0):
        return NoKernel("the GPU is older than compute capability 8.0", "Use a newer GPU.", ((8, 0), (9, 0)))
    if bound.options["mode"] == "exotic":
        return NoKernel("mode 'exotic' has no kernel", "Use mode='plain'.")
    x = bound.arrays["x"]
    merged = merged_strides(x.shape, x.stride)
    channels = bound.dim("C")
    spec = KernelSpec.of(
        f"{LIBRARY}.{NAME}",
        "fe_dummy:build",
        target.arch,
        dtype=x.dtype,
        channels=channels,
        bias=bound.has("bias"),
        total=bool(bound.options["total"]),
        out=str(bound.options["out_dtype"]),
        aligned=min(bound.alignments.values()),
    )
    rows = (bound.rows, channels)
    inputs = (rows, (channels,), (channels,) if bound.has("bias") else None, None)
    outputs = (rows, (channels,) if bound.options["total"] else None)
    return Kernel(spec, Form(inputs, outputs, ("scale",)), () if merged is not None else ("x",))


def _y(bound: Bound) -> OutputSpec:
    return OutputSpec((*bound.batch, bound.dim("C")), str(bound.options["out_dtype"]))


def _total(bound: Bound) -> OutputSpec | None:
    return OutputSpec((bound.dim("C"),), "float32") if bound.options["total"] else None


def _indivisible(call: Mapping[str, object]) -> Mapping[str, object]:
    channels = np.shape(call["weight"])[0]  # type: ignore[arg-type]
    return {**call, "group": channels + 1}


FLOATS = ("bfloat16", "float16", "float32")

CONTRACT = Contract(
    NAME,
    inputs=(
        Input("x", "... C", FLOATS, UNIT_INNER, doc="activations"),
        Input("weight", "C", (*FLOATS, "float64"), also=("C 1", "1 C"), doc="factors"),
        Input("bias", "C", FLOATS, optional=True, dtype_of="x", doc="one summand per channel"),
        Input("mixer", "C C 2", ("int32",), optional=True, doc="takes part in the checks only"),
    ),
    outputs=(Output("y", _y, "scaled rows"), Output("total", _total, "sum of `y` over all rows")),
    options=(
        Option(
            "scale",
            float,
            1.0,
            holds=lambda scale: 0 < float(scale) < math.inf,  # type: ignore[arg-type]
            rule="be a finite number > 0",
            invalid=(0.0, -1.0, math.inf, math.nan),
            runtime=True,
            doc="common factor",
        ),
        Option(
            "group",
            int,
            None,
            holds=lambda group: int(group) > 0,  # type: ignore[call-overload]
            rule="be a number of channels > 0",
            invalid=(0, -4),
            resolve=lambda bound: bound.dim("C"),
            doc="channels per block; all by default",
        ),
        Option("total", bool, True, doc="whether to return the sum"),
        Option("mode", str, "plain", choices=("plain", "exotic")),
        Option(
            "out_dtype",
            "dtype",
            None,
            choices=FLOATS,
            aliases={"half": "float16"},
            resolve=lambda bound: bound.dtype("x"),
            doc="dtype of `y`; that of `x` by default",
        ),
    ),
    rules=(
        Rule(
            "group",
            "divide C",
            holds=lambda bound: bound.dim("C") % int(bound.options["group"]) == 0,  # type: ignore[call-overload]
            given=lambda bound: f"group = {bound.options['group']}, C = {bound.dim('C')}",
            fix="Leave it out.",
            violation=_indivisible,
        ),
    ),
)

OPERATION = Operation(LIBRARY, CONTRACT, reference, find_kernel, jax_entry="fe_dummy.scale_rows_jax")


class StandInLoader:
    """Stands where compiled kernels are loaded: counts, and returns a function that computes with torch or numpy."""

    def __init__(self) -> None:
        self.requests: list[KernelSpec] = []
        self.launches: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    @property
    def compiled(self) -> set[KernelSpec]:
        return set(self.requests)

    def __call__(self, spec: KernelSpec) -> Any:
        self.requests.append(spec)
        if self.error is not None:
            raise self.error
        return lambda *operands: self._launch(dict(spec.config), operands)

    def _launch(self, config: dict[str, Any], operands: tuple[Any, ...]) -> None:
        self.launches.append(operands)
        remaining = list(operands)
        x, weight = remaining.pop(0), remaining.pop(0)
        bias = remaining.pop(0) if config["bias"] else None
        y = remaining.pop(0)
        total = remaining.pop(0) if config["total"] else None
        (scale,) = remaining
        options = {"group": 0, "mode": "", "total": config["total"], "out_dtype": config["out"]}
        result = reference(x, weight, bias, None, scale=scale, **options)
        y[...] = result[0]
        if total is not None:
            total[...] = result[1]


class OnPretendedGpu:
    """``Operation.plan`` for a machine on which every array lies on a GPU."""

    def __init__(self, plan: Any, target: Target = HOPPER) -> None:
        self.plan, self.target = plan, target

    def __call__(self, operation: Operation, bound: Bound, backend: str = "auto", target: Target | None = None) -> Plan:
        chosen: Plan = self.plan(operation, bound, backend, self.target if backend != "reference" else target)
        return chosen
