"""Its declaration for the ``fe`` command."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fe_runtime.bench.accuracy import allowed_in_dtype
from fe_runtime.bench.workload import Arrays, Case, Expected, Operands, Peer, Source, Workload


def case(rows: int, columns: int, dtype: str = "float32", **options: object) -> Case:
    return Case({"T": rows, "C": columns}, dtype, options)


def _operands(this: Case) -> Operands:
    return {"x_tensor": (tuple(this.dims.values()), this.dtype)}


def _inputs(this: Case, source: Source) -> Arrays:
    return {"x_tensor": source.activations(*_operands(this)["x_tensor"])}


def _expected(this: Case, inputs: Arrays) -> Expected:
    values = inputs["x_tensor"].astype(np.float64) * float(str(this.options.get("factor", 2.0)))
    return Expected(values, allowed_in_dtype(values, this.dtype, 2.0**-24 * np.abs(values)))


def _make_class(inputs: Arrays, outputs: Arrays, options: Any) -> Any:
    api = importlib.import_module("fe_example.scale").Scale
    return api(inputs["x_tensor"], outputs["o_tensor"], **options)


def _absent(_case: Case) -> Any:
    return importlib.import_module("a_library_that_nobody_has")


SCALE = Workload(
    operation="fe_example.scale:OPERATION",
    wrapper="fe_example.scale:scale_wrapper",
    summary="factor * x",
    dims=("T", "C"),
    operands=_operands,
    inputs=_inputs,
    expected=_expected,
    decode=lambda _case, outputs: outputs["o_tensor"],
    plain={"numpy": lambda _case, inputs: inputs["x_tensor"] + inputs["x_tensor"]},
    make_class=_make_class,
    demo=(case(3, 16), case(5, 8, "bfloat16", factor=3.0)),
    bench=(case(4096, 4096, "bfloat16"),),
    host=case(2, 8),
    presets={"default": (case(4, 64), case(400, 64), case(4, 128)), "odd": (case(4, 7), case(4, 256))},
    peers=(
        Peer("absent", "the same", _absent),
        Peer("twice", "the same", lambda _case: lambda arrays: arrays["x_tensor"] * 2.0),
        Peer("nothing", "nothing", lambda _case: lambda arrays: arrays["x_tensor"], same_work=False),
    ),
)

WORKLOADS = (SCALE,)
