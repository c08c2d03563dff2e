"""The front door of ``hstu_lmsd_backward`` on the CPU: contract, frameworks, class with its workspaces, plan."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from fe_attention import HSTULMSDBwd, compat, hstu_lmsd_backward, hstu_lmsd_backward_jax, hstu_lmsd_forward
from fe_attention.hstu.lmsd_backward import BACKWARD
from fe_attention.hstu.lmsd_contract import BACKWARD_CONTRACT
from fe_attention.reference.lmsd import hstu_lmsd_backward as reference
from fe_runtime import NotCompiledError, TensorDesc
from fe_runtime.plan import Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

BF16 = ml_dtypes.bfloat16
FLAGS = {"apply_u_silu": True, "concat_u": True, "concat_x": True}
OPTIONS: dict[str, Any] = {"dropout_ratio": 0.3, **FLAGS}
NAMES = ["dx_tensor", "du_tensor", "dweight_tensor", "dbias_tensor"]
R = 528
"""Rows of a workspace for D = 32 on an H200."""


def example(framework: str = "numpy", rows: int = 6, columns: int = 32, **options: Any) -> Call:
    """dy, what the forward was given, and what it returned."""
    rng = np.random.default_rng(0)
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    given = [rng.standard_normal(shape).astype(BF16) for shape in shapes]
    known = {**OPTIONS, **options}
    y, *saved = hstu_lmsd_forward(*given, seed=5, **known)
    arrays = [rng.standard_normal(y.shape).astype(BF16), *given, *saved]
    return Call(tuple(None if array is None else to_framework(array, framework) for array in arrays), known)


def run(arrays: Any, options: Any) -> Any:
    return hstu_lmsd_backward(*arrays, **options)


def run_operation(arrays: Any, options: Any) -> Any:
    """Without the function, which has another error for options that are ``None``."""
    return BACKWARD(arrays, options)


def outputs_of(framework: str, rows: int = 6, columns: int = 32) -> list[Any]:
    return [to_framework(np.zeros(s, BF16), framework) for s in ((rows, columns),) * 2 + ((columns,),) * 2]


def workspaces(framework: str = "numpy", rows: int = R, columns: int = 32) -> list[Any]:
    return [to_framework(np.zeros((rows, columns), np.float32), framework) for _ in range(2)]


@pytest.mark.parametrize("call", invalid_calls(BACKWARD_CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run_operation, "hstu_lmsd_backward", call)


# --- one test for each row of the contract's tables ----------------------------------------------------------------


def rejected(match: str, arrays: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=f"hstu_lmsd_backward: {match}"):
        hstu_lmsd_backward(*arrays, **{**OPTIONS, **options})


def replaced(number: int, array: Any) -> list[Any]:
    arrays = list(example().arrays)
    arrays[number] = array
    return arrays


@pytest.mark.parametrize("names", [["dropout_ratio"], ["concat_u", "concat_x"], list(OPTIONS)])
def test_options_must_be_given(names: list[str]) -> None:
    rejected(", ".join(names) + " must be given", example().arrays, **dict.fromkeys(names))
    with pytest.raises(ValueError, match="dropout_ratio, apply_u_silu, concat_u, concat_x must be given"):
        hstu_lmsd_backward(*example().arrays)


def test_columns_of_dy_follow_from_the_flags() -> None:
    for concat_u, concat_x in ((False, True), (True, False), (False, False)):
        rejected("dy_tensor must have shape", example().arrays, concat_u=concat_u, concat_x=concat_x)


def test_dy_may_be_padded() -> None:
    dy, *others = example().arrays
    wide = np.full((6, 128), np.nan, BF16)
    wide[:, 16:112] = dy
    want = hstu_lmsd_backward(dy, *others, **OPTIONS)
    for got, exact in zip(hstu_lmsd_backward(wide[:, 16:112], *others, **OPTIONS), want, strict=True):
        np.testing.assert_array_equal(got, exact)
    rejected("dy_tensor must have strides of multiples", [np.zeros((6, 100), BF16)[:, :96], *others])


def test_mask_is_given_if_and_only_if_there_is_dropout() -> None:
    rejected("mask_tensor must be given if, and only if", replaced(7, None))
    rejected("mask_tensor must be given if, and only if", example().arrays, dropout_ratio=0.0)
    rejected("mask_tensor must be given if, and only if", example().arrays, dropout_ratio=1e-60)
    assert hstu_lmsd_backward(*replaced(7, None), **{**OPTIONS, "dropout_ratio": 0.0})["dx_tensor"].shape == (6, 32)


def test_dtypes_of_mean_rstd_and_mask() -> None:
    for number, name, dtype in ((5, "mean", "float32"), (6, "rstd", "float32"), (7, "mask", "int8")):
        array = example().arrays[number]
        assert array is not None
        rejected(f"{name}_tensor must have dtype {dtype}", replaced(number, array.astype(np.int32)))


def test_dweight_that_is_not_wanted() -> None:
    arrays = example().arrays
    assert hstu_lmsd_backward(*arrays, **OPTIONS, compute_dweight=False)["dweight_tensor"] is None
    rejected("dweight_tensor must be None", arrays, dweight_tensor=np.zeros(32, BF16), compute_dweight=False)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_results_go_where_the_caller_says(framework: str) -> None:
    arrays = example(framework).arrays
    want = hstu_lmsd_backward(*arrays, **OPTIONS)
    buffer = to_framework(np.zeros((6, 128), BF16), framework)  # gradients side by side, as of a fused projection
    given = dict(zip(NAMES, outputs_of(framework), strict=True))
    given["du_tensor"] = buffer[:, 64:96]
    for chosen in (NAMES, NAMES[1:2], NAMES[2:]):
        result = hstu_lmsd_backward(*arrays, **OPTIONS, **{name: given[name] for name in chosen})
        assert list(result.keys()) == NAMES
        for name in NAMES:
            assert (result[name] is given[name]) == (name in chosen)
            np.testing.assert_array_equal(to_numpy(result[name]), to_numpy(want[name]))


def test_results_must_fit_and_not_overlap() -> None:
    arrays = example().arrays
    rejected(r"dx_tensor must have shape \(6, 32\)", arrays, dx_tensor=np.zeros((6, 40), BF16))
    rejected("du_tensor must have dtype bfloat16", arrays, du_tensor=np.zeros((6, 32), np.float32))
    rejected("dx_tensor must have strides of multiples of 16 bytes", arrays, dx_tensor=np.zeros((6, 36), BF16)[:, :32])
    rejected("dbias_tensor must be contiguous", arrays, dbias_tensor=np.zeros(64, BF16)[::2])
    rejected("dx_tensor must not share memory with x_tensor", arrays, dx_tensor=arrays[1])
    both = np.zeros((7, 32), BF16)
    rejected("du_tensor must not share memory with dx_tensor", arrays, dx_tensor=both[:6], du_tensor=both[1:])


def test_no_rows_give_zero_parameter_gradients() -> None:
    dx, _, dweight, dbias = hstu_lmsd_backward(*example(rows=0).arrays, **OPTIONS)
    assert dx.shape == (0, 32)
    assert (dweight == 0).all()
    assert (dbias == 0).all()


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_every_set_of_flags(framework: str) -> None:
    for silu, concat_u, concat_x, p in itertools.product([True, False], [True, False], [True, False], [0.0, 0.3]):
        call = example(framework, apply_u_silu=silu, concat_u=concat_u, concat_x=concat_x, dropout_ratio=p)
        plain = [None if array is None else to_numpy(array) for array in call.arrays]
        wide = reference(*plain, **call.options, compute="float64")  # type: ignore[arg-type]
        for got, want in zip(run(*call), wide, strict=True):
            error = np.linalg.norm(to_numpy(got).astype(np.float64) - want)
            assert error <= 2.0**-8 * np.linalg.norm(want)


def test_compat_has_the_same_objects() -> None:
    assert compat.hstu_lmsd_backward is hstu_lmsd_backward
    assert compat.HSTULMSDBwd is compat.HSTULMSDBwdSm100 is HSTULMSDBwd


def test_jax_entry() -> None:
    arrays = example("jax").arrays
    want = hstu_lmsd_backward(*arrays, **OPTIONS)
    entry = lambda *given: hstu_lmsd_backward_jax(*given, **OPTIONS)  # noqa: E731
    for function in (entry, jax.jit(entry)):
        for got, exact in zip(function(*arrays), want, strict=True):
            scale = np.abs(to_numpy(exact).astype(np.float32)).max()
            np.testing.assert_allclose(
                to_numpy(got).astype(np.float32), to_numpy(exact).astype(np.float32), rtol=2**-7, atol=2**-9 * scale
            )
    assert hstu_lmsd_backward_jax(*arrays, **OPTIONS, compute_dweight=False)[2] is None


def test_opcheck_and_one_graph() -> None:
    arrays = example("torch").arrays
    hstu_lmsd_backward(*arrays, **OPTIONS)
    torch.library.opcheck(torch.ops.fe_attention.hstu_lmsd_backward.default, arrays, OPTIONS)

    def loss(x: Any) -> Any:
        return hstu_lmsd_forward(x, *arrays[2:5])["y_tensor"].float().square().sum()

    torch._dynamo.reset()
    x = arrays[1].requires_grad_()  # type: ignore[union-attr]
    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, want)


# --- class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_writes_what_the_function_returns_for_any_rows(framework: str) -> None:
    arrays = example(framework).arrays
    op = HSTULMSDBwd(*arrays, *outputs_of(framework), *workspaces(framework), 0.3)
    with pytest.raises(NotCompiledError):
        op.execute(*arrays, *outputs_of(framework), *workspaces(framework))
    assert op.check_support() is True
    assert op.workspace_rows == R
    for rows, extra in ((6, 0), (1, 8), (40, R)):  # the peer's size, SM count x 64, is larger
        arrays, outputs = example(framework, rows=rows).arrays, outputs_of(framework, rows)
        op(*arrays, *outputs, *workspaces(framework, R + extra))
        for got, want in zip(outputs, hstu_lmsd_backward(*arrays, **OPTIONS), strict=True):
            np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def test_class_without_the_gradient_of_the_weight() -> None:
    arrays, (dx, du, _, dbias) = example().arrays, outputs_of("numpy")
    dweight_workspace, dbias_workspace = workspaces(rows=132 * 64)
    op = HSTULMSDBwd(*arrays, dx, du, None, dbias, None, dbias_workspace, dropout_ratio=0.3, compute_dweight=False)
    op(*arrays, dx, du, None, dbias, None, dbias_workspace)
    np.testing.assert_array_equal(dbias, hstu_lmsd_backward(*arrays, **OPTIONS)["dbias_tensor"])
    with pytest.raises(ValueError, match="dweight_workspace must be None"):
        op.execute(*arrays, dx, du, None, dbias, dweight_workspace, dbias_workspace)
    assert op.scratch_workspace_bytes() == op.workspace_rows * 32 * 4


@pytest.mark.parametrize(
    ("workspace", "text"),
    [
        (None, "must be an array"),
        (np.zeros((R - 1, 32), np.float32), rf"must have shape \(R, D\) with R >= {R} and D = 32"),
        (np.zeros((R, 40), np.float32), "must have shape"),
        (np.zeros(R * 32, np.float32), "must have shape"),
        (np.zeros((R, 64), np.float32)[:, :32], "must be contiguous"),
        (np.zeros((R, 32), np.float64), "must have dtype float32"),
        (torch.zeros(R, 32), "must come from the framework of the inputs"),
    ],
    ids=["none", "short", "wide", "flat", "strided", "dtype", "framework"],
)
def test_workspaces_that_do_not_do(workspace: Any, text: str) -> None:
    arrays, outputs, good = example().arrays, outputs_of("numpy"), workspaces()
    for number, name in enumerate(("dweight_workspace", "dbias_workspace")):
        held = [workspace if number == n else good[n] for n in range(2)]
        with pytest.raises(ValueError, match=f"hstu_lmsd_backward: {name} {text}"):
            HSTULMSDBwd(*arrays, *outputs, *held, 0.3).check_support()
        op = HSTULMSDBwd(*arrays, *outputs, *good, 0.3)
        op.compile()
        with pytest.raises(ValueError, match=f"hstu_lmsd_backward: {name} {text}"):
            op.execute(*arrays, *outputs, *held)


def test_the_rows_of_a_workspace_can_be_asked_for_without_one() -> None:
    arrays, outputs = example().arrays, outputs_of("numpy")
    small = [np.zeros((1, 32), np.float32) for _ in range(2)]
    op = HSTULMSDBwd(*arrays, *outputs, *small, 0.3)
    assert op.workspace_rows == R
    with pytest.raises(ValueError, match="dweight_workspace"):
        op.check_support()


def test_workspaces_must_not_overlap() -> None:
    arrays, outputs = example().arrays, outputs_of("numpy")
    first, second = workspaces()
    op = HSTULMSDBwd(*arrays, *outputs, first, second, 0.3)
    op.compile()
    both = np.zeros((R + 1, 32), np.float32)
    with pytest.raises(ValueError, match="dbias_workspace must not share memory with dweight_workspace"):
        op.execute(*arrays, *outputs, both[:R], both[1:])
    outputs[2] = first.reshape(-1).view(BF16)[:32]
    with pytest.raises(ValueError, match="dweight_workspace must not share memory with dweight_tensor"):
        op.execute(*arrays, *outputs, first, second)


def test_class_takes_descriptors() -> None:
    shapes = ((4, 192), (4, 64), (4, 64), (64,), (64,))
    descs = [TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in shapes]
    descs += [TensorDesc.of("float32", (4,), device="cuda:0")] * 2 + [TensorDesc.of("int8", (4, 64), device="cuda:0")]
    descs += [descs[1], descs[2], descs[3], descs[4]]
    held = [TensorDesc.of("float32", (132 * 64, 64), device="cuda:0")] * 2
    assert HSTULMSDBwd(*descs, *held).check_support()


# --- plan ----------------------------------------------------------------------------------------------------------


def plan_of(rows: int, columns: int, **options: Any) -> Any:
    row = TensorDesc.of("bfloat16", (rows, columns), device="cuda:0")
    column = TensorDesc.of("bfloat16", (columns,), device="cuda:0")
    number = TensorDesc.of("float32", (rows,), device="cuda:0")
    dy = TensorDesc.of("bfloat16", (rows, 3 * columns), device="cuda:0")
    mask = TensorDesc.of("int8", (rows, columns), device="cuda:0")
    bound = BACKWARD.bind((dy, row, row, column, column, number, number, mask), {**OPTIONS, **options})
    return BACKWARD.plan(bound, target=Target((9, 0), 132))


def test_one_kernel_for_any_rows_and_ratio() -> None:
    plans = [plan_of(rows, 512, dropout_ratio=p).kernel for rows, p in ((1, 0.1), (99, 0.2), (2**22, 0.9))]
    assert len({plan.spec for plan in plans}) == 1
    assert [plan.form.scratch[0][0][0] for plan in plans] == [1, 25, 528]
    assert plan_of(9, 512, compute_dweight=False).kernel.spec != plans[0].spec


def test_longest_row_with_a_kernel() -> None:
    assert plan_of(9, 8192).kernel is not None
    assert plan_of(9, 8200).missing.reason == "rows have more than 8192 columns"
