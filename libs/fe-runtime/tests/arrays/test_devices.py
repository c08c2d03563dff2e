"""Device facts from the driver; a stand-in driver here, the real one on a GPU."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fe_runtime.arrays import capability, cuda_is_available, device_guard, devices, get_compute_capability, sm_count
from fe_runtime.device import Device


class FakeDriver:
    """Two GPUs of capability 9.0 and 10.3; notes every call. Outputs are written through the given references."""

    FACTS = ({75: 9, 76: 0, 16: 132}, {75: 10, 76: 3, 16: 148})

    def __init__(self, init_status: int = 0) -> None:
        self.init_status = init_status
        self.calls: list[str] = []
        self.contexts: list[int] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's names
        self.calls.append("cuInit")
        return self.init_status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.FACTS)
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: ctypes.c_int) -> int:  # noqa: N802
        handle._obj.value = ordinal.value
        return 0 if 0 <= ordinal.value < len(self.FACTS) else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: ctypes.c_int) -> int:  # noqa: N802
        self.calls.append("cuDeviceGetAttribute")
        value._obj.value = self.FACTS[handle.value][attribute]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: ctypes.c_int) -> int:  # noqa: N802
        self.calls.append("cuDevicePrimaryCtxRetain")
        context._obj.value = 100 + handle.value
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts.append(context.value or 0)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = {100: b"no CUDA-capable device is detected", 101: b"invalid device ordinal"}[status]
        return 0


CACHES = (devices._driver, devices._attribute, devices._primary_context)


@pytest.fixture
def fresh() -> Iterator[None]:
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def driver(fresh: None, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: driver)
    return driver


@pytest.fixture
def no_driver(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)


class TestFacts:
    @pytest.mark.parametrize("device", [1, "cuda:1", Device("cuda", 1), torch.device("cuda", 1)])
    def test_of_the_device_that_was_named(self, driver: FakeDriver, device: object) -> None:
        assert capability(device) == (10, 3)
        assert sm_count(device) == 148

    def test_asked_once_per_device(self, driver: FakeDriver) -> None:
        for _ in range(3):
            assert (capability(0), sm_count("cuda:0")) == ((9, 0), 132)
            assert capability(1) == (10, 3)
        assert driver.calls.count("cuInit") == 1
        assert driver.calls.count("cuDeviceGetAttribute") == 5

    def test_no_context_is_made(self, driver: FakeDriver) -> None:
        capability(0)
        sm_count(1)
        assert cuda_is_available()
        assert "cuDevicePrimaryCtxRetain" not in driver.calls

    def test_a_device_without_index_is_the_current_one(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert capability("cuda") == (10, 3)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert capability("cuda") == (9, 0)

    def test_peer_name(self) -> None:
        assert get_compute_capability is capability


class TestErrors:
    def test_not_a_cuda_device(self, driver: FakeDriver) -> None:
        with pytest.raises(ValueError, match="capability: device must be a CUDA device; got cpu"):
            capability("cpu")
        with pytest.raises(TypeError, match="device must be"):
            capability(None)

    def test_no_such_device(self, driver: FakeDriver) -> None:
        with pytest.raises(RuntimeError, match=r"cuDeviceGet failed: invalid device ordinal \(error 101\)"):
            capability(2)

    def test_no_driver(self, no_driver: None) -> None:
        with pytest.raises(RuntimeError, match=r"not available: the NVIDIA driver library .* cannot be loaded"):
            capability(0)
        assert not cuda_is_available()

    def test_no_device(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: FakeDriver(init_status=100))
        with pytest.raises(RuntimeError, match="CUDA is not available: no CUDA-capable device is detected"):
            sm_count(0)
        assert not cuda_is_available()

    def test_a_failure_is_not_remembered(self, no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError):
            capability(0)
        monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: FakeDriver())
        assert capability(0) == (9, 0)


class TestGuard:
    def test_pushes_and_pops(self, driver: FakeDriver) -> None:
        with device_guard("cuda:0"):
            with device_guard(Device("cuda", 1)):
                assert driver.contexts == [100, 101]
            assert driver.contexts == [100]
        with pytest.raises(KeyError), device_guard("cuda:1"):
            raise KeyError
        assert driver.contexts == []
        assert driver.calls.count("cuDevicePrimaryCtxRetain") == 2  # one per device

    def test_other_devices_need_none(self, no_driver: None) -> None:
        for device in ("cpu", "unknown"):
            with device_guard(device):
                pass


@pytest.mark.gpu
class TestOnGpu:
    def test_agrees_with_torch(self) -> None:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            assert capability(index) == (properties.major, properties.minor)
            assert sm_count(index) == properties.multi_processor_count

    def test_asking_makes_no_context(self) -> None:
        program = """
import ctypes, sys
from fe_runtime.arrays import capability, sm_count, cuda_is_available
assert cuda_is_available() and capability(0) >= (3, 5) and sm_count(0) > 0
active, flags = ctypes.c_int(), ctypes.c_uint()
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 0
assert "torch" not in sys.modules
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_guard_binds_a_context_in_a_new_thread(self) -> None:
        torch.zeros(1, device="cuda")
        seen: list[tuple[int, bool]] = []

        def work() -> None:
            driver = ctypes.CDLL("libcuda.so.1")
            context = ctypes.c_void_p()
            driver.cuCtxGetCurrent(ctypes.byref(context))
            before = context.value
            with device_guard("cuda:0"):
                status = driver.cuCtxGetCurrent(ctypes.byref(context))
                seen.append((status, bool(context.value)))
            driver.cuCtxGetCurrent(ctypes.byref(context))
            seen.append((0, context.value == before))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [(0, True), (0, True)]

    def test_guard_leaves_the_current_device(self) -> None:
        last = torch.cuda.device_count() - 1
        with torch.cuda.device(0):
            with device_guard(f"cuda:{last}"):
                assert torch.cuda.current_device() == last
            assert torch.cuda.current_device() == 0
