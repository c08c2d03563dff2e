"""The front door of ``rmsnorm_rht_amax`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_norm import (
    RmsNormRhtAmax,
    best_num_threads,
    pick_rows_per_cta,
    rmsnorm_rht_amax_jax,
    rmsnorm_rht_amax_wrapper,
)
from fe_norm.rmsnorm_rht_amax import CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

BF16 = ml_dtypes.bfloat16


def run(arrays: Any, options: Any) -> Any:
    return rmsnorm_rht_amax_wrapper(*arrays, **options)


def example(framework: str = "numpy", rows: int = 6, columns: int = 64) -> Call:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, columns), (columns,))]
    converted = tuple(to_framework(array, framework) for array in arrays)
    return Call(converted, {"eps": 1e-5, "num_threads": None, "rows_per_cta": 3})


def rotated_norm(x: Any, w: Any, eps: float) -> Any:
    """The formula in float64 with an explicit matrix."""
    v = np.asarray(x, np.float64).reshape(x.shape[0], -1)
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)], np.float64)
    y = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps) * np.asarray(w, np.float64).reshape(-1)
    return (y.reshape(v.shape[0], -1, 16) @ signs / 4).reshape(v.shape)


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "rmsnorm_rht_amax", call)


WITHOUT_UNITS = replace(CONTRACT, inputs=tuple(replace(declared, also=()) for declared in CONTRACT.inputs))


@settings(max_examples=60, deadline=None)
@given(
    valid_calls(
        WITHOUT_UNITS,
        extents={"M": (0, 1, 2, 3, 8), "N": (16, 48, 64)},
        options={"num_threads": (None,), "rows_per_cta": (None, 1, 2, 4)},
    )
)
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == ["o_tensor", "amax_tensor"]
    bound = OPERATION.bind(call.arrays, call.options)
    for output, spec in zip(result, bound.outputs, strict=True):
        assert spec is not None
        assert output.shape == spec.shape
        assert output.dtype.name == spec.dtype
    x, w = call.arrays
    assert x is not None
    if x.shape[0]:
        want = rotated_norm(x, w, float(call.options["eps"]))  # type: ignore[arg-type]
        allowed = 2.0**-8 * np.abs(want) + 2.0**-14 * np.abs(want).max()
        assert (np.abs(result["o_tensor"].astype(np.float64) - want) <= allowed).all()
        groups = np.abs(want).reshape(result["amax_tensor"].size, -1)
        np.testing.assert_allclose(result["amax_tensor"], groups.max(-1), rtol=1e-5)


# --- one test for each row of the contract's table of errors -------------------------------------------------------


def rejected(match: str, *arrays: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=f"rmsnorm_rht_amax: {match}"):
        rmsnorm_rht_amax_wrapper(*arrays, **options)


def test_ranks_and_lengths() -> None:
    x, w = example().arrays
    rejected("x_tensor must have shape", x[0], w)
    rejected("x_tensor must have shape", x[None], w)
    rejected("w_tensor must have shape", x, x)
    rejected(r"w_tensor must have shape .*N = 64", x, w[:48])
    o, amax = np.empty((6, 48), np.float32), np.empty(2, np.float32)
    with pytest.raises(ValueError, match=r"o_tensor must have shape \(6, 64\)"):
        RmsNormRhtAmax(x, w, o, amax, rows_per_cta=3).check_support()


def test_columns_in_blocks_of_sixteen() -> None:
    rejected("x_tensor must have a positive multiple of 16 columns", *example(columns=24).arrays)
    rejected("x_tensor must have a positive multiple of 16 columns", *example(columns=0).arrays)


@pytest.mark.parametrize("name", ["float64", "int32", "uint8"])
def test_dtypes(name: str) -> None:
    x, w = example().arrays
    rejected("x_tensor must have dtype", x.astype(name), w)
    rejected("w_tensor must have dtype", x, w.astype(name))
    o, amax = np.empty((6, 64), name), np.empty(2, np.float32)
    with pytest.raises(ValueError, match="o_tensor must have dtype float32"):
        RmsNormRhtAmax(x, w, o, amax, rows_per_cta=3).check_support()
    with pytest.raises(ValueError, match="amax_tensor must have dtype float32"):
        RmsNormRhtAmax(x, w, np.empty_like(x), np.empty(2, name), rows_per_cta=3).check_support()


def test_strides() -> None:
    x, w = example().arrays
    wide = np.zeros((6, 100), np.float32)[:, :64]
    np.copyto(wide, x)
    np.testing.assert_array_equal(*(rmsnorm_rht_amax_wrapper(a, w)["o_tensor"] for a in (wide, x)))
    rejected("x_tensor must have a last dimension of stride 1", np.zeros((6, 128), np.float32)[:, ::2], w)
    rejected("w_tensor must be contiguous", x, np.zeros(128, np.float32)[::2])
    with pytest.raises(ValueError, match="o_tensor must be contiguous"):
        RmsNormRhtAmax(x, w, wide, np.empty(2, np.float32), rows_per_cta=3).check_support()


def test_rows_per_cta_divides_the_rows() -> None:
    rejected("rows_per_cta must divide the number of rows; got 4 for M = 6", *example().arrays, rows_per_cta=4)


@pytest.mark.parametrize("rows", [0, -1])
def test_rows_per_cta_is_positive(rows: int) -> None:
    rejected("rows_per_cta must be positive", *example().arrays, rows_per_cta=rows)


@pytest.mark.parametrize("threads", [0, -64, 48, 2048])
def test_num_threads_is_a_number_of_threads(threads: int) -> None:
    rejected("num_threads must be a positive multiple of 32 up to 1024", *example().arrays, num_threads=threads)


@pytest.mark.parametrize(("columns", "threads"), [(2048, 96), (2048, 512), (4096, 1024)])
def test_num_threads_divides_the_columns(columns: int, threads: int) -> None:
    rejected("num_threads must share the columns", *example(columns=columns).arrays, num_threads=threads)
    assert rmsnorm_rht_amax_wrapper(*example(columns=columns).arrays, num_threads=256)


@pytest.mark.parametrize("columns", [2880, 1040])
def test_columns_that_suit_no_number_of_threads(columns: int) -> None:
    assert best_num_threads(columns) is None
    x, w = example(columns=columns).arrays
    assert rmsnorm_rht_amax_wrapper(x, w)["o_tensor"].shape == (6, columns)


def test_class_checks_the_length_of_amax() -> None:
    x, w = example().arrays
    with pytest.raises(ValueError, match=r"amax_tensor must have shape \(2,\)"):
        RmsNormRhtAmax(x, w, np.empty_like(x), np.empty(3, np.float32), rows_per_cta=3).check_support()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_no_rows(framework: str) -> None:
    x, w = example(framework, rows=0).arrays
    o, amax = rmsnorm_rht_amax_wrapper(x, w)
    assert (tuple(o.shape), tuple(amax.shape)) == ((0, 64), (0,))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_trailing_unit_dimensions_are_squeezed(framework: str) -> None:
    x, w = example(framework).arrays
    want = rmsnorm_rht_amax_wrapper(x, w)
    got = rmsnorm_rht_amax_wrapper(x[:, :, None], w[:, None])
    for a, b in zip(got, want, strict=True):
        assert tuple(a.shape) == tuple(b.shape)
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


# --- resolved options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1184, 8), (1183, 2), (592, 4), (1176, 4), (296, 2), (294, 2), (16384, 8), (7, 2), (1001, 2), (0, 2)],
)
def test_pick_rows_per_cta(rows: int, expected: int) -> None:
    assert pick_rows_per_cta(rows) == expected


@pytest.mark.parametrize(
    ("columns", "threads"),
    [(8192, 1024), (4096, 512), (2048, 256), (1024, 128), (512, 64), (7168, 128), (256, None), (2880, None), (0, None)],
)
def test_best_num_threads(columns: int, threads: int | None) -> None:
    assert best_num_threads(columns) == threads


@pytest.mark.parametrize(("rows", "length"), [(1184, 148), (7, 7), (6, 3), (1001, 1001)])
def test_default_length_of_amax(rows: int, length: int) -> None:
    """8, 4 or 2 rows; 1 where the peer's fallback of 2 does not divide the rows."""
    assert rmsnorm_rht_amax_wrapper(*example(rows=rows, columns=16).arrays)["amax_tensor"].shape == (length,)


@pytest.mark.parametrize(
    ("columns", "threads"), [(2048, 128), (4096, 256), (7168, 128), (8192, 512), (16384, 1024), (512, 64), (2880, None)]
)
def test_class_holds_the_resolved_values(columns: int, threads: int | None) -> None:
    x, w, o = (TensorDesc.of("bfloat16", shape) for shape in ((1184, columns), (columns,), (1184, columns)))
    op = RmsNormRhtAmax(x, w, o, TensorDesc.of("float32", (148,)))
    op.check_support()
    assert (op.num_threads, op.rows_per_cta, op.n) == (threads, 8, columns)


# --- frameworks and numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_frameworks_give_numpys_values(framework: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(np.dtype(dtype)) for shape in ((8, 96), (96,)))
    want, want_amax = rmsnorm_rht_amax_wrapper(x, w)
    got, amax = rmsnorm_rht_amax_wrapper(to_framework(x, framework), to_framework(w, framework))
    assert to_numpy(got).dtype == np.dtype(dtype)
    np.testing.assert_allclose(to_numpy(amax), want_amax, rtol=1e-6)
    step = 2.0**-7 if dtype == "bfloat16" else 2.0**-9
    np.testing.assert_allclose(to_numpy(got).astype(np.float64), want.astype(np.float64), rtol=step, atol=1e-4)


def test_required_gradient_is_neither_recorded_nor_refused() -> None:
    x, w = example("torch").arrays
    o, amax = rmsnorm_rht_amax_wrapper(x.requires_grad_(), w.requires_grad_())  # type: ignore[union-attr]
    assert not o.requires_grad
    assert not amax.requires_grad


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("unit", [False, True], ids=["2-D", "trailing 1"])
def test_class_writes_what_the_wrapper_returns(framework: str, unit: bool) -> None:
    x, w = example(framework).arrays
    want, want_amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=3)
    o = np.empty_like(want) if framework == "numpy" else torch.empty_like(want)
    amax = np.empty_like(want_amax) if framework == "numpy" else torch.full_like(want_amax, -np.inf)
    x, w, o = (x[:, :, None], w[:, None], o[:, :, None]) if unit else (x, w, o)
    op = RmsNormRhtAmax(x, w, o, amax, rows_per_cta=3)
    with pytest.raises(NotCompiledError):
        op.execute(x, w, o, amax)
    assert op.check_support() is True
    op.compile()
    assert op.execute(x, w, o, amax) is None
    np.testing.assert_array_equal(to_numpy(o).reshape(want.shape), to_numpy(want))
    np.testing.assert_array_equal(to_numpy(amax), to_numpy(want_amax))


def test_class_takes_descriptors_and_any_multiple_of_its_rows() -> None:
    shapes = ((1184, 32, 1), (32,), (1184, 32, 1))
    x, w, o = (TensorDesc.of("float32", shape) for shape in shapes)
    op = RmsNormRhtAmax(x, w, o, TensorDesc.of("float32", (148,)))
    op.compile()
    for rows in (8, 24):
        data, out = np.ones((rows, 32), np.float32), np.zeros((rows, 32), np.float32)
        amax = np.zeros(rows // 8, np.float32)
        op.execute(data, np.ones(32, np.float32), out, amax)
        np.testing.assert_allclose(amax, 4, rtol=1e-4)
    with pytest.raises(ValueError, match="rows_per_cta must divide the number of rows; got 8 for M = 12"):
        op.execute(np.ones((12, 32), np.float32), np.ones(32, np.float32), np.zeros((12, 32), np.float32), amax)


def test_opcheck() -> None:
    x, w = example("torch").arrays
    rmsnorm_rht_amax_wrapper(x, w)
    options = {"eps": 1e-5, "num_threads": None, "rows_per_cta": 3}
    torch.library.opcheck(torch.ops.fe_norm.rmsnorm_rht_amax.default, (x, w), options)


def test_compiles_as_one_graph() -> None:
    x, w = example("torch").arrays

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, w: Any) -> Any:
        o, amax = rmsnorm_rht_amax_wrapper(x * 2, w, rows_per_cta=2)
        return o, amax

    want = rmsnorm_rht_amax_wrapper(x * 2, w, rows_per_cta=2)  # type: ignore[operator]
    for got, expected in zip(model(x, w), want, strict=True):
        assert torch.equal(got, expected)


def test_jax_entry_eager_jit_shapes_and_lowering() -> None:
    x, w = example("jax").arrays
    want = tuple(map(to_numpy, rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=2)))

    def call(x: Any, w: Any) -> Any:
        return rmsnorm_rht_amax_jax(x, w, rows_per_cta=2)

    for result in (call(x, w), jax.jit(call)(x, w)):
        assert type(result) is tuple
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    o, amax = jax.eval_shape(call, x, w)
    assert (o.shape, o.dtype, amax.shape, amax.dtype) == ((6, 64), np.float32, (3,), np.float32)
    assert jax.jit(call).lower(x, w).out_info[1].shape == (3,)


def test_jax_options_are_static() -> None:
    x, w = example("jax").arrays
    with pytest.raises(TypeError, match="rmsnorm_rht_amax: eps must be a Python float"):
        jax.jit(lambda x, w, eps: rmsnorm_rht_amax_jax(x, w, eps=eps))(x, w, 1e-5)


def test_jax_stream_comes_from_xla() -> None:
    x, w = example("jax").arrays
    with pytest.raises(ValueError, match="rmsnorm_rht_amax: current_stream must be None"):
        rmsnorm_rht_amax_wrapper(x, w, current_stream=0)
    assert isinstance(rmsnorm_rht_amax_wrapper(x, w)["o_tensor"], jnp.ndarray)


# --- plan ----------------------------------------------------------------------------------------------------------


def on_gpu(shape: tuple[int, ...], dtype: str = "bfloat16", stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def kernel_of(x: TensorDesc, **options: Any) -> Any:
    w = on_gpu((x.shape[1],), options.pop("weight", "bfloat16"))
    plan = OPERATION.plan(OPERATION.bind((x, w), options))
    assert plan.kernel is not None
    return plan.kernel


def test_rows_eps_and_threads_are_not_in_the_kernel_key() -> None:
    specs = {
        kernel_of(on_gpu((rows, 4096)), rows_per_cta=8, eps=eps, num_threads=threads).spec
        for rows in (8, 16, 2**22)
        for eps in (0.0, 1e-5)
        for threads in (None, 128)
    }
    assert len(specs) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    kernels = [
        kernel_of(on_gpu((2048, 4096))),
        kernel_of(on_gpu((2048, 4096)), rows_per_cta=4),
        kernel_of(on_gpu((2048, 4096)), rows_per_cta=16),
        kernel_of(on_gpu((2048, 4096)), rows_per_cta=32),
        kernel_of(on_gpu((2048, 2048))),
        kernel_of(on_gpu((2048, 4096), stride=(4097, 1))),
        kernel_of(on_gpu((2048, 4096), "float16")),
        kernel_of(on_gpu((2048, 4096)), weight="float32"),
    ]
    assert len({kernel.spec for kernel in kernels}) == len(kernels)


def test_many_rows_per_entry_are_folded_from_parts() -> None:
    few, many = (kernel_of(on_gpu((4096, 256)), rows_per_cta=rows) for rows in (16, 4096))
    assert few.form.scratch == ()
    assert many.form.scratch == (((256,), "float32"),)
    assert many.spec == kernel_of(on_gpu((4096, 256)), rows_per_cta=64).spec


def test_rows_of_any_stride_need_no_copy() -> None:
    assert kernel_of(on_gpu((64, 256), stride=(1000, 1))).copies == ()


@pytest.mark.parametrize("capability", [(7, 5), (11, 0)], ids=str)
def test_gpus_without_kernels_run_the_reference(capability: tuple[int, int]) -> None:
    bound = OPERATION.bind((on_gpu((4, 512)), on_gpu((512,))), {})
    plan = OPERATION.plan(bound, target=Target(capability, 40))
    assert plan.backend == "reference"


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="rmsnorm_rht_amax: backend"):
        rmsnorm_rht_amax_wrapper(*example().arrays, backend="sm90")
