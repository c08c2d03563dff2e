"""The front door of ``tail_rope`` on the CPU: contract, frameworks, class, registered op, JAX entry, plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from naive_rope import bfloats, same_bits, tables
from naive_rope import tail_rope as naive

from fe_rope import TailRoPEForward, tail_rope, tail_rope_jax
from fe_rope.tail_rope import CONTRACT, OPERATION
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls


def run(arrays: Any, options: Any) -> Any:
    return tail_rope(*arrays, **options)


def example(framework: str = "numpy", shape: tuple[int, ...] = (2, 3, 96)) -> Call:
    rng = np.random.default_rng(0)
    arrays = bfloats(rng, shape), *tables(rng, (shape[0], 32))
    return Call(tuple(to_framework(array, framework) for array in arrays), {})


# ---- the contract's rows of errors


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, example()), ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "tail_rope", call)


@pytest.mark.parametrize("argument", range(3), ids=CONTRACT.input_names)
def test_operand_that_is_no_tensor(argument: int) -> None:
    arrays: list[Any] = list(example().arrays)
    arrays[argument] = arrays[argument].tolist()
    text = f"tail_rope: {CONTRACT.input_names[argument]} must be an array"
    with pytest.raises(TypeError, match=text):
        tail_rope(*arrays)
    with pytest.raises(TypeError, match=text):
        TailRoPEForward(*arrays, np.empty((2, 3, 96), arrays[0].dtype if argument else arrays[1].dtype))


@pytest.mark.parametrize("shape", [(96,), (2, 62), (2, 65), (2, 3, 67), (2, 0, 64)], ids=str)
def test_rank_channels_or_heads_that_are_not_supported(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, bfloats(np.random.default_rng(0), (1,)).dtype)
    table = np.zeros((shape[0], 32), np.float32)
    with pytest.raises(NotImplementedError, match="tail_rope: x must "):
        tail_rope(x, table, table)


def test_a_token_of_two_to_the_31_channels() -> None:
    x = TensorDesc.of("bfloat16", (1, 2**22, 512))
    table = TensorDesc.of("float32", (1, 32))
    with pytest.raises(NotImplementedError, match=r"tail_rope: x must .*fewer than 2\^31 channels"):
        TailRoPEForward(x, table, table, x).check_support()


def test_strides_are_refused_as_the_peer_refuses_them() -> None:
    """NotImplementedError when declared, ValueError when executed."""
    x, cosine, sine = example().arrays
    wide = np.zeros((2, 64), np.float32)[:, ::2]
    with pytest.raises(NotImplementedError, match=r"tail_rope: cosine must be contiguous .*strides"):
        tail_rope(x, wide, sine)
    out = np.empty_like(x)
    op = TailRoPEForward(x, cosine, sine, out)
    op.compile()
    with pytest.raises(ValueError, match="tail_rope: sine must be contiguous"):
        op.execute(x, cosine, wide, out)
    with pytest.raises(ValueError, match="tail_rope: out must be contiguous"):
        op.execute(x, cosine, sine, np.empty((2, 3, 192), x.dtype)[..., ::2])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("x", np.zeros((2, 4, 96))),
        ("x", np.zeros((2, 3, 98))),
        ("x", np.zeros((2, 96))),
        ("cosine", np.zeros((3, 32))),
        ("out", np.zeros((2, 3, 94))),
    ],
    ids=["heads", "channels", "rank", "tokens", "out"],
)
def test_operands_that_differ_from_the_plan(argument: str, value: Any) -> None:
    x, cosine, sine = example().arrays
    operands: dict[str, Any] = {"x": x, "cosine": cosine, "sine": sine, "out": np.empty_like(x)}
    op = TailRoPEForward(**operands)
    op.compile()
    operands[argument] = value.astype(operands[argument].dtype)
    if argument == "x":
        operands["out"] = np.empty_like(operands["x"])
    with pytest.raises(ValueError, match="tail_rope: "):
        op.execute(**operands)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_required_gradient_is_refused(grad_mode: bool) -> None:
    x, cosine, sine = example("torch").arrays
    op = TailRoPEForward(x, cosine, sine, torch.empty_like(x))
    op.compile()
    with torch.set_grad_enabled(grad_mode):
        with pytest.raises(ValueError, match="tail_rope: sine must not require a gradient"):
            tail_rope(x, cosine, sine.clone().requires_grad_())  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="tail_rope: x must not require a gradient"):
            op.execute(x.clone().requires_grad_(), cosine, sine, torch.empty_like(x))  # type: ignore[union-attr]


def test_output_that_overlaps_an_input() -> None:
    x, cosine, sine = example().arrays
    op = TailRoPEForward(x, cosine, sine, np.empty_like(x))
    op.compile()
    before = x.copy()
    with pytest.raises(ValueError, match="tail_rope: out must not share memory with x"):
        op.execute(x, cosine, sine, x)
    assert same_bits(x, before)


def test_execute_before_compile() -> None:
    x, cosine, sine = example().arrays
    op = TailRoPEForward(x, cosine, sine, np.empty_like(x))
    with pytest.raises(NotCompiledError):
        op.execute(x, cosine, sine, np.empty_like(x))
    with pytest.raises(RuntimeError):
        op.execute(x, cosine, sine, np.empty_like(x))


@pytest.mark.parametrize("backend", ["cudnn", "", "Frost"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match="tail_rope: backend must be one of"):
        tail_rope(*example().arrays, backend=backend)


@pytest.mark.parametrize("backend", ["frost", "auto", "reference"])
def test_backends_of_the_cpu(backend: str) -> None:
    assert tail_rope(*example().arrays, backend=backend)["out"].shape == (2, 3, 96)


def test_a_kernel_by_name_needs_a_gpu() -> None:
    with pytest.raises(NotSupportedError, match="tail_rope: backend must have a kernel"):
        tail_rope(*example().arrays, backend="sm90")


# ---- values and frameworks


@settings(max_examples=25, deadline=None)
@given(valid_calls(CONTRACT, extents={"D": (64, 66, 96), "T": (0, 1, 2), "...": (1, 2)}))
def test_valid_calls_give_what_the_naive_loop_gives(call: Call) -> None:
    result = tail_rope(*call.arrays)
    assert list(result.keys()) == ["out"]
    assert result["out"].flags.c_contiguous
    assert same_bits(result["out"], np.ascontiguousarray(naive(*call.arrays)))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_give_numpys_bits(framework: str) -> None:
    want = tail_rope(*example().arrays)["out"]
    out = tail_rope(*example(framework).arrays)["out"]
    assert same_bits(to_numpy(out), want)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_writes_what_the_wrapper_returns(framework: str) -> None:
    x, cosine, sine = example(framework).arrays
    want = tail_rope(x, cosine, sine)["out"]
    out = np.empty_like(want) if framework == "numpy" else torch.empty_like(want)
    op = TailRoPEForward(x, cosine, sine, out)
    assert op.scratch_workspace_bytes() == 0
    op.compile()
    result = op.execute(x, cosine, sine, out)
    assert result["out"] is out
    assert list(result.keys()) == ["out"]
    assert same_bits(to_numpy(out), to_numpy(want))


def test_class_takes_descriptors_and_any_number_of_tokens() -> None:
    x, table = TensorDesc.of("bfloat16", (4, 2, 64)), TensorDesc.of("float32", (4, 32))
    op = TailRoPEForward(x, table, table, x)
    op.compile()
    for tokens in (0, 1, 9):
        arrays = example(shape=(tokens, 2, 64)).arrays
        out = np.empty_like(arrays[0])
        op.execute(*arrays, out)
        assert same_bits(out, naive(*arrays))


def test_opcheck_and_one_graph() -> None:
    arrays = example("torch").arrays
    tail_rope(*arrays)
    torch.library.opcheck(torch.ops.fe_rope.tail_rope.default, arrays, {})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, cosine: Any, sine: Any) -> Any:
        return tail_rope(x + 0, cosine, sine)["out"]

    assert torch.equal(model(*arrays), tail_rope(*arrays)["out"])


def test_jax_entry_eager_jit_and_shapes() -> None:
    arrays = example("jax").arrays
    want = tail_rope(*example().arrays)["out"]
    assert same_bits(np.asarray(tail_rope_jax(*arrays)), want)
    assert same_bits(np.asarray(jax.jit(tail_rope_jax)(*arrays)), want)
    shape = jax.eval_shape(tail_rope_jax, *arrays)
    assert (shape.shape, shape.dtype) == ((2, 3, 96), jnp.bfloat16)
    with pytest.raises(ValueError, match="tail_rope: stream must be None for JAX arrays"):
        tail_rope(*arrays, stream=0)


# ---- plan


def on_gpu(shape: tuple[int, ...], dtype: str = "bfloat16", stride: Any = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, stride, device="cuda:0")


def kernel_of(shape: tuple[int, ...], stride: Any = None) -> Any:
    table = on_gpu((shape[0], 32), "float32")
    kernel = OPERATION.plan(OPERATION.bind((on_gpu(shape, stride=stride), table, table), {}), target=HOPPER).kernel
    assert kernel is not None
    return kernel


def test_tokens_are_not_in_the_kernel_key() -> None:
    for shape in ((512,), (1, 512), (64, 512), (3, 66)):
        assert len({kernel_of((tokens, *shape)).spec for tokens in (1, 2, 77, 2**20)}) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    shapes = [(4, 512), (4, 1, 512), (4, 2, 512), (4, 2, 128), (4, 2, 66)]
    strides = [(2048, 1024, 1), (2049, 512, 1)]
    specs = [kernel_of(shape).spec for shape in shapes] + [kernel_of((4, 2, 512), s).spec for s in strides]
    assert len(set(specs)) == len(specs)


def test_strides_between_tokens_and_heads_need_no_copy() -> None:
    """Slices of a packed projection, heads transposed to the front, a rank of four whose middle merges."""
    for shape, stride in [
        ((8, 4, 128), (12 * 128, 128, 1)),
        ((8, 4, 128), (128, 8 * 128, 1)),
        ((8, 128), (576, 1)),
        ((8, 2, 3, 128), (6 * 128, 3 * 128, 128, 1)),
    ]:
        assert kernel_of(shape, stride).copies == ()
    assert kernel_of((8, 2, 3, 128), (4096, 1024, 256, 1)).copies == ("x",)


def test_class_refuses_what_would_be_copied() -> None:
    x = np.zeros((2, 4, 6, 64), example().arrays[0].dtype)[:, :, :3]  # type: ignore[union-attr]
    table = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="tail_rope: x must have leading dimensions that merge"):
        TailRoPEForward(x, table, table, np.empty(x.shape, x.dtype)).check_support()


@pytest.mark.parametrize(("capability", "backend"), [((8, 0), "sm80"), ((9, 0), "sm90"), ((10, 0), "sm100")])
def test_architectures_with_a_kernel(capability: tuple[int, int], backend: str) -> None:
    table = on_gpu((4, 32), "float32")
    bound = OPERATION.bind((on_gpu((4, 512)), table, table), {})
    assert OPERATION.plan(bound, target=Target(capability, 100)).backend == backend


def test_gpus_without_kernels_run_the_reference() -> None:
    table = on_gpu((4, 32), "float32")
    bound = OPERATION.bind((on_gpu((4, 512)), table, table), {})
    assert OPERATION.plan(bound, target=Target((7, 5), 40)).backend == "reference"
