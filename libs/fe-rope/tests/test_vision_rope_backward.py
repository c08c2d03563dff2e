"""The front door of ``vision_rope_backward`` on the CPU: contract, frameworks, class, registered op, JAX, plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from naive_rope import bfloats, same_bits, tables
from naive_rope import vision_rope_backward as naive

from fe_rope import VisionRoPEBackward, vision_rope_backward_jax, vision_rope_backward_wrapper
from fe_rope.vision_rope_backward import CONTRACT, NATIVE, NATIVE_CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

NAME = "vision_rope_backward"


def run(arrays: Any, options: Any) -> Any:
    return vision_rope_backward_wrapper(*arrays, **options)


def example(framework: str = "numpy", tokens: int = 5, heads: int = 2, channels: int = 8) -> Call:
    """Logical gradients stored as attention leaves them."""
    stored = as_stored(tokens, heads, channels)
    arrays = [to_framework(array, framework) for array in stored]
    orders = ((1, 0, 2), (2, 0, 1), (1, 0, 2))
    move = torch.permute if framework == "torch" else jnp.transpose if framework == "jax" else np.transpose
    gradients = [move(array, order) for array, order in zip(arrays[:3], orders, strict=True)]  # type: ignore[operator]
    return Call((*gradients, *arrays[3:]), {})


def as_stored(tokens: int = 5, heads: int = 2, channels: int = 8) -> tuple[Any, ...]:
    rng = np.random.default_rng(tokens)
    shapes = (heads, tokens, channels), (heads, channels, tokens), (heads, tokens, channels)
    return (*(bfloats(rng, shape) for shape in shapes), *tables(rng, (tokens, 1, channels // 2)))


def expected(call: Call) -> Any:
    q, k, v, cosine, sine = call.arrays
    shape = q.shape[0], q.shape[2] // 2  # type: ignore[union-attr]
    return naive(q, k, v, cosine.reshape(shape), sine.reshape(shape))  # type: ignore[union-attr]


# ---- the contract's rows of errors


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, NAME, call)


@pytest.mark.parametrize("call", invalid_calls(NATIVE_CONTRACT, Call(as_stored(), {})), ids=lambda call: call.id)
def test_invalid_call_on_stored_arrays_is_rejected(call: Any) -> None:
    assert_rejected(lambda arrays, options: NATIVE(arrays, options), f"{NAME}_native", call)


@pytest.mark.parametrize("argument", range(5), ids=CONTRACT.input_names)
def test_operand_that_is_no_tensor(argument: int) -> None:
    arrays: list[Any] = list(example().arrays)
    op = VisionRoPEBackward(*arrays)
    op.compile()
    arrays[argument] = arrays[argument].tolist()
    text = f"{NAME}: {CONTRACT.input_names[argument]} must be an array"
    with pytest.raises(TypeError, match=text):
        vision_rope_backward_wrapper(*arrays)
    with pytest.raises(TypeError, match=text):
        VisionRoPEBackward(*arrays)
    with pytest.raises(TypeError, match=text):
        op.execute(*arrays, np.empty((5, 48), example().arrays[0].dtype))


def test_shapes_that_disagree() -> None:
    q, k, v, cosine, sine = example().arrays
    for broken in (
        (q[:4], k, v, cosine, sine),  # type: ignore[index]
        (q, k[:, :1], v, cosine, sine),  # type: ignore[index]
        (q, k, v[..., :6], cosine, sine),  # type: ignore[index]
        (q, k, v, cosine[:4], sine),  # type: ignore[index]
        (q, k, v, cosine[..., :3].copy(), sine[..., :3].copy()),  # type: ignore[index]
        (q[:, :0], k[:, :0], v[:, :0], cosine, sine),  # type: ignore[index]
    ):
        with pytest.raises(ValueError, match=f"{NAME}: "):
            vision_rope_backward_wrapper(*broken)


@pytest.mark.parametrize("argument", ["cosine", "sine"])
def test_strides_of_a_table(argument: str) -> None:
    arrays = dict(zip(CONTRACT.input_names, example().arrays, strict=True))
    arrays[argument] = np.repeat(arrays[argument], 2, axis=2)[..., ::2]
    with pytest.raises(ValueError, match=f"{NAME}: {argument} must be contiguous"):
        vision_rope_backward_wrapper(**arrays)


@pytest.mark.parametrize("backend", ["cudnn", "Frost"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=f"{NAME}: backend must be one of"):
        vision_rope_backward_wrapper(*example().arrays, backend=backend)


def test_output_that_overlaps_an_input_or_is_wrong() -> None:
    q, k, v, cosine, sine = example().arrays
    op = VisionRoPEBackward(q, k, v, cosine, sine)
    op.compile()
    buffer = np.zeros((5, 48), q.dtype)  # type: ignore[union-attr]
    inside = buffer.reshape(-1)[: q.size].reshape(2, 5, 8).transpose(1, 0, 2)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="grad_qkv must not share memory with grad_v"):
        op.execute(q, k, inside, cosine, sine, buffer)
    for wrong in (buffer[:4], buffer[:, :40], np.zeros((5, 96), q.dtype)[:, ::2], buffer.astype(np.float32)):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=f"{NAME}: grad_qkv must "):
            op.execute(q, k, v, cosine, sine, wrong)


def test_execute_before_compile() -> None:
    op = VisionRoPEBackward(*example().arrays)
    with pytest.raises(NotCompiledError):
        op.execute(*example().arrays, None)


def test_a_kernel_by_name_needs_a_gpu() -> None:
    with pytest.raises(NotSupportedError, match=f"{NAME}: backend must have a kernel"):
        vision_rope_backward_wrapper(*example().arrays, backend="sm90")


def test_required_gradients_are_ignored() -> None:
    arrays: list[Any] = list(example("torch").arrays)
    want = vision_rope_backward_wrapper(*arrays)["grad_qkv"]
    arrays[0] = arrays[0].detach().clone().requires_grad_()
    got = vision_rope_backward_wrapper(*arrays)["grad_qkv"]
    assert not got.requires_grad
    assert torch.equal(got, want)


# ---- values and frameworks


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(valid_calls(CONTRACT, extents={"T": (0, 1, 3), "H": (1, 2), "D": (2, 6, 8), "R": (1, 3, 4)}))
def test_valid_calls_give_what_the_naive_loop_gives(call: Call) -> None:
    result = vision_rope_backward_wrapper(*call.arrays)
    assert list(result.keys()) == ["grad_qkv"]
    assert result["grad_qkv"].flags.c_contiguous
    assert same_bits(result["grad_qkv"], expected(call))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_give_numpys_bits(framework: str) -> None:
    out = vision_rope_backward_wrapper(*example(framework).arrays)["grad_qkv"]
    assert same_bits(to_numpy(out), expected(example()))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_for_any_number_of_tokens(framework: str) -> None:
    op = VisionRoPEBackward(*example(framework, tokens=4).arrays)
    assert op.scratch_workspace_bytes() == 0
    op.compile()
    for tokens in (0, 1, 7):
        call = example(framework, tokens)
        want = expected(example(tokens=tokens))
        out = np.empty_like(want) if framework == "numpy" else torch.empty(want.shape, dtype=torch.bfloat16)
        assert op.execute(*call.arrays, out) is out
        assert same_bits(to_numpy(out), want)


def test_class_takes_descriptors() -> None:
    arrays = [TensorDesc.of("bfloat16", (4, 2, 8))] * 3 + [TensorDesc.of("float32", (4, 1, 4))] * 2
    assert VisionRoPEBackward(*arrays).check_support()


def test_opcheck_and_one_graph() -> None:
    arrays = example("torch").arrays
    vision_rope_backward_wrapper(*arrays)
    torch.library.opcheck(torch.ops.fe_rope.vision_rope_backward.default, arrays, {})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(*given: Any) -> Any:
        return vision_rope_backward_wrapper(*given)["grad_qkv"] * 1

    assert same_bits(to_numpy(model(*arrays)), expected(example()))


@pytest.mark.parametrize("table", ["(T, 1, D/2)", "(T, D/2)"])
def test_jax_entry_eager_jit_and_shapes(table: str) -> None:
    arrays = [jnp.asarray(array) for array in as_stored()]
    if table == "(T, D/2)":
        arrays[3:] = [array[:, 0] for array in arrays[3:]]
    want = expected(example())
    assert same_bits(np.asarray(vision_rope_backward_jax(*arrays)), want)
    assert same_bits(np.asarray(jax.jit(vision_rope_backward_jax)(*arrays)), want)
    shape = jax.eval_shape(vision_rope_backward_jax, *arrays)
    assert (shape.shape, shape.dtype) == ((5, 48), jnp.bfloat16)


# ---- plan


def on_gpu(dtype: str, shape: tuple[int, ...], stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def native(tokens: int, heads: int = 16, channels: int = 64) -> list[TensorDesc]:
    by_row = (channels, channels * tokens, 1)
    strides = by_row, (1, channels * tokens, tokens), by_row
    gradients = [on_gpu("bfloat16", (tokens, heads, channels), stride) for stride in strides]
    return gradients + [on_gpu("float32", (tokens, 1, channels // 2))] * 2


def config_of(arrays: list[TensorDesc], operation: Any = OPERATION) -> dict[str, Any]:
    kernel = operation.plan(operation.bind(arrays, {}), target=HOPPER).kernel
    assert kernel is not None
    assert kernel.copies == ()
    return {**dict(kernel.spec.config), "spec": kernel.spec}


def test_tokens_are_not_in_the_kernel_key() -> None:
    """Also a single token, whose strides leave the layout open, and odd numbers, whose K rows are unaligned."""
    specs = {config_of(native(tokens))["spec"] for tokens in (1, 2, 8, 31, 33, 4096, 4097, 65536)}
    assert len(specs) == 1
    config = config_of(native(4096))
    assert (config["q"], config["k"], config["v"], config["packed"]) == ("rows", "columns", "rows", True)


def test_other_layouts_are_read_as_they_are() -> None:
    arrays = native(64)
    contiguous = on_gpu("bfloat16", (64, 16, 64))
    scattered = on_gpu("bfloat16", (64, 16, 64), (2 * 64 * 16, 2 * 64, 2))
    assert config_of([contiguous] * 3 + arrays[3:])["k"] == "rows"
    assert not config_of([contiguous] * 3 + arrays[3:])["packed"]
    assert config_of([arrays[1], *arrays[1:]])["q"] == "columns"
    assert config_of([*arrays[:2], scattered, *arrays[3:]])["v"] == "scattered"
    long = native(64, 1, 2048)
    assert config_of(long)["k"] == "scattered"


def test_stored_arrays_take_the_same_code_with_their_order() -> None:
    arrays = [on_gpu("bfloat16", shape) for shape in ((16, 64, 64), (16, 64, 64), (16, 64, 64))]
    tables = [on_gpu("float32", (64, 32))] * 2
    config = config_of(arrays + tables, NATIVE)
    assert (config["q"], config["k"], config["v"], config["packed"]) == ("rows", "columns", "rows", True)
    assert (config["stored"], config["table_rank"]) == (True, 2)


@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm120")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str) -> None:
    bound = OPERATION.bind(native(64), {})
    assert OPERATION.plan(bound, target=Target(capability, 100)).backend == backend
