"""``scale_clamp``: ``y = clip(x * scale + bias, -limit, limit)``, and on demand which elements were not clipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fe_runtime.api_base import APIBase
from fe_runtime.compile import KernelSpec
from fe_runtime.contract import UNIT_INNER, Bound, Contract, Input, Option, Output, OutputSpec, Rule, merged_strides
from fe_runtime.gradient import Gradient
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

from . import reference

FLOATS = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"


def scale_clamp(
    x: Any,
    bias: Any = None,
    scale: float = 1.0,
    *,
    limit: float = 1.0,
    mask: bool = False,
    out_dtype: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> TupleDict:
    options = {"scale": scale, "limit": limit, "mask": mask, "out_dtype": out_dtype}
    return OPERATION((x, bias), options, stream=stream, backend=backend)


def scale_clamp_jax(
    x: Any,
    bias: Any = None,
    *,
    scale: float = 1.0,
    limit: float = 1.0,
    mask: bool = False,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    from fe_runtime import jax as bridge

    options = {"scale": scale, "limit": limit, "mask": mask, "out_dtype": out_dtype}
    return bridge.entry(OPERATION, (x, bias), options, backend)


def scale_clamp_detached(x: Any, scale: float = 1.0) -> TupleDict:
    return DETACHED((x, None), {"scale": scale, "limit": 1.0, "mask": False, "out_dtype": None})


def scale_clamp_inference(x: Any, scale: float = 1.0) -> TupleDict:
    return INFERENCE((x, None), {"scale": scale, "limit": 1.0, "mask": False, "out_dtype": None})


class ScaleClamp(APIBase):
    def __init__(
        self, x: Any, bias: Any, y: Any, kept: Any = None, *, scale: float = 1.0, backend: str = "auto"
    ) -> None:
        options = {"scale": scale, "limit": 1.0, "mask": kept is not None, "out_dtype": None}
        super().__init__(OPERATION, (x, bias), (y, kept), options)

    def execute(self, x: Any, bias: Any, y: Any, kept: Any = None, current_stream: Any = None) -> None:
        self._execute((x, bias), (y, kept), current_stream)


def _y(bound: Bound) -> OutputSpec:
    return OutputSpec((*bound.batch, bound.dim("C")), str(bound.options["out_dtype"]))


def _kept(bound: Bound) -> OutputSpec | None:
    return OutputSpec((*bound.batch, bound.dim("C")), "uint8") if bound.options["mask"] else None


_LIMIT = Option(
    "limit",
    float,
    1.0,
    holds=lambda value: isinstance(value, float) and value > 0,
    rule="be positive",
    runtime=True,
)
_SCALE = Option("scale", float, 1.0, runtime=True)

CONTRACT = Contract(
    "scale_clamp",
    inputs=(
        Input("x", "... C", FLOATS, UNIT_INNER),
        Input("bias", "C", FLOATS, also=("1 C",), optional=True, dtype_of="x"),
    ),
    options=(
        _SCALE,
        _LIMIT,
        Option("mask", bool, False),
        Option("out_dtype", "dtype", choices=(*FLOATS, FP8), resolve=lambda bound: bound.dtype("x")),
    ),
    outputs=(Output("y", _y), Output("kept", _kept)),
    rules=(
        Rule(
            "x",
            "have an even number of columns",
            holds=lambda bound: bound.dim("C") % 2 == 0,
            given=lambda bound: f"C = {bound.dim('C')}",
            fix="Pad it.",
        ),
    ),
)

BACKWARD_CONTRACT = Contract(
    "scale_clamp_backward",
    inputs=(
        Input("dy", "... C", FLOATS),
        Input("x", "... C", FLOATS, UNIT_INNER),
        Input("bias", "C", FLOATS, also=("1 C",), optional=True, dtype_of="x"),
    ),
    options=(_SCALE, _LIMIT),
    outputs=(
        Output("dx", lambda bound: OutputSpec((*bound.batch, bound.dim("C")), bound.arrays["x"].dtype)),
        Output("dbias", lambda b: OutputSpec((b.dim("C"),), b.arrays["bias"].dtype) if b.has("bias") else None),
    ),
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    x = bound.arrays["x"]
    rows = merged_strides(x.shape, x.stride)
    if bound.options["mask"]:
        return NoKernel("the toy kernel writes no mask", "Leave the mask out.")
    if bound.dim("C") % 4:
        return NoKernel("the toy kernel wants a multiple of 4 columns", "Pad it.")
    dtype = x.dtype
    spec = KernelSpec.of(
        "fe_toy.scale_clamp",
        "fe_toy.kernels.scale_clamp:build",
        target.arch,
        dtype=dtype,
        out_dtype=str(bound.options["out_dtype"]),
        columns=bound.dim("C"),
        bias=bound.has("bias"),
    )
    shape = (bound.rows, bound.dim("C"))
    bias = (bound.dim("C"),) if bound.has("bias") else None
    form = Form((shape, bias), (shape, None), ("scale", "limit"))
    return Kernel(spec, form, copies=() if rows is not None else ("x",))


def no_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    return NoKernel("there is none", "Write one.")


BACKWARD = Operation("fe_toy", BACKWARD_CONTRACT, reference.backward, no_kernel)

OPERATION = Operation(
    "fe_toy",
    CONTRACT,
    reference.forward,
    find_kernel,
    gradient=Gradient(BACKWARD, residuals=("x", "bias"), wrt=("x", "bias"), outputs=("y",), options=("scale", "limit")),
    jax_entry="scale_clamp_jax",
)

DETACHED = Operation("fe_toy", replace(CONTRACT, operation="scale_clamp_detached"), reference.forward, find_kernel)

INFERENCE = Operation(
    "fe_toy",
    replace(CONTRACT, operation="scale_clamp_inference"),
    reference.forward,
    find_kernel,
    inference_only=True,
)
