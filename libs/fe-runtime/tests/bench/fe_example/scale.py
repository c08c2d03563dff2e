"""The operation, its wrapper and its class."""

from __future__ import annotations

from typing import Any

from fe_runtime.api_base import APIBase
from fe_runtime.compile import KernelSpec
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec
from fe_runtime.operation import Operation
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.tuple_dict import TupleDict

FLOATS = ("float32", "bfloat16")


def _find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    columns = bound.dim("C")
    if columns % 8:
        return NoKernel("C is no multiple of 8", "Pad the columns.")
    spec = KernelSpec.of("fe_example.scale", "fe_example.kernels:build", target.arch, columns=columns)
    shape = (bound.rows, columns)
    return Kernel(spec, Form((shape,), (shape,), ("factor",)))


OPERATION = Operation(
    library="fe_example",
    contract=Contract(
        operation="scale",
        inputs=(Input("x_tensor", "... C", FLOATS),),
        options=(Option("factor", float, 2.0, runtime=True),),
        outputs=(Output("o_tensor", lambda b: OutputSpec((*b.batch, b.dim("C")), b.arrays["x_tensor"].dtype)),),
    ),
    reference=lambda x, factor: ((x * factor).astype(x.dtype) if hasattr(x, "astype") else x * factor,),
    find_kernel=_find_kernel,
)

IN_PLACE = Operation(
    library="fe_example",
    contract=Contract(
        operation="scale_in_place",
        inputs=(Input("x_tensor", "... C", FLOATS, mutated=True),),
        options=OPERATION.contract.options,
        outputs=(),
    ),
    reference=lambda x, factor: (x * factor,),
    find_kernel=lambda bound, target: NoKernel("there is none", "Write one."),
)


def scale_wrapper(x_tensor: Any, factor: float = 2.0) -> TupleDict:
    return OPERATION((x_tensor,), {"factor": factor})


class Scale(APIBase):
    def __init__(self, sample_x: Any, sample_o: Any, factor: float = 2.0) -> None:
        super().__init__(OPERATION, (sample_x,), (sample_o,), {"factor": factor})

    def execute(self, x_tensor: Any, o_tensor: Any, current_stream: Any = None) -> None:
        self._execute((x_tensor,), (o_tensor,), current_stream)
