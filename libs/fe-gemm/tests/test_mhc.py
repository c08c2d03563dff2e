"""The front door of ``mhc_projection_backward`` on the CPU: contract, frameworks, class, registered op, JAX, plan."""

from __future__ import annotations

import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fe_gemm.mhc import (
    CONTRACT,
    OPERATION,
    MhcProjectionBackward,
    find_kernel,
    mhc_projection_backward,
    mhc_projection_backward_jax,
)
from fe_runtime import NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.contract import Sample
from fe_runtime.device import Device
from fe_runtime.jax.in_place import in_place_launch
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy, valid_calls

BF16 = ml_dtypes.bfloat16
NAMES = ("x", "weight", "grad_proj", "grad_r", "r")
PEER = {"x": (4096, 20480), "weight": (24, 20480), "grad_proj": (4096, 32), "grad_r": (4096, 1), "r": (4096, 1)}


def run(arrays: Any, options: Any) -> Any:
    return mhc_projection_backward(*arrays, **options)


def example(framework: str = "numpy", m: int = 6, n: int = 3, columns: int = 32, padding: int = 2) -> Call:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, columns)).astype(BF16)
    others = [rng.standard_normal(shape) for shape in ((n, columns), (m, n + padding), (m, 1))]
    others.append(0.5 + rng.random((m, 1)))
    arrays = [x, *(array.astype(np.float32) for array in others)]
    return Call(tuple(to_framework(array, framework) for array in arrays), {"allow_tf32": True})


def outputs(call: Call) -> tuple[Any, Any]:
    """Empty outputs for a call."""
    x, weight = call.arrays[:2]
    empty = torch.empty_like if isinstance(x, torch.Tensor) else np.empty_like
    return empty(x), empty(weight)  # type: ignore[operator]


def formula(x: Any, weight: Any, grad_proj: Any, grad_r: Any, r: Any) -> tuple[Any, Any]:
    x, weight, p, grad_r, r = (np.asarray(a, np.float64) for a in (x, weight, grad_proj[:, : len(weight)], grad_r, r))
    return grad_r / (r * x.shape[1]) * x + p @ weight, p.T @ x


INVALID = [call for call in invalid_calls(CONTRACT, example()) if call.argument != "allow_tf32"]
"""Anything but True means no for ``allow_tf32``, whatever its kind: see below."""


@pytest.mark.parametrize("call", INVALID, ids=lambda call: call.id)
def test_invalid_call_is_rejected(call: Any) -> None:
    assert_rejected(run, "mhc_projection_backward", call)


def positive(name: str, shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> Any:
    values = random.standard_normal(shape)
    return (0.5 + np.abs(values) if name == "r" else values).astype(np.dtype(dtype))


@settings(max_examples=60, deadline=None)
@given(
    valid_calls(
        CONTRACT,
        extents={"M": (0, 1, 2, 17), "Kc": (8, 16, 40), "N": (1, 3, 24), "Np": (24, 25, 32)},
        options={"allow_tf32": (True,)},
        values=positive,
    )
)
def test_valid_calls_give_what_the_contract_says(call: Call) -> None:
    result = run(*call)
    assert list(result.keys()) == ["dx", "dweight"]
    for output, want, step in zip(result, formula(*call.arrays), (2.0**-8, 2.0**-18), strict=True):
        assert output.shape == want.shape
        np.testing.assert_allclose(
            output.astype(np.float64), want, rtol=step, atol=step * (np.abs(want).max(initial=0))
        )
    assert (result["dx"].dtype, result["dweight"].dtype) == (BF16, np.float32)


# --- one test for each row of the contract's table of errors -------------------------------------------------------


def made(call: Call, **options: Any) -> MhcProjectionBackward:
    return MhcProjectionBackward(*call.arrays, *outputs(call), **{**call.options, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cudnn", "triton", "FROST", ""])
def test_unknown_backend(backend: str) -> None:
    call = example()
    with pytest.raises(ValueError, match="mhc_projection_backward: backend must be one of"):
        mhc_projection_backward(*call.arrays, allow_tf32=True, backend=backend)
    with pytest.raises(ValueError, match="mhc_projection_backward: backend must be one of"):
        made(call, backend=backend).check_support()


@pytest.mark.parametrize("backend", ["frost", "auto", "reference"])
def test_known_backends(backend: str) -> None:
    call = example()
    assert mhc_projection_backward(*call.arrays, allow_tf32=True, backend=backend)["dx"].shape == (6, 32)
    assert made(call, backend=backend).check_support() is True


@pytest.mark.parametrize("value", [False, None, 0, 1, "yes", np.True_], ids=repr)
def test_allow_tf32_is_exactly_true(value: Any) -> None:
    call = example()
    with pytest.raises(NotImplementedError, match="mhc_projection_backward: allow_tf32 must be True"):
        mhc_projection_backward(*call.arrays, allow_tf32=value)
    with pytest.raises(NotImplementedError, match="allow_tf32"):
        made(call, allow_tf32=value).check_support()


def test_allow_tf32_is_no_default() -> None:
    with pytest.raises(NotImplementedError, match="allow_tf32"):
        mhc_projection_backward(*example().arrays)


@pytest.mark.parametrize("name", [*NAMES, "dx", "dweight"])
@pytest.mark.parametrize("fault", ["dtype", "stride", "rank"])
def test_declaring_names_the_operand_at_fault(fault: str, name: str) -> None:
    shapes = {"x": (6, 32), "weight": (3, 32), "grad_proj": (6, 5), "grad_r": (6, 1), "r": (6, 1)}
    shapes |= {"dx": (6, 32), "dweight": (3, 32)}
    bf16 = ("x", "dx")
    descs = {n: TensorDesc.of("bfloat16" if n in bf16 else "float32", shape) for n, shape in shapes.items()}
    shape = shapes[name]
    if fault == "dtype":
        descs[name] = TensorDesc.of("float16", shape)
    elif fault == "stride":
        descs[name] = TensorDesc.of(descs[name].dtype, shape, (2 * shape[1], 2) if shape[1] > 1 else (3, 1))
    else:
        descs[name] = TensorDesc.of(descs[name].dtype, (1, *shape))
    with pytest.raises(NotImplementedError, match=f"mhc_projection_backward: {name} must"):
        MhcProjectionBackward(**descs, allow_tf32=True).check_support()


@pytest.mark.parametrize("name", ["x", "weight", "grad_proj", "grad_r", "r"])
def test_wrapper_refuses_what_the_class_refuses(name: str) -> None:
    arrays = dict(zip(NAMES, example().arrays, strict=True))
    arrays[name] = arrays[name].astype(np.float16)  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError, match=f"{name} must have dtype"):
        mhc_projection_backward(**arrays, allow_tf32=True)


def test_extents() -> None:
    for change in ({"columns": 12}, {"n": 65}, {"n": 0}):
        call = example(**change)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="mhc_projection_backward: "):
            run(*call)
    x, weight, grad_proj, grad_r, r = example().arrays
    for arrays in (
        (x, weight, grad_proj[:, :2].copy(), grad_r, r),  # type: ignore[index]
        (x, weight[:, :16].copy(), grad_proj, grad_r, r),  # type: ignore[index]
        (x, weight, grad_proj, grad_r[:3], r),  # type: ignore[index]
        (x, weight, grad_proj, grad_r.reshape(-1), r),  # type: ignore[union-attr]
    ):
        with pytest.raises(ValueError, match="mhc_projection_backward: "):
            mhc_projection_backward(*arrays, allow_tf32=True)


def executed(call: Call, **changes: Any) -> Any:
    """Execute an object made for the example on other operands."""
    base = example()
    op = made(base).compile()
    dx, dweight = outputs(call)
    arguments = dict(zip(NAMES, call.arrays, strict=True)) | {"dx": dx, "dweight": dweight}
    arguments["workspace"] = np.empty(op.scratch_workspace_bytes(), np.uint8)
    return op.execute(**{**arguments, **changes})


@pytest.mark.parametrize("name", [*NAMES, "dx", "dweight"])
def test_execute_wants_the_compiled_descriptor(name: str) -> None:
    call = example()
    arguments = dict(zip((*NAMES, "dx", "dweight"), (*call.arrays, *outputs(call)), strict=True))
    array = arguments[name]
    for other in (array.astype(np.float16), array[None], np.repeat(array, 2, axis=1)[:, ::2]):  # type: ignore[union-attr, index]
        if other.shape == array.shape and other.flags.c_contiguous and other.dtype == array.dtype:  # type: ignore[union-attr]
            continue  # one column has no stride
        with pytest.raises(ValueError, match=f"{name} must .*compiled descriptor") as caught:
            executed(call, **{name: other})
        assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("change", [{"n": 4}, {"columns": 40}, {"padding": 0}], ids=str)
def test_execute_wants_the_compiled_extents(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="compiled descriptor"):
        executed(example(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [0, 1, 6, 50])
def test_execute_takes_any_number_of_rows(m: int) -> None:
    call = example(m=m)
    dx, dweight = executed(call)
    want = mhc_projection_backward(*call.arrays, allow_tf32=True)
    np.testing.assert_array_equal(dx, want["dx"])
    np.testing.assert_array_equal(dweight, want["dweight"])
    assert m or not dweight.any()


PAIRS = [(a, b) for number, b in enumerate((*NAMES, "dx", "dweight", "workspace")) for a in (*NAMES, "dx")[:number]]


@pytest.mark.parametrize(("first", "second"), [p for p in PAIRS if p[0] != p[1]])
def test_no_two_operands_overlap(first: str, second: str) -> None:
    """Inputs neither: each pair lies in one buffer, the second one starting within the first."""
    call = example()
    op = made(call).compile()
    size = op.scratch_workspace_bytes()
    dx, dweight = outputs(call)
    arguments: dict[str, Any] = dict(zip(NAMES, call.arrays, strict=True)) | {"dx": dx, "dweight": dweight}
    arguments["workspace"] = np.empty(size, np.uint8)
    buffer = np.zeros(2 * size + 4096, np.uint8)
    for name, start in ((first, 0), (second, arguments[first].nbytes - 4)):
        old = arguments[name]
        new = buffer[start : start + old.nbytes].view(old.dtype).reshape(old.shape)
        new[...] = 1
        arguments[name] = new
    with pytest.raises(ValueError, match=f"mhc_projection_backward: .*{first}.*") as caught:
        op.execute(**arguments)
    assert second in str(caught.value)
    if second in NAMES:
        with pytest.raises(ValueError, match="not share memory"):
            mhc_projection_backward(*(arguments[name] for name in NAMES), allow_tf32=True)


def test_neighbours_do_not_overlap() -> None:
    x, weight, grad_proj, *_ = example().arrays
    both = np.ones((12, 1), np.float32)
    assert mhc_projection_backward(x, weight, grad_proj, both[:6], both[6:], allow_tf32=True)


def test_framework_and_device_are_one() -> None:
    x, *others = example().arrays
    with pytest.raises(ValueError, match="mhc_projection_backward: weight must come from the framework of x"):
        mhc_projection_backward(x, torch.ones(3, 32), *others[1:], allow_tf32=True)
    descs = {name: TensorDesc.of("bfloat16" if name == "x" else "float32", shape) for name, shape in PEER.items()}
    descs["r"] = TensorDesc.of("float32", (4096, 1), device="cuda:0")
    with pytest.raises(ValueError, match="r must be on the device"):
        OPERATION.bind(tuple(descs.values()), {"allow_tf32": True})


@pytest.mark.parametrize(
    "workspace",
    [
        None,
        np.empty(0, np.uint8),
        np.empty(10, np.uint8),
        np.empty(1 << 20, np.float32),
        np.empty((1, 1 << 20), np.uint8),
        np.empty(1 << 20, np.uint8)[::2],
        [0] * 10,
        TensorDesc.of("uint8", (1 << 20,), device="cuda:0"),
    ],
    ids=["None", "empty", "short", "dtype", "rank", "stride", "list", "device"],
)
def test_unsuitable_workspace(workspace: Any) -> None:
    with pytest.raises(ValueError, match="mhc_projection_backward: workspace must"):
        executed(example(), workspace=workspace)


def test_execute_before_compile() -> None:
    call = example()
    op = made(call)
    with pytest.raises(NotCompiledError):
        op.execute(*call.arrays, *outputs(call), np.empty(op.scratch_workspace_bytes(), np.uint8))
    with pytest.raises(RuntimeError):
        op.execute(*call.arrays, *outputs(call), None)


# --- frameworks, class, registration -------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_give_numpys_values(framework: str) -> None:
    want = run(*example(m=40, columns=64))
    got = run(*example(framework, m=40, columns=64))
    for a, b, step in zip(got, want, (2.0**-7, 2.0**-18), strict=True):
        assert to_numpy(a).dtype == b.dtype
        np.testing.assert_allclose(to_numpy(a).astype(np.float64), b.astype(np.float64), rtol=step, atol=step)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_no_rows(framework: str) -> None:
    dx, dweight = map(to_numpy, run(*example(framework, m=0)))
    assert dx.shape == (0, 32)
    np.testing.assert_array_equal(dweight, np.zeros((3, 32)))


def test_ignored_columns_may_be_nan() -> None:
    call = example()
    want = run(*call)
    call.arrays[2][:, 3:] = np.nan  # type: ignore[index]
    for a, b in zip(run(*call), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_class_writes_what_the_wrapper_returns(framework: str) -> None:
    call = example(framework)
    want = run(*call)
    dx, dweight = outputs(call)
    op = MhcProjectionBackward(*call.arrays, dx, dweight, allow_tf32=True)  # type: ignore[arg-type]
    assert op.compile() is op
    size = op.scratch_workspace_bytes()
    workspace = np.empty(size, np.uint8) if framework == "numpy" else torch.empty(size, dtype=torch.uint8)
    result = op.execute(*call.arrays, dx, dweight, workspace)
    assert result["dx"] is dx
    assert result["dweight"] is dweight
    np.testing.assert_array_equal(to_numpy(dx), to_numpy(want["dx"]))
    np.testing.assert_array_equal(to_numpy(dweight), to_numpy(want["dweight"]))


def test_calling_the_object_compiles_it() -> None:
    call = example()
    op = made(call)
    dx, dweight = outputs(call)
    op(*call.arrays, dx, dweight, np.empty(op.scratch_workspace_bytes(), np.uint8))
    np.testing.assert_array_equal(dx, run(*call)["dx"])


def test_workspace_of_descriptors() -> None:
    """Sums of each split: 3 of them fill 132 multiprocessors."""
    shapes = {**PEER, "dx": PEER["x"], "dweight": PEER["weight"]}
    descs = {n: TensorDesc.of("bfloat16" if n in ("x", "dx") else "float32", shape) for n, shape in shapes.items()}
    op = MhcProjectionBackward(**descs, allow_tf32=True)
    assert op.scratch_workspace_bytes() == 3 * 24 * 20480 * 4 <= 15_728_640


def test_threads_execute_one_object_at_once() -> None:
    call = example(m=200)
    want = run(*call)
    op = made(call).compile()
    results = [outputs(call) for _ in range(4)]

    def work(result: Any) -> None:
        for _ in range(5):
            op.execute(*call.arrays, *result, np.empty(op.scratch_workspace_bytes(), np.uint8))

    threads = [threading.Thread(target=work, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dx, dweight in results:
        np.testing.assert_array_equal(dx, want["dx"])
        np.testing.assert_array_equal(dweight, want["dweight"])


def test_opcheck() -> None:
    call = example("torch")
    run(*call)
    torch.library.opcheck(torch.ops.fe_gemm.mhc_projection_backward.default, call.arrays, call.options)


def test_compiles_as_one_graph() -> None:
    call = example("torch")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Any, *others: Any) -> Any:
        dx, dweight = mhc_projection_backward(x * 2, *others, allow_tf32=True)
        return dx, dweight

    x, *others = call.arrays
    want = mhc_projection_backward(x * 2, *others, allow_tf32=True)  # type: ignore[operator]
    for got, expected in zip(model(*call.arrays), want, strict=True):
        assert torch.equal(got, expected)


def test_jax_entry_eager_and_jit() -> None:
    call = example("jax")
    want = tuple(map(to_numpy, run(*call)))

    def entry(*arrays: Any) -> Any:
        return mhc_projection_backward_jax(*arrays, allow_tf32=True)

    for result in (entry(*call.arrays), jax.jit(entry)(*call.arrays)):
        assert type(result) is tuple
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_allclose(
                np.asarray(got, np.float64), expected.astype(np.float64), rtol=2.0**-7, atol=1e-5
            )
    with pytest.raises(NotImplementedError, match="allow_tf32"):
        mhc_projection_backward_jax(*call.arrays)


def test_jax_stream_comes_from_xla() -> None:
    with pytest.raises(ValueError, match="mhc_projection_backward: current_stream must be None"):
        mhc_projection_backward(*example("jax").arrays, allow_tf32=True, current_stream=0)


# --- plan ----------------------------------------------------------------------------------------------------------


def bound_of(m: int = 4096, n: int = 24, columns: int = 20480, padded: int = 32, device: str = "cuda:0") -> Any:
    shapes = {"x": (m, columns), "weight": (n, columns), "grad_proj": (m, padded), "grad_r": (m, 1), "r": (m, 1)}
    descs = [
        TensorDesc.of("bfloat16" if name == "x" else "float32", shape, device=device) for name, shape in shapes.items()
    ]
    return OPERATION.bind(descs, {"allow_tf32": True})


def kernel_of(target: Target = HOPPER, **shape: int) -> Kernel:
    kernel = find_kernel(bound_of(**shape), target)
    assert isinstance(kernel, Kernel)
    return kernel


def test_rows_and_padding_are_not_in_the_kernel_key() -> None:
    kernels = [kernel_of(m=m, padded=padded) for m in (1, 16, 1000, 2**22) for padded in (24, 32, 33)]
    assert len({kernel.spec for kernel in kernels}) == 1
    assert len({kernel.form.scratch for kernel in kernels}) == 1


def test_what_changes_the_code_is_in_the_kernel_key() -> None:
    kernels = [kernel_of(), kernel_of(n=8), kernel_of(columns=16384), kernel_of(Target((9, 0), 114))]
    assert len({kernel.spec for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_architecture_has_a_kernel(capability: tuple[int, int]) -> None:
    assert isinstance(find_kernel(bound_of(), Target(capability, 100)), Kernel)


def test_a_weight_of_two_billion_elements_has_none() -> None:
    assert isinstance(find_kernel(bound_of(n=64, columns=2**25, padded=64), HOPPER), NoKernel)


@pytest.mark.parametrize("name", [*NAMES])
def test_operands_on_a_gpu_are_aligned(name: str) -> None:
    from fe_runtime.contract import Sample

    bound = bound_of()
    samples = [Sample(desc, "torch", 8 if other == name else 16) for other, desc in bound.arrays.items()]
    with pytest.raises(ValueError, match=f"mhc_projection_backward: {name} must .*16"):
        OPERATION.bind(samples, {"allow_tf32": True})


def test_explicit_kernel_on_the_cpu_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="mhc_projection_backward: backend"):
        mhc_projection_backward(*example().arrays, allow_tf32=True, backend="sm90")


def test_no_tokens_of_jax_cannot_zero_a_dweight_of_the_caller() -> None:
    """Nothing can write into a JAX array but a kernel, and there is nothing to launch one for."""
    shapes = {"x": (0, 64), "weight": (8, 64), "grad_proj": (0, 9), "grad_r": (0, 1), "r": (0, 1)}
    dtypes = ("bfloat16", *["float32"] * 4)
    place = Device("cuda", 0)
    samples = [
        Sample(TensorDesc.of(dtype, shape, device=place), "jax", 16)
        for dtype, shape in zip(dtypes, shapes.values(), strict=True)
    ]
    bound = OPERATION.bind(samples, {"allow_tf32": True})
    with pytest.raises(ValueError, match="dweight must have no elements if the inputs have none"):
        in_place_launch(OPERATION, bound, OPERATION.find_kernel(bound, HOPPER), lambda *_: None, wait=False)
