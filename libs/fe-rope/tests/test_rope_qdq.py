"""The front door of ``rope_qdq_inplace`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_rope import bfloats, same_bits, tables
from naive_rope import rope_qdq as naive

import fe_runtime
from fe_rope import RopeQDQInplace, rope_qdq_inplace, rope_qdq_jax
from fe_rope.rope_qdq import CONTRACT, MODES, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

NAMES = ("quantization", "group_size", "scale_format")
OPTIONS = [dict(zip(NAMES, mode, strict=True)) for mode in MODES]
FP4, FP8, FP4_16 = OPTIONS
each_mode = pytest.mark.parametrize("options", OPTIONS, ids=lambda mode: "/".join(map(str, mode.values())))


def run(arrays: Any, options: Any) -> Any:
    return rope_qdq_inplace(*arrays, **options)


def example(options: Any = FP4, framework: str = "numpy", shape: tuple[int, ...] = (2, 3, 96)) -> Call:
    rng = np.random.default_rng(0)
    count = shape[0] if options is FP4 else int(np.prod(shape[:-1]))
    cache = np.concatenate(tables(rng, (5, 32)), axis=1)
    arrays = bfloats(rng, shape), cache, rng.integers(0, 5, count)
    return Call(tuple(to_framework(array, framework) for array in arrays), dict(options))


def expected(call: Call) -> Any:
    return naive(*call.arrays, *(call.options[name] for name in NAMES))  # type: ignore[arg-type]


# ---- the contract's rows of errors

INVALID = [call for call in invalid_calls(CONTRACT, example()) if not call.id.startswith("group_size")]


@pytest.mark.parametrize("call", INVALID, ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "rope_qdq_inplace", call)


@pytest.mark.parametrize("size", [8, 0, -32, 32.0, True, "32", None, np.int64(32)], ids=repr)
def test_group_size_is_a_plain_int(size: Any) -> None:
    x, cache, positions = example().arrays
    with pytest.raises(ValueError, match="rope_qdq_inplace: group_size must be "):
        rope_qdq_inplace(x, cache, positions, quantization="fp4", group_size=size)


@pytest.mark.parametrize("mode", [("fp8", 16, "ue8m0"), ("fp4", 16, "ue8m0"), ("fp4", 32, "e4m3"), ("fp8", 32, "e4m3")])
def test_triples_outside_the_table(mode: Any) -> None:
    with pytest.raises(ValueError, match="rope_qdq_inplace: quantization must be, with group_size and scale_format"):
        rope_qdq_inplace(*example().arrays, **dict(zip(NAMES, mode, strict=True)))


def test_quantization_has_no_default() -> None:
    with pytest.raises(TypeError, match="quantization"):
        rope_qdq_inplace(*example().arrays)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", ["cudnn", "Frost"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match="rope_qdq_inplace: backend must be one of"):
        rope_qdq_inplace(*example().arrays, backend=backend, **FP4)


@pytest.mark.parametrize("argument", range(3), ids=CONTRACT.input_names)
def test_operand_that_is_no_tensor(argument: int) -> None:
    arrays: list[Any] = list(example().arrays)
    arrays[argument] = arrays[argument].tolist()
    with pytest.raises(TypeError, match=f"{CONTRACT.input_names[argument]} must be an array"):
        rope_qdq_inplace(*arrays, **FP4)


@pytest.mark.parametrize("argument", range(3), ids=CONTRACT.input_names)
def test_strides_that_are_not_taken(argument: int) -> None:
    arrays: list[Any] = list(example().arrays)
    arrays[argument] = np.repeat(arrays[argument], 2, axis=-1)[..., ::2]
    with pytest.raises(NotImplementedError, match=r"must .*got shape \(.*\) with strides \("):
        rope_qdq_inplace(*arrays, **FP4)


@pytest.mark.parametrize(
    ("options", "shape"),
    [(FP4, (2, 96)), (FP4, (2, 0, 96)), (FP4, (2, 3, 32)), (FP4, (2, 3, 80)), (FP8, (96,)), (FP4_16, (2, 72))],
    ids=str,
)
def test_shapes_of_x_that_are_wrong(options: Any, shape: tuple[int, ...]) -> None:
    _, cache, positions = example().arrays
    x = np.zeros(shape, bfloats(np.random.default_rng(0), (1,)).dtype)
    with pytest.raises(ValueError, match="rope_qdq_inplace: x must "):
        rope_qdq_inplace(x, cache, positions, **options)


@pytest.mark.parametrize(("options", "count"), [(FP4, 6), (FP8, 2), (FP4_16, 5)], ids=str)
def test_wrong_number_of_positions(options: Any, count: int) -> None:
    x, cache, _ = example(options).arrays
    with pytest.raises(ValueError, match="rope_qdq_inplace: positions must hold one position for each"):
        rope_qdq_inplace(x, cache, np.zeros(count, np.int32), **options)


@pytest.mark.parametrize("value", [-1, 5, 2**40], ids=str)
def test_position_outside_the_cache(value: int) -> None:
    x, cache, positions = example().arrays
    positions[1], before = value, x.copy()  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=rf"positions must hold values in \[0, P\) = \[0, 5\); got {value} at 1"):
        rope_qdq_inplace(x, cache, positions, **FP4)
    assert same_bits(x, before)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_required_gradient_is_refused(grad_mode: bool) -> None:
    x, cache, positions = example(framework="torch").arrays
    op = RopeQDQInplace(x, cache, positions, **FP4)
    op.compile()
    with torch.set_grad_enabled(grad_mode):
        with pytest.raises(ValueError, match="rope_qdq_inplace: cache must not require a gradient"):
            rope_qdq_inplace(x, cache.clone().requires_grad_(), positions, **FP4)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="rope_qdq_inplace: x must not require a gradient"):
            op.execute(x.clone().requires_grad_(), cache, positions)  # type: ignore[union-attr]


def test_x_that_overlaps_another_operand() -> None:
    _, cache, positions = example().arrays
    x = cache.view(bfloats(np.random.default_rng(0), (1,)).dtype)[:2, :96].reshape(2, 1, 96)  # type: ignore[union-attr]
    inside = cache[:2].view(x.dtype).reshape(2, 1, 128)  # type: ignore[index]
    with pytest.raises(ValueError, match="rope_qdq_inplace: x must not share memory with cache"):
        rope_qdq_inplace(inside, cache, positions, **FP4)
    op = RopeQDQInplace(np.zeros((2, 1, 128), x.dtype), cache, positions, **FP4)
    op.compile()
    with pytest.raises(ValueError, match="rope_qdq_inplace: x must not share memory with cache"):
        op.execute(inside, cache, positions)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("x", np.zeros((2, 4, 96))),
        ("x", np.zeros((2, 3, 128))),
        ("x", np.zeros((2, 96))),
        ("cache", np.zeros((5, 63))),
        ("positions", np.zeros(3)),
    ],
    ids=["heads", "channels", "rank", "cache", "count"],
)
def test_operands_that_differ_from_the_plan(argument: str, value: Any) -> None:
    operands: dict[str, Any] = dict(zip(CONTRACT.input_names, example().arrays, strict=True))
    op = RopeQDQInplace(**operands, **FP4)
    op.compile()
    operands[argument] = value.astype(operands[argument].dtype)
    with pytest.raises(ValueError, match="rope_qdq_inplace: "):
        op.execute(**operands)


def test_position_dtype_is_fixed_by_the_plan() -> None:
    x, cache, positions = example().arrays
    op = RopeQDQInplace(x, cache, positions, **FP4)
    op.compile()
    with pytest.raises(ValueError, match="positions must have the compiled dtype int64; got int32"):
        op.execute(x, cache, positions.astype(np.int32))  # type: ignore[union-attr]


def test_execute_before_compile() -> None:
    op = RopeQDQInplace(*example().arrays, **FP4)
    with pytest.raises(NotCompiledError):
        op.execute(*example().arrays)


def test_jax_arrays_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"rope_qdq_inplace: x must be writable; .*fe_rope\.rope_qdq_jax"):
        rope_qdq_inplace(*example(framework="jax").arrays, **FP4)


def test_an_array_that_is_read_only() -> None:
    x, cache, positions = example().arrays
    x.flags.writeable = False  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="rope_qdq_inplace: x must be writable"):
        rope_qdq_inplace(x, cache, positions, **FP4)


# ---- values and frameworks


@each_mode
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_valid_calls_give_what_the_naive_loop_gives(options: Any, data: st.DataObject) -> None:
    extents = {"D": (64, 96), "P": (1, 9), "...": (1, 2), "R": (1, 2, 4)}
    chosen = {name: (value,) for name, value in options.items()}
    x, cache, positions = data.draw(valid_calls(CONTRACT, extents=extents, options=chosen)).arrays
    call = Call((x, cache, positions % cache.shape[0]), options)  # type: ignore[operator, union-attr]
    want = expected(call)
    assert rope_qdq_inplace(*call.arrays, **options)["out"] is x
    assert same_bits(np.ascontiguousarray(x), np.ascontiguousarray(want))


@each_mode
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_x_is_written_and_returned(framework: str, options: Any) -> None:
    call = example(options, framework)
    want = expected(example(options))
    result = rope_qdq_inplace(*call.arrays, **options)
    assert list(result.keys()) == ["out"]
    assert result["out"] is call.arrays[0]
    assert same_bits(to_numpy(call.arrays[0]), want)


def test_only_x_is_written_and_torch_knows() -> None:
    x, cache, positions = example(framework="torch").arrays
    before = [array.clone() for array in (cache, positions)]  # type: ignore[union-attr]
    version = x._version  # type: ignore[union-attr]
    rope_qdq_inplace(x, cache, positions, **FP4)
    assert torch.equal(cache, before[0])  # type: ignore[arg-type]
    assert torch.equal(positions, before[1])  # type: ignore[arg-type]
    assert x._version > version  # type: ignore[union-attr]


@each_mode
def test_slices_of_a_wider_buffer(options: Any) -> None:
    """Rows of another stride: what lies between them stays."""
    call = example(options)
    wide = np.full((2, 3, 104), 7, call.arrays[0].dtype)  # type: ignore[union-attr]
    wide[..., :96] = call.arrays[0]
    rope_qdq_inplace(wide[..., :96], *call.arrays[1:], **options)
    assert same_bits(wide[..., :96].copy(), expected(example(options)))
    assert (wide[..., 96:] == 7).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_position_dtypes(dtype: Any) -> None:
    x, cache, positions = example().arrays
    rope_qdq_inplace(x, cache, positions.astype(dtype), **FP4)  # type: ignore[union-attr]
    assert same_bits(x, expected(example()))


@each_mode
def test_no_rows(options: Any) -> None:
    call = example(options, shape=(0, 3, 96))
    assert rope_qdq_inplace(*call.arrays, **options)["out"].shape == (0, 3, 96)


@each_mode
def test_class_for_any_number_of_rows(options: Any) -> None:
    descriptors = [
        TensorDesc.of(name, shape)
        for name, shape in (("bfloat16", (4, 2, 96)), ("float32", (9, 64)), ("int64", (4 if options is FP4 else 8,)))
    ]
    op = RopeQDQInplace(*descriptors, **options)
    assert op.scratch_workspace_bytes() == 0
    op.compile()
    for tokens in (0, 1, 5):
        call = example(options, shape=(tokens, 2, 96))
        want = expected(call)
        result = op.execute(*call.arrays)
        assert result["out"] is call.arrays[0]
        assert same_bits(call.arrays[0], want)


@each_mode
def test_opcheck_and_one_graph(options: Any) -> None:
    call = example(options, "torch")
    rope_qdq_inplace(*example(options, "torch").arrays, **options)
    torch.library.opcheck(torch.ops.fe_rope.rope_qdq_inplace.default, call.arrays, call.options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, cache: Any, positions: Any) -> Any:
        return rope_qdq_inplace(x, cache, positions, **options)["out"] * 1

    arrays = example(options, "torch").arrays
    want = expected(example(options))
    assert same_bits(to_numpy(model(*arrays)), want)
    assert same_bits(to_numpy(arrays[0]), want)


@each_mode
def test_jax_entry_eager_jit_and_donated(options: Any) -> None:
    call = example(options, "jax")
    want = expected(example(options))
    assert same_bits(np.asarray(rope_qdq_jax(*call.arrays, **options)), want)
    function = functools.partial(rope_qdq_jax, **options)
    assert same_bits(np.asarray(jax.jit(function, donate_argnums=0)(*call.arrays)), want)
    shape = jax.eval_shape(function, *example(options, "jax").arrays)
    assert (shape.shape, shape.dtype) == ((2, 3, 96), jnp.bfloat16)


# ---- plan


def on_gpu(dtype: str, shape: tuple[int, ...], stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def plan_of(options: Any, shape: tuple[int, ...], stride: Any = None, positions: str = "int32") -> Any:
    count = shape[0] if options is FP4 else int(np.prod(shape[:-1]))
    arrays = on_gpu("bfloat16", shape, stride), on_gpu("float32", (9, 64)), on_gpu(positions, (count,))
    return OPERATION.plan(OPERATION.bind(arrays, options), target=HOPPER)


def test_rows_are_not_in_the_kernel_key() -> None:
    assert len({plan_of(FP4, (rows, 32, 128)).kernel.spec for rows in (1, 7, 2**18)}) == 1
    shapes = [(1, 512), (4, 16384, 512), (2, 3, 4, 512)]
    assert len({plan_of(FP8, shape).kernel.spec for shape in shapes}) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    plans = [
        plan_of(FP4, (4, 2, 512)),
        plan_of(FP4, (4, 1, 512)),
        plan_of(FP4, (4, 2, 128)),
        plan_of(FP8, (4, 2, 512)),
        plan_of(FP4_16, (4, 2, 512)),
        plan_of(FP4, (4, 2, 512), positions="int64"),
        plan_of(FP4, (4, 2, 512), (2048, 1024, 1)),
        plan_of(FP4, (4, 2, 512), (2049, 1024, 1)),
    ]
    assert len({plan.kernel.spec for plan in plans}) == len(plans)


def test_rows_that_do_not_merge_run_the_reference() -> None:
    plan = plan_of(FP8, (4, 3, 512), (5000, 512, 1))
    assert plan.backend == "reference"
    assert "do not merge" in plan.explain()
    assert plan_of(FP8, (4, 3, 512), (3 * 576, 576, 1)).backend == "sm90"
    assert plan_of(FP4, (4, 3, 512), (5000, 700, 1)).backend == "sm90"


@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((10, 0), "sm100")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str) -> None:
    arrays = on_gpu("bfloat16", (4, 2, 512)), on_gpu("float32", (9, 64)), on_gpu("int32", (4,))
    assert OPERATION.plan(OPERATION.bind(arrays, FP4), target=Target(capability, 100)).backend == backend


def test_class_has_a_kernel_for_any_alignment(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")
    fe_runtime.configure(cache_dir=tmp_path)
    try:
        arrays = on_gpu("bfloat16", (4, 2, 128)), on_gpu("float32", (9, 64)), on_gpu("int32", (4,))
        op = RopeQDQInplace(*arrays, **FP4)
        op.compile()
        op.compile()
    finally:
        fe_runtime.configure(cache_dir=None)
    assert "x_alignment = 16" in op.explain()
    assert op._unaligned is not None
    assert "x_alignment = 2" in op._unaligned.explain()


def test_a_kernel_by_name_needs_a_gpu() -> None:
    with pytest.raises(NotSupportedError, match="rope_qdq_inplace: backend must have a kernel"):
        rope_qdq_inplace(*example().arrays, backend="sm90", **FP4)
