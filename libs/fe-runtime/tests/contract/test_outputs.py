"""Output arrays that the caller allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fe_dummy import CONTRACT

from fe_runtime.contract import Contract, Input, Output, OutputSpec, bind, check_outputs
from fe_runtime.errors import DtypeError, InvalidArgumentError, NotSupportedError
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import guarded

X, W = np.ones((2, 3, 8), np.float32), np.ones(8, np.float32)
Y, TOTAL = np.empty((2, 3, 8), np.float32), np.empty(8, np.float32)


def check(y: Any = Y, total: Any = TOTAL, **options: Any) -> Any:
    return check_outputs(CONTRACT, bind(CONTRACT, (X, W, None, None), options), (y, total))


def test_good_outputs_are_described() -> None:
    samples = check()
    assert [(s.desc.dtype, s.desc.shape, s.framework) for s in samples] == [
        ("float32", (2, 3, 8), "numpy"),
        ("float32", (8,), "numpy"),
    ]


def test_an_absent_output_is_none() -> None:
    bound = bind(CONTRACT, (X, W, None, None), {"total": False})
    assert check_outputs(CONTRACT, bound, (Y, None))[1] is None


def test_their_alignment_replaces_the_assumed_one() -> None:
    bound = bind(CONTRACT, (X, W, None, None), {})
    assert bound.alignments["y"] == 16
    check_outputs(CONTRACT, bound, (guarded((2, 3, 8), "float32", alignment=4).array, TOTAL))
    assert (bound.alignments["y"], bound.alignments["total"]) == (4, 16)


def test_descriptors_may_stand_for_outputs() -> None:
    assert check(TensorDesc.of("float32", (2, 3, 8)))[0].framework == "descriptor"


def test_arrays_fit_described_inputs() -> None:
    inputs = (TensorDesc.of("float32", (2, 3, 8)), TensorDesc.of("float32", (8,)), None, None)
    assert check_outputs(CONTRACT, bind(CONTRACT, inputs, {}), (Y, TOTAL))[0].framework == "numpy"


@pytest.mark.parametrize(
    ("y", "text"),
    [
        (None, "y must be an array of shape (2, 3, 8) and dtype float32; got None. Allocate it and pass it."),
        (Y[:, :, :7], "y must have shape (2, 3, 8); got shape (2, 3, 7). Allocate it so."),
        (Y.reshape(6, 8), "y must have shape (2, 3, 8); got shape (6, 8). Allocate it so."),
        (
            np.empty((2, 3, 16), np.float32)[:, :, ::2],
            "y must be contiguous (row-major); got shape (2, 3, 8) with strides (48, 16, 2). Allocate it so.",
        ),
        (Y.astype(np.float64), "y must have dtype float32; got float64. Allocate it so."),
        (
            np.frombuffer(bytes(192), np.float32).reshape(2, 3, 8),
            "y must be writable; got a read-only array. Allocate it so.",
        ),
        (
            TensorDesc.of("float32", (2, 3, 8), device="cuda:0"),
            "y must be on the device of the inputs (cpu); got cuda:0. Allocate it so.",
        ),
    ],
    ids=["absent", "shape", "rank", "strides", "dtype", "read-only", "device"],
)
def test_wrong_outputs(y: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check(y)
    assert str(caught.value) == f"scale_rows: {text}"


def test_an_output_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="scale_rows: y must be an array"):
        check([0.0])


def test_an_output_of_another_framework() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        InvalidArgumentError, match=r"y must come from the framework of the inputs \(numpy\); got torch"
    ):
        check(torch.empty(2, 3, 8))


def test_an_output_that_these_options_do_not_produce() -> None:
    bound = bind(CONTRACT, (X, W, None, None), {"total": False})
    with pytest.raises(InvalidArgumentError, match="total must be None: these options produce no such output"):
        check_outputs(CONTRACT, bound, (Y, TOTAL))


PACKED = Contract(
    "pack",
    (Input("x", "M C", ("float32",)),),
    (Output("q", lambda b: OutputSpec((b.dim("M"), 4), "float4_e2m1fn_x2")),),
)


def test_packed_fp4_in_a_byte_container_or_in_its_own_dtype() -> None:
    torch = pytest.importorskip("torch")
    bound = bind(PACKED, (np.ones((2, 8), np.float32),), {})
    check_outputs(PACKED, bound, (np.empty((2, 4), np.uint8),))
    with pytest.raises(InvalidArgumentError, match=r"q must have shape \(2, 4\); got shape \(2, 8\)"):
        check_outputs(PACKED, bound, (np.empty((2, 8), np.uint8),))
    bound = bind(PACKED, (torch.ones(2, 8),), {})
    check_outputs(PACKED, bound, (torch.empty(2, 4, dtype=torch.float4_e2m1fn_x2),))
    check_outputs(PACKED, bound, (torch.empty(2, 4, dtype=torch.uint8),))
    with pytest.raises(InvalidArgumentError, match="q must have dtype float4_e2m1fn_x2; got int8"):
        check_outputs(PACKED, bound, (torch.empty(2, 4, dtype=torch.int8),))


def test_errors_of_the_classes_that_the_contract_names() -> None:
    contract = Contract(
        "op",
        inputs=(Input("x", "N M", ("float32",)),),
        outputs=(Output("y", lambda bound: OutputSpec((bound.dim("N"), bound.dim("M")), "float32")),),
        errors={"layout": NotSupportedError, "dtype": DtypeError},
    )
    bound = bind(contract, (np.zeros((2, 3), np.float32),), {})
    for y, error in (
        (np.zeros((3, 2), np.float32).T, NotSupportedError),
        (np.zeros((2, 3), np.float64), DtypeError),
        (np.zeros((3, 2), np.float32), InvalidArgumentError),
    ):
        with pytest.raises(error, match="op: y must"):
            check_outputs(contract, bound, (y,))
