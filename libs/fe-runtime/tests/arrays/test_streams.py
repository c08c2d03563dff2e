"""Every form in which a caller names a stream: on stand-ins here, on a GPU further down."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fe_runtime.arrays import StreamRequest, default_stream, on_default_stream, on_stream, resolve_stream, streams
from fe_runtime.device import Device

CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)


class Stream:
    """A stand-in for ``torch.cuda.Stream``, which cannot be made without a GPU."""

    def __init__(self, handle: int, index: int = 0) -> None:
        self.cuda_stream = handle
        self.device = torch.device("cuda", index)


class ExternalStream(Stream):
    def __init__(self, handle: int, device: str) -> None:
        super().__init__(handle, torch.device(device).index)


class Protocol:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class DriverStream:
    """Like the driver binding's ``CUstream``: an ``__int__`` and nothing else."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __int__(self) -> int:
        return self.handle


class OneNumber:
    """An array of one element has an ``__int__`` too."""

    dtype = np.dtype("int64")

    def __int__(self) -> int:
        return 7


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch whose current stream is a side stream, 0xC0; ``log`` notes what the guards do."""
    log: list[object] = []

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        log.append(("enter", stream.cuda_stream))
        yield
        log.append(("exit", stream.cuda_stream))

    class Tensor:
        is_cuda = True

        def record_stream(self, stream: Stream) -> None:
            log.append(("record", stream.cuda_stream))

    cuda = SimpleNamespace(
        Stream=Stream,
        ExternalStream=ExternalStream,
        default_stream=lambda device: Stream(0, torch.device(device).index),
        current_stream=lambda device: Stream(0xC0, torch.device(device).index),
        stream=entered,
    )
    module = SimpleNamespace(Stream=Stream, Tensor=Tensor, cuda=cuda, log=log)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def handle_and_class(request: StreamRequest | None) -> tuple[int, type]:
    assert request is not None
    assert isinstance(request.torch_stream, Stream)
    assert request.torch_stream.cuda_stream == request.handle
    assert request.torch_stream.device == torch.device(str(request.device))
    return request.handle, type(request.torch_stream)


class TestForms:
    @pytest.mark.parametrize("framework", ["torch", "jax", "numpy", "unknown"])
    def test_none_leaves_the_choice_to_the_framework(self, framework: str) -> None:
        assert resolve_stream(None, framework, CUDA0) is None

    @pytest.mark.parametrize(
        "stream",
        [
            pytest.param(0x70, id="int"),
            pytest.param(np.uint64(0x70), id="numpy int"),
            pytest.param(DriverStream(0x70), id="CUstream"),
            pytest.param(Protocol(0x70), id="protocol"),
        ],
    )
    def test_raw_handles(self, fake_torch: SimpleNamespace, stream: object) -> None:
        assert handle_and_class(resolve_stream(stream, "torch", CUDA1)) == (0x70, ExternalStream)
        for framework in ("jax", "unknown"):
            assert resolve_stream(stream, framework, CUDA1) == StreamRequest(0x70, CUDA1)

    def test_the_drivers_own_stream_class(self) -> None:
        driver = pytest.importorskip("cuda.bindings.driver")  # not a dependency of ours
        assert resolve_stream(driver.CUstream(0x70), "unknown", CUDA0) == StreamRequest(0x70, CUDA0)

    def test_the_handle_of_torchs_current_stream_is_that_stream(self, fake_torch: SimpleNamespace) -> None:
        assert handle_and_class(resolve_stream(0xC0, "torch", CUDA0)) == (0xC0, Stream)

    def test_torch_stream(self, fake_torch: SimpleNamespace) -> None:
        stream = Stream(0x70, 1)
        request = resolve_stream(stream, "torch", CUDA1)
        assert request == StreamRequest(0x70, CUDA1, stream)
        assert resolve_stream(stream, "unknown", CUDA1) == StreamRequest(0x70, CUDA1)

    @pytest.mark.parametrize("framework", ["torch", "unknown"])
    def test_torch_stream_of_another_device(self, fake_torch: SimpleNamespace, framework: str) -> None:
        rule = r"current_stream must belong to the operands' device cuda:1; got a stream of cuda:0"
        with pytest.raises(ValueError, match=rule):
            resolve_stream(Stream(0x70, 0), framework, CUDA1, "current_stream")

    @pytest.mark.parametrize("stream", [0, 1, DriverStream(1), Protocol(0), Stream(0)])
    def test_the_legacy_default_stream_is_torchs_default_stream(
        self, fake_torch: SimpleNamespace, stream: object
    ) -> None:
        # Never an external stream around 0, and not the same as None: torch's current stream is another one here.
        assert handle_and_class(resolve_stream(stream, "torch", CUDA0)) == (0, Stream)
        assert resolve_stream(stream, "unknown", CUDA0) == StreamRequest(0, CUDA0)

    def test_the_per_thread_default_stream(self, fake_torch: SimpleNamespace) -> None:
        with pytest.raises(ValueError, match="stream must not be handle 2"):
            resolve_stream(2, "torch", CUDA0)
        assert resolve_stream(2, "unknown", CUDA0) == StreamRequest(2, CUDA0)

    def test_negative_handles(self) -> None:
        with pytest.raises(ValueError, match="handle >= 0; got -1"):
            resolve_stream(-1, "unknown", CUDA0)

    @pytest.mark.parametrize(
        "wrong",
        ["0", True, 1.0, Decimal(1), [0], (0, 1), object(), np.float32(1), np.bool_(True), np.ones(1), OneNumber()],
    )
    def test_anything_else_is_a_type_error(self, wrong: object) -> None:
        for framework in ("torch", "unknown"):
            with pytest.raises(TypeError, match="resolve_stream: stream must be None, a torch"):
                resolve_stream(wrong, framework, CUDA0)

    def test_without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert resolve_stream(5, "unknown", CUDA0) == StreamRequest(5, CUDA0)
        with pytest.raises(TypeError):
            resolve_stream("5", "unknown", CUDA0)


class TestHostOperands:
    """Host arrays have nothing to order, but a wrong stream fails as it would on a GPU."""

    def test_valid_handles_are_ignored(self) -> None:
        for framework in ("torch", "numpy"):
            assert resolve_stream(0, framework, Device("cpu")) is None
            assert resolve_stream(DriverStream(7), framework, Device("cpu")) is None

    def test_errors_are_the_same(self, fake_torch: SimpleNamespace) -> None:
        with pytest.raises(TypeError):
            resolve_stream("0", "torch", Device("cpu"))
        with pytest.raises(ValueError, match="handle 2"):
            resolve_stream(2, "torch", Device("cpu"))
        with pytest.raises(ValueError, match="operands' device cpu; got a stream of cuda:0"):
            resolve_stream(Stream(0x70), "torch", Device("cpu"))

    def test_torchs_neutral_stream_class(self) -> None:
        assert resolve_stream(torch.Stream("cpu"), "torch", Device("cpu")) is None
        with pytest.raises(ValueError, match="a stream of cpu"):
            resolve_stream(torch.Stream("cpu"), "torch", CUDA0)


class TestGuard:
    def test_without_a_request_nothing_happens(self, fake_torch: SimpleNamespace) -> None:
        with on_stream(None, [fake_torch.Tensor()]) as guard:
            guard.record([fake_torch.Tensor()])
        assert fake_torch.log == []

    def test_operands_are_recorded_before_the_block_and_outputs_on_demand(self, fake_torch: SimpleNamespace) -> None:
        operands = [fake_torch.Tensor(), None, fake_torch.Tensor()]
        with on_stream(resolve_stream(0x70, "torch", CUDA0), operands) as guard:
            fake_torch.log.append("launch")
            guard.record([fake_torch.Tensor()])
        record, inside = ("record", 0x70), ["launch", ("record", 0x70)]
        assert fake_torch.log == [record, record, ("enter", 0x70), *inside, ("exit", 0x70)]

    def test_foreign_arrays_use_the_launch_environment(self) -> None:
        tvm_ffi: Any = pytest.importorskip("tvm_ffi")  # only on Linux
        device = tvm_ffi.device("cuda:0")
        before = tvm_ffi.get_raw_stream(device)
        with on_stream(StreamRequest(0x70, CUDA0)):
            assert tvm_ffi.get_raw_stream(device) == 0x70
        assert tvm_ffi.get_raw_stream(device) == before


def test_default_stream(fake_torch: SimpleNamespace) -> None:
    assert default_stream("torch", CUDA0) == 0xC0
    assert default_stream("torch", Device("cpu")) == 0
    assert default_stream("jax", CUDA0) == 0
    assert default_stream("unknown", CUDA0) == 0


MILLISECONDS = 2_000_000  # clock cycles in about one; torch.cuda._sleep counts cycles


def test_default_stream_is_set_for_frameworks_without_a_current_one(monkeypatch):
    entered, seen = [], []
    monkeypatch.setattr(streams, "_current", lambda request: entered.append(request) or nullcontext())
    on_default_stream(lambda *operands: seen.append(operands), "cuda:1")(1, 2)
    assert seen == [(1, 2)]
    assert entered == [StreamRequest(0, CUDA1)]


def test_default_stream_of_the_cpu_is_nothing():
    def run():
        return None

    assert on_default_stream(run, "cpu") is run


@pytest.mark.gpu
class TestOnGpu:
    def device(self) -> Device:
        return Device("cuda", torch.cuda.current_device())

    def test_every_form_runs_on_that_stream(self) -> None:
        side = torch.cuda.Stream()
        neutral = torch.Stream(device="cuda")
        for form in (side, side.cuda_stream, DriverStream(side.cuda_stream), Protocol(side.cuda_stream)):
            with on_stream(resolve_stream(form, "torch", self.device())):
                assert torch.cuda.current_stream().cuda_stream == side.cuda_stream
        with on_stream(resolve_stream(neutral, "torch", self.device())):
            assert torch.cuda.current_stream().stream_id == neutral.stream_id
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    @pytest.mark.parametrize("legacy", [0, 1])
    def test_explicit_default_overrides_a_side_stream(self, legacy: int) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            with on_stream(resolve_stream(legacy, "torch", self.device())):
                assert torch.cuda.current_stream() == torch.cuda.default_stream()
            assert torch.cuda.current_stream() == side
            with on_stream(resolve_stream(None, "torch", self.device())):
                assert torch.cuda.current_stream() == side
            assert default_stream("torch", self.device()) == side.cuda_stream

    def test_a_delayed_producer_on_the_side_stream_is_waited_for(self) -> None:
        side = torch.cuda.Stream()
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50 * MILLISECONDS)
            x.fill_(3)
        with on_stream(resolve_stream(side.cuda_stream, "torch", self.device()), [x]):
            y = x * 2
        side.synchronize()
        assert y.eq(6).all()

    def test_memory_freed_right_after_the_call_is_not_reused_early(self) -> None:
        side = torch.cuda.Stream()
        request = resolve_stream(side, "torch", self.device())
        for round_number in range(20):
            x = torch.full((1 << 20,), float(round_number), device="cuda")
            torch.cuda.synchronize()
            with on_stream(request, [x]):
                torch.cuda._sleep(2 * MILLISECONDS)
                y = x + 0
            del x  # its block must not go to the next allocation while the side stream still has to read it
            vandal = torch.full((1 << 20,), float("nan"), device="cuda")
            side.synchronize()
            assert y.eq(round_number).all()
            del vandal

    def test_the_guard_is_needed(self) -> None:
        """The stress above detects reuse: without recording, the allocator hands the block out again."""
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # no other free block may fit better
        x = torch.zeros(1 << 24, device="cuda")
        pointer = x.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * MILLISECONDS)
            x + 0
        del x
        reused = torch.empty(1 << 24, device="cuda").data_ptr() == pointer
        torch.cuda.synchronize()
        assert reused

    def test_state_is_restored_after_an_error(self) -> None:
        side = torch.cuda.Stream()
        with pytest.raises(KeyError), on_stream(resolve_stream(side, "torch", self.device())):
            raise KeyError
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    def test_another_device_than_the_current_one(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        other = Device("cuda", 1)
        side = torch.cuda.Stream(device=1)
        with pytest.raises(ValueError, match="a stream of cuda:1"):
            resolve_stream(side, "torch", CUDA0)
        with torch.cuda.device(0):
            for form in (side, side.cuda_stream):
                with on_stream(resolve_stream(form, "torch", other)):
                    assert torch.cuda.current_device() == 1
                    assert torch.cuda.current_stream(1) == side
                assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)

    def test_in_a_thread_without_a_context(self) -> None:
        side = torch.cuda.Stream()
        x = torch.ones(1024, device="cuda")
        torch.cuda.synchronize()
        results: list[torch.Tensor] = []

        def work() -> None:
            with on_stream(resolve_stream(side.cuda_stream, "torch", CUDA0), [x]):
                results.append(x + 1)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        side.synchronize()
        assert results[0].eq(2).all()

    def test_capture_on_a_side_stream(self) -> None:
        x = torch.ones(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            request = resolve_stream(torch.cuda.current_stream(), "torch", self.device())
            with on_stream(request, [x]):
                y = x * 2
        x.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(10).all()
