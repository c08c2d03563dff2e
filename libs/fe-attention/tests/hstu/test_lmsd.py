"""The front door of ``hstu_lmsd_forward`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_attention import HSTULMSDFwd, compat, hstu_lmsd_forward, hstu_lmsd_forward_jax
from fe_attention.hstu.lmsd import OPERATION
from fe_attention.hstu.lmsd_contract import CONTRACT
from fe_attention.reference.lmsd import hstu_lmsd_forward as reference
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

BF16 = ml_dtypes.bfloat16
DEFAULTS: dict[str, Any] = {
    "eps": 1e-6,
    "dropout_ratio": 0.1,
    "seed": 0,
    "apply_u_silu": True,
    "concat_u": True,
    "concat_x": True,
}
NAMES = ["y_tensor", "mean_tensor", "rstd_tensor", "mask_tensor"]


def example(framework: str = "numpy", rows: int = 6, columns: int = 32) -> Call:
    rng = np.random.default_rng(0)
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    arrays = [rng.standard_normal(shape).astype(BF16) for shape in shapes]
    return Call(tuple(to_framework(array, framework) for array in arrays), dict(DEFAULTS))


def run(arrays: Any, options: Any) -> Any:
    return hstu_lmsd_forward(*arrays, **options)


def empty_outputs(framework: str, rows: int, columns: int, parts: int = 3, mask: bool = True) -> list[Any]:
    kinds = [((rows, parts * columns), BF16), ((rows,), np.float32), ((rows,), np.float32), ((rows, columns), np.int8)]
    made = [to_framework(np.zeros(shape, dtype), framework) for shape, dtype in kinds]
    return made if mask else [*made[:3], None]


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "hstu_lmsd_forward", call)


@settings(max_examples=40, deadline=None)
@given(
    valid_calls(
        CONTRACT,
        extents={"N": (0, 1, 2, 5), "D": (8, 16, 40)},
        options={"dropout_ratio": (0.0, 0.25), "seed": (0, -1, 2**63 - 1), "eps": (1e-6,)},
    )
)
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == NAMES
    bound = OPERATION.bind(call.arrays, call.options)
    for output, spec in zip(result, bound.outputs, strict=True):
        assert (output is None) == (spec is None)
        if spec is not None:
            assert output.shape == spec.shape
            assert output.dtype.name == spec.dtype


# --- one test for each row of the contract's tables ----------------------------------------------------------------


def rejected(match: str, *arrays: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=f"hstu_lmsd_forward: {match}"):
        hstu_lmsd_forward(*arrays, **options)


def replaced(number: int, array: Any) -> list[Any]:
    arrays = list(example().arrays)
    arrays[number] = array
    return arrays


def test_shapes_of_x_u_weight_and_bias() -> None:
    x, _, w, _ = example().arrays
    rejected("x_tensor must have shape", *replaced(0, x[0]))
    rejected("x_tensor must have shape", *replaced(0, x[None]))
    rejected(r"u_tensor must have shape .*N = 6", *replaced(1, x[:5]))
    rejected(r"u_tensor must have shape .*D = 32", *replaced(1, x[:, :16].copy()))
    rejected(r"weight_tensor must have shape .*D = 32", *replaced(2, w[:16].copy()))
    rejected(r"bias_tensor must have shape .*D = 32", *replaced(3, w[:16].copy()))


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_dtypes_are_bfloat16(name: str) -> None:
    for number, argument in enumerate(("x_tensor", "u_tensor", "weight_tensor", "bias_tensor")):
        arrays = list(example().arrays)
        arrays[number] = arrays[number].astype(name)  # type: ignore[union-attr]
        rejected(f"{argument} must have dtype bfloat16", *arrays)


def test_row_strides_of_a_multiple_of_eight_not_below_d() -> None:
    x, u, w, b = example().arrays
    want = hstu_lmsd_forward(x, u, w, b)
    wide = np.full((6, 128), np.nan, BF16)
    for first in (0, 32, 96):  # as in the fused projection, of which u is a slice
        wide[:, first : first + 32] = u
        for got, exact in zip(hstu_lmsd_forward(x, wide[:, first : first + 32], w, b), want, strict=True):
            np.testing.assert_array_equal(got, exact)
    rejected("x_tensor must have strides of multiples of 16 bytes", np.zeros((6, 36), BF16)[:, :32], u, w, b)
    rejected("u_tensor must have rows of stride 1", x, np.zeros((6, 64), BF16)[:, ::2], w, b)
    rejected("x_tensor must have rows of stride 1 that do not overlap", np.broadcast_to(x[:1], (6, 32)), u, w, b)
    rejected("weight_tensor must be contiguous", x, u, np.zeros(64, BF16)[::2], b)


def test_outputs_are_contiguous() -> None:
    arrays = example().arrays
    for number, name in enumerate(NAMES):
        outputs = empty_outputs("numpy", 6, 32)
        shape = outputs[number].shape
        outputs[number] = np.zeros((*shape[:-1], 2 * shape[-1]), outputs[number].dtype)[..., ::2]
        with pytest.raises(ValueError, match=f"hstu_lmsd_forward: {name} must be contiguous"):
            HSTULMSDFwd(*arrays, *outputs).check_support()


def test_d_is_a_positive_multiple_of_eight() -> None:
    rejected("x_tensor must have .* multiple of", *example(columns=12).arrays)
    rejected("x_tensor must have a positive multiple of 8 columns", *example(columns=0).arrays)


@pytest.mark.parametrize("columns", [8, 1016, 1024, 8192])
def test_d_beyond_the_peers_limit(columns: int) -> None:
    assert hstu_lmsd_forward(*example(rows=2, columns=columns).arrays)["y_tensor"].shape == (2, 3 * columns)


def test_at_most_two_to_the_31_elements() -> None:
    def desc(rows: int) -> list[TensorDesc]:
        return [TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in ((rows, 512),) * 2 + ((512,),) * 2]

    OPERATION.bind(desc(2**22), DEFAULTS)
    with pytest.raises(ValueError, match=r"x_tensor must have at most 2\^31 elements"):
        OPERATION.bind(desc(2**22 + 1), DEFAULTS)


def test_no_rows() -> None:
    y, mean, rstd, mask = hstu_lmsd_forward(*example(rows=0).arrays)
    assert (y.shape, mean.shape, rstd.shape, mask.shape) == ((0, 96), (0,), (0,), (0, 32))


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_eps_is_finite_and_positive(eps: float) -> None:
    rejected("eps must be a finite number > 0", *example().arrays, eps=eps)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, 1 - 2.0**-26, float("nan"), float("inf")])
def test_p_is_in_range_also_as_float32(p: float) -> None:
    rejected(r"dropout_ratio must be in \[0, 1\)", *example().arrays, dropout_ratio=p)


@pytest.mark.parametrize("p", [0, 0.0, 1e-60])
def test_p_that_is_zero_as_float32_is_no_dropout(p: float) -> None:
    arrays = example().arrays
    y, _, _, mask = hstu_lmsd_forward(*arrays, dropout_ratio=p)
    assert mask is None
    np.testing.assert_array_equal(y[:, 32:64], arrays[0])


def test_seed_is_a_signed_integer_of_64_bits() -> None:
    arrays = example().arrays
    masks = [hstu_lmsd_forward(*arrays, seed=seed)["mask_tensor"] for seed in (-(2**63), 2**63 - 1, 0, 2**32)]
    assert len({mask.tobytes() for mask in masks}) == 4
    for seed in (2**63, -(2**63) - 1):
        rejected("seed must be a signed integer of 64 bits", *arrays, seed=seed)
    for wrong in (1.0, True, "1"):
        rejected("seed must be a Python int", *arrays, seed=wrong, error=TypeError)


def test_flags_are_bool() -> None:
    for name in ("apply_u_silu", "concat_u", "concat_x"):
        rejected(f"{name} must be a Python bool", *example().arrays, **{name: 1}, error=TypeError)


def test_same_device_and_framework() -> None:
    x, u, w, b = example("torch").arrays
    rejected("u_tensor must come from the framework of x_tensor", x, to_numpy(u), w, b)
    descs = [TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in ((6, 32), (6, 32), (32,), (32,))]
    descs[3] = TensorDesc.of("bfloat16", (32,), device="cuda:1")
    with pytest.raises(ValueError, match="bias_tensor must be on the device of x_tensor"):
        OPERATION.bind(descs, DEFAULTS)


def test_outputs_must_not_overlap() -> None:
    arrays = example().arrays
    outputs = empty_outputs("numpy", 6, 32)
    op = HSTULMSDFwd(*arrays, *outputs)
    op.compile()
    shared = np.zeros(12, np.float32)
    with pytest.raises(ValueError, match="rstd_tensor must not share memory with mean_tensor"):
        op.execute(*arrays, outputs[0], shared[:6], shared[5:11], outputs[3], 0)
    y = np.zeros((6, 96), BF16)
    x = y.reshape(-1)[:192].reshape(6, 32)
    with pytest.raises(ValueError, match="y_tensor must not share memory with x_tensor"):
        op.execute(x, *arrays[1:], y, *outputs[1:], 0)


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_every_set_of_flags(framework: str) -> None:
    arrays = example(framework).arrays
    plain = [to_numpy(array) for array in arrays]
    for silu, concat_u, concat_x, p in itertools.product([True, False], [True, False], [True, False], [0.0, 0.3]):
        options = {**DEFAULTS, "dropout_ratio": p, "seed": -5}
        options |= {"apply_u_silu": silu, "concat_u": concat_u, "concat_x": concat_x}
        y, mean, rstd, mask = hstu_lmsd_forward(*arrays, **options)
        wide = reference(*plain, **options, compute="float64")
        assert y.shape == (6, 32 * (1 + concat_u + concat_x))
        np.testing.assert_allclose(to_numpy(y).astype(np.float64), wide[0], rtol=2**-8, atol=1e-6)
        np.testing.assert_allclose(to_numpy(mean), wide[1], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(to_numpy(rstd), wide[2], rtol=1e-5)
        assert (mask is None) == (p == 0)
        if mask is not None:
            np.testing.assert_array_equal(to_numpy(mask), wide[3])


def test_mask_of_the_contracts_vectors() -> None:
    """Words of row 3, columns 20 to 23 of plane 1 under one seed, of row 7, columns 0 to 3 of plane 0 under another."""
    arrays = example(rows=8).arrays
    for seed, row, first, plane, words in (
        (2**40 + 12345, 3, 20, 1, (0x035341A2, 0x02F0A989, 0x323D65D0, 0xBCCA5BA9)),
        (-2, 7, 0, 0, (0x27F2F13D, 0x92A4FC55, 0xD0B800EB, 0x04020ACD)),
    ):
        for p, smallest in ((0.1, 0x199999B0), (0.2, 0x33333360), (0.5, 0x80000081)):
            mask = hstu_lmsd_forward(*arrays, dropout_ratio=p, seed=seed)["mask_tensor"]
            kept = (mask[row, first : first + 4] >> plane) & 1
            assert kept.tolist() == [word >= smallest for word in words]


def test_compat_has_the_same_objects() -> None:
    assert compat.hstu_lmsd_forward is hstu_lmsd_forward
    assert compat.HSTULMSDFwd is compat.HSTULMSDFwdSm100 is HSTULMSDFwd


# --- gradient ------------------------------------------------------------------------------------------------------


def slopes(arrays: Any, dy: Any, mask: Any, p: float) -> list[Any]:
    """What torch's own operations give in float64, with the mask of the forward."""
    x, u, w, b = (torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in arrays)
    ln = torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, 1e-6)
    a = torch.nn.functional.silu(u)
    kept = [torch.tensor((mask >> plane) & 1) / (1 - np.float64(np.float32(p))) for plane in range(3)]
    y = torch.cat([a * kept[2], x * kept[1], ln * a * kept[0]], -1)
    y.backward(torch.tensor(np.asarray(dy, np.float64)))
    return [leaf.grad.numpy() for leaf in (x, u, w, b)]  # type: ignore[union-attr]


def close(got: Any, want: Any) -> None:
    got = to_numpy(got).astype(np.float64)
    assert np.linalg.norm(got - want) <= 2**-8 * np.linalg.norm(want)


def test_gradients_in_torch() -> None:
    arrays = example().arrays
    leaves = [to_framework(array, "torch").requires_grad_() for array in arrays]
    y, _, _, mask = hstu_lmsd_forward(*leaves, dropout_ratio=0.3, seed=11)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(BF16)
    y.backward(to_framework(dy, "torch"))
    for leaf, want in zip(leaves, slopes(arrays, dy, to_numpy(mask), 0.3), strict=True):
        close(leaf.grad, want)


def test_gradients_in_jax() -> None:
    arrays = example().arrays
    mask = hstu_lmsd_forward(*arrays, dropout_ratio=0.3, seed=11)["mask_tensor"]
    dy = np.random.default_rng(1).standard_normal((6, 96)).astype(BF16)
    want = slopes(arrays, dy, mask, 0.3)

    def loss(*given: Any) -> Any:
        y, *_ = hstu_lmsd_forward_jax(*given, dropout_ratio=0.3, seed=11)
        return (y.astype(jnp.float32) * jnp.asarray(dy).astype(jnp.float32)).sum()

    gradient = jax.grad(loss, (0, 1, 2, 3))
    for function in (gradient, jax.jit(gradient)):
        for got, exact in zip(function(*map(jnp.asarray, arrays)), want, strict=True):
            close(got, exact)


def test_no_second_derivative() -> None:
    x, u, w, b = example("torch").arrays
    x.requires_grad_()  # type: ignore[union-attr]
    y = hstu_lmsd_forward(x, u, w, b)["y_tensor"]
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="hstu_lmsd"):
        torch.autograd.grad(gradient.float().sum(), x)


# --- class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_class_writes_what_the_wrapper_returns_for_any_rows_strides_and_seed(framework: str, p: float) -> None:
    arrays = example(framework).arrays
    outputs = empty_outputs(framework, 6, 32, mask=p > 0)
    op = HSTULMSDFwd(*arrays, *outputs, dropout_ratio=p)
    with pytest.raises(NotCompiledError):
        op.execute(*arrays, *outputs, 3)
    assert op.check_support() is True
    for rows, seed in ((6, 3), (1, -4), (9, 2**50)):
        x, u, w, b = example(framework, rows=rows).arrays
        wide = to_framework(np.tile(to_numpy(u), (1, 4)), framework)
        outputs = empty_outputs(framework, rows, 32, mask=p > 0)
        op(x, wide[:, 32:64], w, b, *outputs, seed)
        for got, want in zip(outputs, hstu_lmsd_forward(x, u, w, b, dropout_ratio=p, seed=seed), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def test_class_takes_descriptors_and_keeps_no_sample() -> None:
    shapes = ((4, 64), (4, 64), (64,), (64,), (4, 192))
    descs = [TensorDesc.of("bfloat16", shape, device="cuda:0") for shape in shapes]
    descs += [TensorDesc.of("float32", (4,), device="cuda:0")] * 2 + [TensorDesc.of("int8", (4, 64), device="cuda:0")]
    assert HSTULMSDFwd(*descs).check_support()
    with pytest.raises(ValueError, match="mask_tensor must be None"):
        HSTULMSDFwd(*descs, dropout_ratio=0.0).check_support()
    with pytest.raises(ValueError, match=r"y_tensor must have shape \(4, 128\)"):
        HSTULMSDFwd(*descs, concat_x=False).check_support()
    with pytest.raises(ValueError, match="mask_tensor must be an array"):
        HSTULMSDFwd(*descs[:7], None).check_support()


def test_class_refuses_another_d() -> None:
    op = HSTULMSDFwd(*example().arrays, *empty_outputs("numpy", 6, 32))
    op.compile()
    with pytest.raises(ValueError, match="D = 32"):
        op.execute(*example(columns=40).arrays, *empty_outputs("numpy", 6, 40), 0)


# --- torch, JAX, plan ----------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    arrays = example("torch").arrays
    hstu_lmsd_forward(*arrays)
    for p in (0.0, 0.3):
        options = {**DEFAULTS, "dropout_ratio": p}
        torch.library.opcheck(torch.ops.fe_attention.hstu_lmsd_forward.default, arrays, options)


def test_compiles_as_one_graph() -> None:
    arrays = example("torch").arrays

    def model(*given: Any) -> Any:
        return hstu_lmsd_forward(*given, seed=3)["y_tensor"] * 2

    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(*arrays), model(*arrays))


def test_jax_entry_eager_jit_and_shapes() -> None:
    arrays = example("jax").arrays
    want = hstu_lmsd_forward(*arrays, seed=2**40)
    entry = lambda *given: hstu_lmsd_forward_jax(*given, seed=2**40)  # noqa: E731
    for function in (entry, jax.jit(entry)):
        y, _, _, mask = function(*arrays)
        np.testing.assert_allclose(to_numpy(y).astype(np.float32), to_numpy(want[0]).astype(np.float32), rtol=2**-7)
        np.testing.assert_array_equal(mask, want[3])
    y, mean, rstd, mask = jax.eval_shape(lambda *given: hstu_lmsd_forward_jax(*given, dropout_ratio=0.0), *arrays)
    assert (y.shape, mean.shape, rstd.shape, mask) == ((6, 96), (6,), (6,), None)


def on_gpu(rows: int, columns: int) -> list[TensorDesc]:
    return [TensorDesc.of("bfloat16", s, device="cuda:0") for s in ((rows, columns),) * 2 + ((columns,),) * 2]


def spec_of(rows: int, columns: int, **options: Any) -> Any:
    plan = OPERATION.plan(OPERATION.bind(on_gpu(rows, columns), options), target=Target((9, 0), 132))
    assert plan.kernel is not None
    return plan.kernel.spec


def test_rows_eps_ratio_and_seed_are_not_in_the_kernel_key() -> None:
    specs = {
        spec_of(rows, 512, eps=eps, dropout_ratio=p, seed=seed)
        for rows, eps, p, seed in itertools.product((1, 77, 2**22), (1e-6, 1e-3), (0.1, 0.5), (0, -1))
    }
    assert len(specs) == 1


def test_flags_are_in_the_kernel_key() -> None:
    specs = [spec_of(9, 512), spec_of(9, 256), spec_of(9, 512, dropout_ratio=0.0)]
    specs += [spec_of(9, 512, **{flag: False}) for flag in ("apply_u_silu", "concat_u", "concat_x")]
    assert len(set(specs)) == len(specs)


def test_longest_row_with_a_kernel() -> None:
    spec_of(9, 8192)
    plan = OPERATION.plan(OPERATION.bind(on_gpu(9, 8200), DEFAULTS), target=Target((9, 0), 132))
    assert plan.missing is not None
    assert plan.missing.reason == "rows have more than 8192 columns"


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="hstu_lmsd_forward: backend"):
        hstu_lmsd_forward(*example().arrays, backend="sm90")
