"""The wrapper form: results, backends, prepared calls, streams. A stand-in takes the place of compiled kernels."""

from __future__ import annotations

import concurrent.futures
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from fe_dummy import CONTRACT, OPERATION, StandInLoader, find_kernel, reference, scale_rows

from fe_runtime import operation as module
from fe_runtime.compile import cache_clear
from fe_runtime.compile.toolchain import ToolchainError
from fe_runtime.contract import ANY_LAYOUT, Contract, Input, Output, OutputSpec
from fe_runtime.errors import FallbackWarning, InvalidArgumentError, NotCompiledError, NotSupportedError
from fe_runtime.operation import Operation
from fe_runtime.plan import NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import (
    Accumulation,
    Call,
    assert_close,
    assert_rejected,
    guarded,
    invalid_calls,
    poisoned_memory,
    strided_array,
)
from fe_runtime.tuple_dict import TupleDict

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)
W = RANDOM.standard_normal(8).astype(np.float32)


def tensors(rows: int = 4, channels: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.arange(rows * channels, dtype=torch.float32).reshape(rows, channels) / 8
    return made.to(dtype), torch.full((channels,), 0.5, dtype=dtype)


# The reference on the host


def test_the_result_reads_like_a_dict_and_unpacks_like_a_tuple() -> None:
    result = scale_rows(X, W, scale=2)
    assert type(result) is TupleDict
    assert list(result.keys()) == ["y", "total"]
    y, total = result
    np.testing.assert_array_equal(y, X * W * np.float32(2))
    assert total is result["total"]


def test_the_reference_runs_outside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast torch would make 16-bit products of the fp32 ones that a reference means."""
    seen = []

    def spy(*arrays: Any, **options: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
        return reference(*arrays, **options)

    monkeypatch.setattr(OPERATION, "run_reference", spy)
    with torch.autocast("cpu", torch.bfloat16):
        scale_rows(*tensors(3))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(False, torch.float32)]


def test_an_output_that_is_not_produced_is_none() -> None:
    y, total = scale_rows(X, W, total=False)
    assert y.shape == X.shape
    assert total is None


def test_numpy_and_torch_agree() -> None:
    from_numpy = scale_rows(X, W, W)
    from_torch = scale_rows(torch.from_numpy(X), torch.from_numpy(W), torch.from_numpy(W))
    assert isinstance(from_torch["y"], torch.Tensor)
    np.testing.assert_array_equal(from_numpy["y"], from_torch["y"].numpy())
    exact = from_numpy["y"].astype(np.float64).reshape(6, 8)
    sums = Accumulation(additions=5, magnitude=np.abs(exact).sum(0))
    for result in (from_numpy, from_torch):
        assert_close(result["total"], exact.sum(0), roundings=0, accumulation=sums)


def test_the_reference_gets_canonical_shapes_and_bound_options() -> None:
    seen: dict[str, Any] = {}

    def spy(*arrays: Any, **options: Any) -> Any:
        seen.update(shapes=[None if a is None else a.shape for a in arrays], options=options)
        return reference(*arrays, **options)

    spied = Operation("fe_dummy_spy", CONTRACT, spy, find_kernel)
    spied((X, W[None, :], None, None), {"group": np.int64(4), "out_dtype": np.float16})
    assert seen["shapes"] == [(2, 3, 8), (8,), None, None]
    assert seen["options"] == {"scale": 1.0, "group": 4, "total": True, "mode": "plain", "out_dtype": "float16"}


def test_the_host_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_STRICT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_rows(X, W)
        scale_rows(torch.from_numpy(X), torch.from_numpy(W), backend="reference")


def test_a_kernel_asked_for_by_name_on_the_host() -> None:
    with pytest.raises(
        NotSupportedError, match="scale_rows: backend must have a kernel for this call; got 'sm90': the"
    ):
        scale_rows(X, W, backend="sm90")


@pytest.mark.parametrize(("backend", "kind"), [(None, TypeError), ("gpu", InvalidArgumentError)])
def test_a_wrong_backend(backend: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="scale_rows: backend must be "):
        scale_rows(X, W, backend=backend)


def test_empty_rows() -> None:
    y, total = scale_rows(X[:0], W)
    assert (y.shape, total.tolist()) == ((0, 3, 8), [0.0] * 8)


# What is refused


EXAMPLE = Call(
    (X, W, W.copy(), np.zeros((8, 8, 2), np.int32)),
    {"scale": 1.5, "group": 2, "total": True, "mode": "plain", "out_dtype": None},
)


@pytest.mark.parametrize("call", invalid_calls(CONTRACT, EXAMPLE), ids=lambda call: call.id)
def test_invalid_calls(call: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "scale_rows", call)


def test_a_descriptor_has_no_data() -> None:
    for x in (X, torch.from_numpy(X)):
        with pytest.raises(TypeError, match="scale_rows: weight must be an array with data; got a TensorDesc"):
            scale_rows(x, TensorDesc.of("float32", (8,)))


class Foreign:
    """An array of a framework that nobody here knows."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __dlpack__(self, **_: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_other_dlpack_producers_are_sent_to_the_class() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"x must be a torch, JAX or numpy array; got unknown\. Use the class"
    ):
        scale_rows(Foreign(X), Foreign(W))


# Kernels


def test_a_kernel_gets_present_operands_in_its_own_shapes(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors(6)
    y, total = scale_rows(x.reshape(2, 3, 8), weight[:, None], scale=3)
    (operands,) = pretended_gpu.launches
    assert [tuple(o.shape) for o in operands[:-1]] == [(6, 8), (8,), (6, 8), (8,)]
    assert operands[-1] == 3.0
    assert operands[0].data_ptr() == x.data_ptr()
    assert tuple(y.shape) == (2, 3, 8)
    torch.testing.assert_close(y.reshape(6, 8), x * weight * 3, rtol=0, atol=0)
    torch.testing.assert_close(total, (x * weight * 3).sum(0), rtol=0, atol=0)


def test_absent_operands_are_left_out(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    scale_rows(x, weight, weight, total=False)
    assert len(pretended_gpu.launches[0]) == 5  # x, weight, bias, y, scale
    assert scale_rows(x, weight, total=False)["total"] is None
    assert len(pretended_gpu.launches[1]) == 4


def test_rows_that_do_not_merge_are_copied(pretended_gpu: StandInLoader) -> None:
    x = torch.arange(48.0).reshape(2, 3, 8)[:, :2]
    y, _ = scale_rows(x, torch.ones(8))
    assert tuple(pretended_gpu.launches[0][0].shape) == (4, 8)
    torch.testing.assert_close(y, x, rtol=0, atol=0)


def test_fp8_operands_are_presented_as_bytes(pretended_gpu: StandInLoader) -> None:
    from fe_runtime.launch import present

    made = torch.arange(8.0).to(torch.float8_e4m3fn)
    seen = present(made, (2, 4), "float8_e4m3fn")
    assert (seen.dtype, tuple(seen.shape), seen.data_ptr()) == (torch.uint8, (2, 4), made.data_ptr())
    packed = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert present(packed, (16,), "float4_e2m1fn").dtype == torch.uint8
    assert present(np.zeros(4, np.uint8), (2, 2), "float8_e8m0fnu").shape == (2, 2)


def test_outputs_are_written_completely(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    with poisoned_memory():
        result = scale_rows(x, weight)
    assert all(bool(torch.isfinite(value).all()) for value in result)


def test_a_missing_write_would_show(pretended_gpu: StandInLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInLoader, "_launch", lambda *_: None)
    with poisoned_memory():
        result = scale_rows(*tensors())
    assert all(bool(torch.isnan(value).all()) for value in result)


@pytest.mark.parametrize("total", [True, False])
def test_empty_extents_launch_and_load_nothing(pretended_gpu: StandInLoader, total: bool) -> None:
    _, weight = tensors()
    y, summed = scale_rows(torch.empty(0, 8), weight, total=total)
    assert (pretended_gpu.requests, pretended_gpu.launches) == ([], [])
    assert tuple(y.shape) == (0, 8)
    assert (summed is None) == (not total)
    assert summed is None or summed.tolist() == [0.0] * 8


# Falling back


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_a_fallback_warns_once_and_computes(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    with pytest.warns(FallbackWarning, match="mode 'exotic' has no kernel. Use mode='plain'") as caught:
        y = scale_rows(x, weight, mode="exotic")["y"]
    assert caught[0].filename == __file__
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_rows(x, weight, mode="exotic")
    assert pretended_gpu.requests == []


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_strict_mode_counts_from_one_call_to_the_next(
    pretended_gpu: StandInLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = tensors()
    with pytest.warns(FallbackWarning):
        scale_rows(x, weight, mode="exotic")
    monkeypatch.setenv("FE_STRICT", "1")
    with pytest.raises(NotSupportedError) as caught:
        scale_rows(x, weight, mode="exotic")
    assert (caught.value.reason, caught.value.found) == ("mode 'exotic' has no kernel", (9, 0))
    scale_rows(x, weight)
    scale_rows(x, weight, mode="exotic", backend="reference")
    monkeypatch.setenv("FE_STRICT", "0")
    scale_rows(x, weight, mode="exotic")


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_without_a_compiler_the_reference_serves(pretended_gpu: StandInLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors()
    pretended_gpu.error = ToolchainError("nvidia-cutlass-dsl is not installed. Run: pip install it.")
    with pytest.warns(FallbackWarning, match="scale_rows: runs the reference on the GPU: nvidia-cutlass-dsl is not"):
        y = scale_rows(x, weight)["y"]
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)
    with pytest.raises(ToolchainError):
        scale_rows(x, weight, backend="sm90")
    monkeypatch.setenv("FE_STRICT", "1")
    with pytest.raises(NotSupportedError, match="got 'auto': nvidia-cutlass-dsl is not installed"):
        scale_rows(x, weight)
    pretended_gpu.error = None  # installed meanwhile
    scale_rows(x, weight)
    assert len(pretended_gpu.launches) == 1


def test_a_kernel_that_must_not_be_compiled_now_does_not_fall_back(pretended_gpu: StandInLoader) -> None:
    pretended_gpu.error = NotCompiledError("scale_rows: no compiled kernel")
    with pytest.raises(NotCompiledError):
        scale_rows(*tensors())


# Prepared calls


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch, pretended_gpu: StandInLoader) -> list[object]:
    """The signatures that were prepared."""
    prepared: list[object] = []
    prepare = Operation._prepare

    def spy(self: Operation, arrays: Any, options: Any, backend: str, key: object) -> Any:
        prepared.append(key)
        return prepare(self, arrays, options, backend, key)

    monkeypatch.setattr(Operation, "_prepare", spy)
    return prepared


def test_a_warm_call_is_not_prepared_again(preparations: list[object], pretended_gpu: StandInLoader) -> None:
    for number in range(3):
        x, weight = tensors()
        y = scale_rows(x + number, weight)["y"]
        torch.testing.assert_close(y, (x + number) * weight, rtol=0, atol=0)
    assert len(preparations) == 1
    assert len(pretended_gpu.launches) == 3


def test_clearing_the_cache_forgets_prepared_calls(preparations: list[object], pretended_gpu: StandInLoader) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    scale_rows(x, weight)
    made = len(preparations)
    cache_clear("fe_other.operation")
    scale_rows(x, weight)
    assert len(preparations) == made
    cache_clear(OPERATION.qualified_name)
    scale_rows(x, weight)
    assert len(preparations) == made + 1


def test_dynamic_extents_and_scalars_do_not_ask_for_another_kernel(pretended_gpu: StandInLoader) -> None:
    for rows in range(1, 101):
        scale_rows(*tensors(rows), scale=rows / 7)
    assert len(pretended_gpu.compiled) == 1


def test_each_signature_gets_its_own_kernel(preparations: list[object], pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    odd = torch.arange(33.0)[1:].reshape(4, 8)
    double = torch.arange(64.0).reshape(4, 16)[:, :8]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, weight), {}),
        ((x, weight, weight), {}),
        ((x.bfloat16(), weight), {}),
        ((x, weight.bfloat16()), {}),
        ((x[:3], weight), {}),
        ((odd, weight), {}),
        ((double, weight), {}),
        ((x, weight), {"total": False}),
        ((x, weight), {"scale": 2.0}),
        ((x, weight), {"out_dtype": torch.bfloat16}),
        ((x, weight), {"backend": "sm90"}),
    ]
    for order in (calls, calls[::-1]):
        for arguments, keywords in order:
            y = scale_rows(*arguments, **keywords)["y"]
            want = arguments[0].float() * arguments[1].float() * keywords.get("scale", 1.0)
            want = want if len(arguments) < 3 else want + arguments[2]
            torch.testing.assert_close(y, want.to(y.dtype), rtol=0, atol=0)
    assert len(preparations) == len(set(preparations)) == len(calls)
    aligned = {dict(spec.config)["aligned"] for spec in pretended_gpu.compiled}
    assert aligned == {4, 16}


def test_the_number_of_prepared_calls_is_bounded(pretended_gpu: StandInLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREPARED", 5)
    for rows in range(1, 20):
        scale_rows(*tensors(rows))
        assert len(OPERATION._prepared) <= 5


def test_a_prepared_call_keeps_no_tensor(pretended_gpu: StandInLoader) -> None:
    import gc
    import weakref

    x, weight = tensors()
    watch = weakref.ref(x), weakref.ref(weight)
    scale_rows(x, weight)
    pretended_gpu.launches.clear()
    del x, weight
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


@pytest.mark.parametrize(("name", "value"), [("scale", [1.0]), ("mode", ["plain"]), ("group", {})])
def test_an_unhashable_option_gets_the_right_error(pretended_gpu: StandInLoader, name: str, value: Any) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=f"scale_rows: {name} must be a Python"):
            scale_rows(*tensors(), **{name: value})


def test_a_warm_call_does_not_excuse_an_equal_value_of_the_wrong_kind(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    scale_rows(x, weight, group=1, total=True, scale=1.0)
    for wrong in ({"group": True}, {"total": 1}, {"scale": True}):
        with pytest.raises(TypeError):
            scale_rows(x, weight, **{"group": 1, **wrong})


def test_options_are_told_apart_by_name(pretended_gpu: StandInLoader) -> None:
    x, weight = tensors()
    OPERATION((x, weight, None, None), {"scale": 2})
    y = OPERATION((x, weight, None, None), {"group": 2})["y"]
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)


@pytest.mark.parametrize("value", [[1.0], "x", None, 3])
def test_a_warm_operation_still_refuses(pretended_gpu: StandInLoader, value: Any) -> None:
    x, weight = tensors()
    scale_rows(x, weight)
    with pytest.raises(TypeError, match="scale_rows: weight must be an array"):
        scale_rows(x, value)


def test_a_class_named_tensor_is_not_taken_for_torchs(pretended_gpu: StandInLoader) -> None:
    class Tensor:
        pass

    with pytest.raises(TypeError, match="scale_rows: x must be an array"):
        scale_rows(Tensor(), tensors()[1])


def test_threads_share_prepared_calls(pretended_gpu: StandInLoader) -> None:
    def work(number: int) -> bool:
        x, weight = tensors(1 + number % 4)
        y = scale_rows(x, weight, scale=1.0 + number)["y"]
        return torch.equal(y, x * weight * (1.0 + number))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(200)))


# Streams


@pytest.mark.parametrize("stream", ["0", 1.0, object(), True])
def test_a_stream_of_the_wrong_kind(stream: Any) -> None:
    for arrays in ((X, W), (torch.from_numpy(X), torch.from_numpy(W))):
        with pytest.raises(TypeError, match="scale_rows: stream must be None, a "):
            scale_rows(*arrays, stream=stream)


@pytest.mark.parametrize("stream", [0, 1, 7])
def test_on_the_host_a_stream_has_no_meaning(stream: int) -> None:
    np.testing.assert_array_equal(scale_rows(X, W, stream=stream)["y"], X * W)


def test_a_stream_of_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    arrays = (jax.numpy.asarray(X), jax.numpy.asarray(W), None, None)
    with pytest.raises(InvalidArgumentError, match=r"stream must be None for JAX arrays; got 0\. Leave it out: XLA"):
        OPERATION.resolve_stream(0, arrays)


# The registry


def test_every_operation_is_listed() -> None:
    assert module.OPERATIONS["fe_dummy.scale_rows"] is OPERATION
    assert (OPERATION.name, OPERATION.qualified_name) == ("scale_rows", "fe_dummy.scale_rows")


def test_without_a_gpu_nothing_is_remembered() -> None:
    before = len(OPERATION._prepared)
    scale_rows(X, W)
    scale_rows(torch.from_numpy(X), torch.from_numpy(W))
    assert len(OPERATION._prepared) == before


def test_strided_and_guarded_inputs() -> None:
    x = guarded((4, 8), "float32", stride=(11, 1), values=X.reshape(6, 8)[:4], alignment=4)
    weight = guarded((8,), "float32", values=W)
    np.testing.assert_array_equal(scale_rows(x.array, weight.array)["y"], X.reshape(6, 8)[:4] * W)
    x.check_unchanged()
    weight.check_unchanged()
    broadcast = strided_array((4, 8), (0, 1), "float32", X[0, 0])
    np.testing.assert_array_equal(scale_rows(broadcast, W)["y"], np.broadcast_to(X[0, 0] * W, (4, 8)))


def test_the_plan_is_asked_with_the_target_of_the_call() -> None:
    bound = OPERATION.bind((TensorDesc.of("float32", (4, 8)), TensorDesc.of("float32", (8,)), None, None), {})
    made = OPERATION.plan(bound, target=Target((12, 0), 1))
    assert (made.backend, made.kernel) == ("sm120", find_kernel(bound, Target((12, 0), 1)))


# What a reference returns


def test_reference_results_are_contiguous_and_views_of_nothing() -> None:
    contract = Contract(
        "turned",
        inputs=(Input("x", "N M", ("float32",), ANY_LAYOUT),),
        outputs=(Output("y", lambda bound: OutputSpec((bound.dim("N"), bound.dim("M")), "float32")),),
    )
    operation = Operation("fe_dummy", contract, lambda x: (x,), lambda bound, target: NoKernel("there is none", ""))
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    y = operation((turned,), {})["y"]
    assert y.flags.c_contiguous
    np.testing.assert_array_equal(y, turned)
    x = torch.from_numpy(turned).requires_grad_(False)
    y = operation((x,), {})["y"]
    assert y.is_contiguous()
    assert not y._is_view()
    assert torch.equal(y, x)
