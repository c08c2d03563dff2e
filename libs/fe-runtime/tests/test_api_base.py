"""The class form: check_support, compile, execute. A stand-in takes the place of compiled kernels."""

from __future__ import annotations

import concurrent.futures
import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fe_dummy import CONTRACT, OPERATION, ScaleRows, StandInLoader

from fe_runtime import api_base
from fe_runtime.api_base import APIBase
from fe_runtime.compile.toolchain import ToolchainError
from fe_runtime.contract import Contract, Input, Option, Output, OutputSpec
from fe_runtime.errors import FallbackWarning, InvalidArgumentError, NotCompiledError, NotSupportedError
from fe_runtime.operation import Operation
from fe_runtime.plan import NoKernel
from fe_runtime.tensor_desc import TensorDesc
from fe_runtime.testing import guarded

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)
W = RANDOM.standard_normal(8).astype(np.float32)
Y, TOTAL = np.empty_like(X), np.empty_like(W)


def made(x: Any = X, weight: Any = W, y: Any = Y, total: Any = TOTAL, bias: Any = None, **options: Any) -> ScaleRows:
    return ScaleRows(x, weight, y, total, bias, **options)


def compiled(*samples: Any, **options: Any) -> ScaleRows:
    op = made(*samples, **options)
    op.compile()
    return op


def on_gpu(shape: tuple[int, ...] = (4, 8), dtype: str = "float32", **where: Any) -> tuple[TensorDesc, ...]:
    """Descriptors of x, weight, y and total."""
    device = where.pop("device", "cuda:0")
    channels = shape[-1:]
    return (
        TensorDesc.of(dtype, shape, where.pop("stride", None), device),
        TensorDesc.of(dtype, channels, device=device),
        TensorDesc.of(dtype, shape, device=device),
        TensorDesc.of("float32", channels, device=device),
    )


def tensors(rows: int = 4, channels: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight, and poisoned y and total."""
    x = (torch.arange(rows * channels, dtype=torch.float32).reshape(rows, channels) / 8).to(dtype)
    poison = torch.full((rows, channels), float("nan"), dtype=dtype)
    return x, torch.full((channels,), 0.5, dtype=dtype), poison, torch.full((channels,), float("nan"))


# The life of an object


def test_the_whole_life() -> None:
    op = made(scale=2.0)
    assert op.check_support() is True
    assert op.check_support() is True
    assert op.compile() is None
    assert op.compile() is None
    y, total = np.empty_like(X), np.empty_like(W)
    assert op.execute(X, W, y, total) is None
    np.testing.assert_array_equal(y, X * W * np.float32(2))
    np.testing.assert_allclose(total, y.reshape(6, 8).sum(0), rtol=2**-20)
    assert op.scratch_workspace_bytes() == 0
    assert op.explain() == "scale_rows: backend reference"


def test_execute_before_compile() -> None:
    op = made()
    op.check_support()
    for kind in (NotCompiledError, RuntimeError, ValueError):
        with pytest.raises(kind, match=r"ScaleRows: execute needs a compiled object\. Call compile\(\) first\."):
            op.execute(X, W, Y, TOTAL)


def test_the_life_is_logged_under_the_class_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="ScaleRows"):
        compiled()
        checked = made()
        checked.check_support()
        checked.compile()
        checked.compile()
    found = [(record.name, record.levelname) for record in caplog.records if record.name == "ScaleRows"]
    assert found == [("ScaleRows", "INFO"), ("ScaleRows", "DEBUG"), ("ScaleRows", "DEBUG")]


def test_calling_compiles_when_needed() -> None:
    op, y = made(), np.empty_like(X)
    assert op(X, W, y, TOTAL) is None
    np.testing.assert_array_equal(y, X * W)
    op(X * 2, W, y, TOTAL)
    np.testing.assert_array_equal(y, X * 2 * W)


def test_resolved_options_become_attributes() -> None:
    op = made()
    assert op.group is None
    op.check_support()
    assert op.group == 8


def test_a_base_object_has_no_execute() -> None:
    op = APIBase(OPERATION, (X, W, None, None), (Y, TOTAL), {})
    with pytest.raises(NotImplementedError):
        op.execute()


# Construction


def test_construction_checks_nothing_but_kinds() -> None:
    op = made(X, np.ones(7, np.float32))
    with pytest.raises(InvalidArgumentError, match="scale_rows: weight must have shape"):
        op.check_support()
    with pytest.raises(InvalidArgumentError, match="scale_rows: weight must have shape"):
        op.compile()
    with pytest.raises(NotCompiledError):
        op.execute(X, W, Y, TOTAL)
    with pytest.raises(TypeError, match="scale_rows: x must be an array"):
        made([1.0])
    with pytest.raises(TypeError, match="scale_rows: y must be an array"):
        made(y=[1.0])


def test_a_required_sample_may_not_be_absent() -> None:
    with pytest.raises(TypeError, match="scale_rows: weight must be an array"):
        made(weight=None).check_support()
    with pytest.raises(InvalidArgumentError, match="scale_rows: total must be an array of shape"):
        made(total=None).check_support()


@pytest.mark.parametrize(("options", "kind"), [({"scale": "1"}, TypeError), ({"group": 3}, InvalidArgumentError)])
def test_options_are_checked_by_check_support(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        made(**options).check_support()


def test_samples_are_not_kept_alive() -> None:
    x, weight, y, total = tensors()
    watch = [weakref.ref(t) for t in (x, weight, y, total)]
    op = ScaleRows(x, weight, y, total)
    del x, weight, y, total
    gc.collect()
    assert [ref() for ref in watch] == [None] * 4
    op.compile()
    operands = tensors()
    watch = [weakref.ref(t) for t in operands]
    op.execute(*operands)
    del operands
    gc.collect()
    assert [ref() for ref in watch] == [None] * 4


def test_descriptors_and_arrays_may_be_mixed() -> None:
    op = made(TensorDesc.of("float32", X.shape), W, TensorDesc.of("float32", X.shape), TOTAL)
    op.compile()
    y = np.empty_like(X)
    op.execute(X, W, y, TOTAL)
    np.testing.assert_array_equal(y, X * W)


# What execute refuses


def test_a_changed_dtype() -> None:
    op = compiled()
    with pytest.raises(
        InvalidArgumentError, match=r"scale_rows: x must have the compiled dtype float32; got float16\."
    ):
        op.execute(X.astype(np.float16), W, Y, TOTAL)


def test_a_changed_static_extent() -> None:
    op = compiled()
    x, y = np.ones((4, 9), np.float32), np.ones((4, 9), np.float32)
    with pytest.raises(InvalidArgumentError, match=r"scale_rows: x must have the compiled extent C = 8; got C = 9\."):
        op.execute(x, x[0], y, y[0].copy())


def test_the_extent_is_blamed_on_an_argument_that_has_it() -> None:
    contract = Contract(
        "op",
        (Input("x", "...", ("float32",)), Input("w", "K", ("float32",))),
        (Output("y", lambda b: OutputSpec(b.batch, "float32")),),
    )
    operation = Operation("fe_dummy_extent", contract, lambda x, w: (x,), lambda b, t: NoKernel("none"))
    op = APIBase(operation, (X, W), (Y,), {})
    op.compile()
    with pytest.raises(InvalidArgumentError, match="op: w must have the compiled extent K = 8; got K = 9"):
        op._execute((X, np.ones(9, np.float32)), (Y,))


def test_changed_presence() -> None:
    with pytest.raises(InvalidArgumentError, match="scale_rows: bias must be absent as in the compiled signature"):
        compiled().execute(X, W, Y, TOTAL, W)
    with pytest.raises(
        InvalidArgumentError, match="scale_rows: bias must be an array as in the compiled signature; got N"
    ):
        compiled(bias=W).execute(X, W, Y, TOTAL)


def test_dynamic_extents_and_ranks_may_change() -> None:
    op = compiled()
    for shape in [(5, 8), (8,), (2, 2, 2, 8), (0, 8)]:
        x = RANDOM.standard_normal(shape).astype(np.float32)
        y, total = np.full_like(x, np.nan), np.full_like(W, np.nan)
        op.execute(x, W, y, total)
        np.testing.assert_array_equal(y, x * W)
        np.testing.assert_allclose(total, y.reshape(-1, 8).sum(0), rtol=2**-18, atol=2**-20)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": [1.0]}, "x must be an array"),
        ({"x": X.astype(np.int32)}, "x must have dtype"),
        ({"weight": np.ones((2, 4), np.float32)}, "weight must have shape"),
        ({"y": Y[:1]}, r"y must have shape \(2, 3, 8\); got shape \(1, 3, 8\)"),
        ({"y": None}, "y must be an array of shape"),
        ({"y": Y.astype(np.float64)}, "y must have dtype float32"),
        ({"y": np.empty((2, 3, 16), np.float32)[..., ::2]}, "y must be contiguous"),
        ({"total": [0.0]}, "total must be an array"),
        ({"y": torch.empty(2, 3, 8)}, "y must come from the framework of the inputs"),
        ({"x": TensorDesc.of("float32", (2, 3, 8))}, "x must be an array with data; got a TensorDesc"),
        ({"y": TensorDesc.of("float32", (2, 3, 8))}, "y must be an array with data; got a TensorDesc"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value[:20],
)
def test_live_operands_are_checked_and_nothing_is_written(change: dict[str, Any], text: str) -> None:
    op = compiled()
    outputs = {name: guarded(a.shape, "float32", name=name) for name, a in (("y", X), ("total", W))}
    operands: dict[str, Any] = {"x": X, "weight": W, **{name: g.array for name, g in outputs.items()}}
    with pytest.raises((TypeError, ValueError), match=f"scale_rows: {text}"):
        op.execute(**{**operands, **change})
    for output in outputs.values():
        output.check_unchanged()


def test_only_the_outputs_are_written() -> None:
    x = guarded((4, 8), "float32", stride=(9, 1), values=X.reshape(6, 8)[:4], alignment=4, name="x")
    weight = guarded((8,), "float32", values=W, name="weight")
    y, total = guarded((4, 8), "float32", alignment=4, name="y"), guarded((8,), "float32", name="total")
    compiled().execute(x.array, weight.array, y.array, total.array)
    for each in (x, weight):
        each.check_unchanged()
    for each in (y, total):
        each.check_surroundings()
    np.testing.assert_array_equal(y.array, x.array * W)


class Foreign:
    """Some other producer of DLPack."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **protocol: Any) -> Any:
        return self.array.__dlpack__(**protocol)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_the_reference_cannot_serve_other_dlpack_producers() -> None:
    op = compiled(*map(Foreign, (X, W, Y, TOTAL)))
    rule = "be a torch or numpy array where no kernel serves the call"
    with pytest.raises(InvalidArgumentError, match=f"scale_rows: x must {rule}; got another DLPack producer on cpu"):
        op.execute(*map(Foreign, (X, W, Y, TOTAL)))


# Overlap


def test_an_output_may_not_overlap_an_input_or_another_output() -> None:
    op = compiled()
    x = X.copy()
    before = x.copy()
    with pytest.raises(
        InvalidArgumentError, match="scale_rows: y must not share memory with x; got overlapping arrays"
    ):
        op.execute(x, W, x, TOTAL)
    np.testing.assert_array_equal(x, before)
    y = np.zeros_like(X)
    with pytest.raises(InvalidArgumentError, match="scale_rows: total must not share memory with y"):
        op.execute(X, W, y, y[1, 2])
    buffer = np.zeros(40, np.float32)
    with pytest.raises(InvalidArgumentError, match="scale_rows: y must not share memory with weight"):
        op.execute(X[0, 0], buffer[30:38], buffer[24:32], TOTAL)


def test_overlap_is_found_behind_dlpack_and_on_later_calls() -> None:
    op = ScaleRows(*tensors())
    op.compile()
    x, weight, y, total = tensors()
    op.execute(x, weight, y, total)
    alias = torch.from_dlpack(x)
    with pytest.raises(InvalidArgumentError, match="y must not share memory with x"):
        op.execute(x, weight, alias, total)


def test_inputs_may_overlap_and_outputs_may_be_neighbours() -> None:
    op = compiled()
    buffer = np.zeros(16, np.float32)
    x = np.broadcast_to(W, (1, 8))
    op.execute(x, W, buffer[None, :8], buffer[8:])
    np.testing.assert_array_equal(buffer[:8], W * W)


# Backends


def test_a_kernel_asked_for_on_the_host() -> None:
    with pytest.raises(NotSupportedError, match="which has no kernels"):
        made(backend="sm90").check_support()
    with pytest.raises(InvalidArgumentError, match="backend must be one of"):
        made(backend="cuda").check_support()


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_check_support_says_that_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPERATION, "find_kernel", lambda bound, target: NoKernel("C is 8", "Use C = 16."))
    op = ScaleRows(*on_gpu())
    with pytest.warns(FallbackWarning, match="scale_rows: runs the reference on the GPU: C is 8") as caught:
        assert op.check_support() is True
    assert caught[0].filename == __file__
    assert op.explain() == "scale_rows: backend reference\n  no kernel: C is 8. Use C = 16."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ScaleRows(*on_gpu()).check_support()
    monkeypatch.setenv("FE_STRICT", "1")
    with pytest.raises(NotSupportedError, match="C is 8"):
        ScaleRows(*on_gpu()).check_support()
    ScaleRows(*on_gpu(), backend="reference").check_support()
    with pytest.raises(NotSupportedError, match="C is 8"):
        ScaleRows(*on_gpu(), backend="sm90").check_support()


def test_compiling_needs_descriptors_only(loader: StandInLoader) -> None:
    op = ScaleRows(*on_gpu(dtype="bfloat16"))
    assert op.check_support()
    assert loader.requests == []
    for _ in range(3):
        op.compile()
    (spec,) = loader.requests
    assert dict(spec.config)["dtype"] == "bfloat16"
    assert op.explain().startswith("scale_rows: backend sm90\n  architecture sm_90a")


@pytest.mark.usefixtures("fallback_not_yet_warned")
def test_without_a_compiler_the_object_runs_the_reference(pretended_gpu: StandInLoader) -> None:
    pretended_gpu.error = ToolchainError("nvidia-cutlass-dsl is not installed.")
    op, (x, weight, y, total) = ScaleRows(*tensors()), tensors()
    with pytest.warns(FallbackWarning, match="nvidia-cutlass-dsl is not installed"):
        op.compile()
    assert "backend reference" in op.explain()
    op.execute(x, weight, y, total)
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)
    with pytest.raises(ToolchainError):
        ScaleRows(*tensors(), backend="sm90").compile()


# Kernels


def test_a_kernel_writes_into_the_callers_outputs(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors())
    op.compile()
    for rows in (4, 9, 4, 1):
        x, weight, y, total = tensors(rows)
        op.execute(x, weight, y, total)
        torch.testing.assert_close(y, x * weight, rtol=0, atol=0)
        torch.testing.assert_close(total, (x * weight).sum(0), rtol=0, atol=0)
        assert pretended_gpu.launches[-1][2].data_ptr() == y.data_ptr()
    assert len(pretended_gpu.requests) == 1


def test_a_warm_execute_checks_once_per_signature(
    pretended_gpu: StandInLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ScaleRows(*tensors())
    op.compile()
    admitted = []
    admit = APIBase._admit
    monkeypatch.setattr(APIBase, "_admit", lambda self, *rest: admitted.append(1) or admit(self, *rest))
    for rows in (4, 4, 5, 4, 5):
        op.execute(*tensors(rows))
    assert len(admitted) == 2
    monkeypatch.setattr(api_base, "MAX_LAUNCHES", 3)
    for rows in range(1, 9):
        op.execute(*tensors(rows))
        assert len(op._launches) <= 3


def test_the_overlap_of_a_known_signature_is_still_found(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors())
    op.compile()
    x, weight, y, total = tensors()
    op.execute(x, weight, y, total)
    with pytest.raises(InvalidArgumentError, match="y must not share memory with x"):
        op.execute(x, weight, x, total)
    assert len(pretended_gpu.launches) == 1


def test_worse_aligned_operands_are_refused_and_better_ones_run(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors())
    op.compile()
    x, weight, y, total = tensors()
    unaligned = torch.zeros(33)[1:].reshape(4, 8)
    rule = "must be as the compiled signature: rows aligned to 16 bytes; got 4 bytes"
    with pytest.raises(InvalidArgumentError, match=f"scale_rows: x {rule}"):
        op.execute(unaligned, weight, y, total)
    with pytest.raises(InvalidArgumentError, match=f"scale_rows: y {rule}"):
        op.execute(x, weight, unaligned, total)
    assert pretended_gpu.launches == []

    narrow = ScaleRows(unaligned, weight, y, total)
    narrow.compile()
    narrow.execute(x, weight, y, total)
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)
    assert [dict(spec.config)["aligned"] for spec in pretended_gpu.requests] == [16, 4]


def test_an_unaligned_output_sample_compiles_a_narrower_kernel(pretended_gpu: StandInLoader) -> None:
    x, weight, _, total = tensors()
    ScaleRows(x, weight, torch.zeros(34)[2:].reshape(4, 8), total).compile()
    assert dict(pretended_gpu.requests[0].config)["aligned"] == 8


def test_rows_that_do_not_merge_would_need_a_copy(pretended_gpu: StandInLoader) -> None:
    rule = "x must have leading dimensions that merge into rows of one stride"
    x, weight = torch.zeros(2, 3, 8)[:, :2], torch.ones(8)
    with pytest.raises(
        InvalidArgumentError, match=rf"scale_rows: {rule}; got shape \(2, 2, 8\) with strides \(24, 8, 1\)"
    ):
        ScaleRows(x, weight, torch.zeros(2, 2, 8), torch.zeros(8)).check_support()
    op = ScaleRows(*tensors())
    op.compile()
    with pytest.raises(InvalidArgumentError, match=rule):
        op.execute(x, weight, torch.zeros(2, 2, 8), torch.zeros(8))


def test_empty_rows_launch_nothing(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors())
    op.compile()
    x, weight, y, total = tensors(0)
    op.execute(x, weight, y, total)
    assert pretended_gpu.launches == []
    assert total.tolist() == [0.0] * 8
    x, weight, y, total = tensors(3)  # and the object still works
    op.execute(x, weight, y, total)
    torch.testing.assert_close(y, x * weight, rtol=0, atol=0)


def test_empty_rows_of_another_layout_launch_nothing_either(pretended_gpu: StandInLoader) -> None:
    """An empty array's strides say nothing: they may well name another kernel."""
    op = ScaleRows(*tensors())
    op.compile()
    _, weight, y, total = tensors(0)
    with pytest.raises(InvalidArgumentError, match="rows aligned to"):
        op.execute(torch.zeros(3, 9)[:, :8], weight, *tensors(3)[2:])
    op.execute(torch.zeros(0, 9)[:, :8], weight, y, total)
    assert pretended_gpu.launches == []


def test_empty_samples_compile_the_kernel_for_later(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors(0))
    op.compile()
    x, weight, y, total = tensors(3)
    op.execute(x, weight, y, total)
    assert len(pretended_gpu.launches) == 1


def test_operands_on_another_kind_of_device(loader: StandInLoader) -> None:
    op = ScaleRows(*on_gpu())
    op.compile()
    with pytest.raises(InvalidArgumentError, match=r"x must be on a device of the compiled kind \(cuda\); got cpu\."):
        op.execute(*tensors())


def test_concurrent_execution(pretended_gpu: StandInLoader) -> None:
    op = ScaleRows(*tensors(), scale=3.0)
    op.compile()

    def work(number: int) -> bool:
        x, weight, y, total = tensors(1 + number % 5)
        op.execute(x + number, weight, y, total)
        return torch.equal(y, (x + number) * weight * 3)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(200)))


# Options that follow from the samples


def chunk_sums(x: Any, *, rows: int) -> tuple[Any]:
    return (x.reshape(-1, rows, x.shape[-1]).sum(1),)


CHUNKS = Operation(
    "fe_dummy_chunks",
    Contract(
        "chunk_sums",
        (Input("x", "M C", ("float32",)),),
        (Output("y", lambda b: OutputSpec((b.dim("M") // int(b.options["rows"]), b.dim("C")), "float32")),),  # type: ignore[call-overload]
        (Option("rows", int, None, resolve=lambda b: 4 if b.dim("M") % 4 == 0 else 1),),
        dynamic=("M",),
    ),
    chunk_sums,
    lambda bound, target: NoKernel("none"),
)


def test_an_object_keeps_what_it_resolved() -> None:
    op = APIBase(CHUNKS, (np.ones((6, 3), np.float32),), (np.ones((6, 3), np.float32),), {})
    op.compile()
    x, y = RANDOM.standard_normal((8, 3)).astype(np.float32), np.empty((8, 3), np.float32)
    op._execute((x,), (y,))  # another object would resolve rows = 4 here
    np.testing.assert_array_equal(y, x)


# Streams, interpreter flags


@pytest.mark.parametrize("stream", ["0", object(), 1.5])
def test_a_stream_of_the_wrong_kind(stream: Any) -> None:
    y = np.full_like(X, 7)
    with pytest.raises(TypeError, match="scale_rows: current_stream must be None, a "):
        compiled().execute(X, W, y, TOTAL, current_stream=stream)
    assert (y == 7).all()


OPTIMISED = """
import sys
sys.path.insert(0, {support!r})
import numpy as np
from fe_dummy import ScaleRows, scale_rows
from fe_runtime.errors import InvalidArgumentError, NotCompiledError
assert False, "asserts must be off"
x, w = np.ones((4, 8), np.float32), np.ones(8, np.float32)
y, total = np.empty_like(x), np.empty_like(w)
def expect(kind, call):
    try:
        call()
    except kind:
        return
    print("not raised:", kind)
    sys.exit(1)
op = ScaleRows(x, w, y, total)
expect(NotCompiledError, lambda: op.execute(x, w, y, total))
expect(TypeError, lambda: scale_rows([1.0], w))
expect(InvalidArgumentError, lambda: scale_rows(x, w[:7]))
expect(InvalidArgumentError, lambda: scale_rows(x, w, scale=-1.0))
expect(InvalidArgumentError, lambda: ScaleRows(x, w[:7], y, total).check_support())
op.compile()
expect(InvalidArgumentError, lambda: op.execute(x, w, x, total))
expect(InvalidArgumentError, lambda: op.execute(x, w, y[:2], total))
op.execute(x, w, y, total)
sys.exit(0 if (y == 1).all() and (total == 4).all() else 2)
"""


def test_checks_do_not_depend_on_asserts() -> None:
    code = OPTIMISED.format(support=str(Path(__file__).parent / "support"))
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_peers_door() -> None:
    from fe_runtime.api_base import TensorDesc as FromDoor
    from fe_runtime.api_base import TupleDict

    assert FromDoor is TensorDesc
    assert TupleDict.__module__ == "fe_runtime.tuple_dict"
    assert CONTRACT.operation == "scale_rows"
