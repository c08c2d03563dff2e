"""A framework on a device: make arrays there, bring them back as numpy, wait for them, time calls on them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from fe_runtime.arrays import cuda_is_available
from fe_runtime.dtypes import canonical_dtype, framework_dtype

from .timing import EventTimer, HostTimer, Timer

__all__ = ["FRAMEWORKS", "ArraySource", "JaxPlace", "NumpyPlace", "Place", "TorchPlace", "find_place"]

FRAMEWORKS = ("numpy", "torch", "jax")


class Place(ABC):
    """One framework on one device."""

    framework: str
    device: str = "cpu"

    @abstractmethod
    def put(self, array: Any) -> Any:
        """Return a numpy array's values as an array of this place."""

    @abstractmethod
    def get(self, array: Any) -> Any:
        """Return an array of this place as numpy; packed FP4 as bytes."""

    def wait(self, result: object = None) -> None:  # noqa: B027 - numpy has nothing to wait for
        """Wait until everything is computed."""

    def timer(self) -> Timer:
        """Return the clock for calls here."""
        return HostTimer(self.wait)

    def source(self, seed: int) -> ArraySource:
        """Return a maker of random arrays."""
        return ArraySource(self, seed)

    def standard_normal(self, shape: Sequence[int], rng: np.random.Generator) -> Any:
        """Return float32 normal values in a form that :meth:`cast` takes and that has numpy's operators."""
        return rng.standard_normal(tuple(shape), dtype=np.float32)

    def cast(self, values: Any, dtype: str) -> Any:
        """Return what :meth:`standard_normal` made as an array of this place."""
        return self.put(values.astype(framework_dtype(dtype, "numpy")))

    def difference(self, result: Any, reference: Any) -> float:
        """Return the relative difference (2-norm) of two float arrays, or the share of unequal bytes of coded ones."""
        a, b = self.get(result), self.get(reference)
        if a.dtype.itemsize == 1:
            return float(np.mean(a.view(np.uint8) != b.view(np.uint8)))
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))

    @property
    def on_gpu(self) -> bool:
        """Whether kernels can run here."""
        return self.device != "cpu"

    def __str__(self) -> str:
        return f"{self.framework} on {self.device}"


class NumpyPlace(Place):
    """numpy on the CPU."""

    framework = "numpy"

    def put(self, array: Any) -> Any:
        """Return the array itself."""
        return array

    def get(self, array: Any) -> Any:
        """Return the array itself."""
        return array


class TorchPlace(Place):
    """torch on the CPU or on a GPU."""

    framework = "torch"

    def __init__(self, device: str) -> None:
        self.device = device
        self._torch: Any = importlib.import_module("torch")

    def put(self, array: Any) -> Any:
        """Copy to the device; the bits stay as they are."""
        dtype = framework_dtype(canonical_dtype(array.dtype), "torch")
        bits = np.ascontiguousarray(array).view(_carrier(array.dtype))
        return self._torch.tensor(bits).to(self.device).view(dtype)

    def get(self, array: Any) -> Any:
        """Copy to the host; the bits stay as they are."""
        dtype = framework_dtype(canonical_dtype(array.dtype), "numpy")
        carrier = getattr(self._torch, _carrier(dtype))
        return array.detach().contiguous().view(carrier).cpu().numpy().view(dtype)

    def wait(self, result: object = None) -> None:
        """Wait for the device."""
        if self.on_gpu:
            self._torch.cuda.synchronize(self.device)

    def timer(self) -> Timer:
        """Return CUDA events on a GPU, the host's clock on the CPU."""
        return EventTimer(TorchGpu(self._torch, self.device)) if self.on_gpu else HostTimer(self.wait)

    def difference(self, result: Any, reference: Any) -> float:
        """Compare on the device."""
        if result.element_size() == 1:
            unequal = result.view(self._torch.uint8) != reference.view(self._torch.uint8)
            return float(unequal.float().mean())
        a, b = result.float(), reference.float()
        return float((a - b).norm() / b.norm().clamp_min(1e-30))

    def keep_busy(self) -> None:
        """Enqueue copies for about a second, so that clocks can be read under load."""
        values = self._torch.ones(1 << 28, device=self.device)
        target = self._torch.empty_like(values)
        for _ in range(2000):
            target.copy_(values)

    def standard_normal(self, shape: Sequence[int], rng: np.random.Generator) -> Any:
        """Return values made on the device: large cases take milliseconds, not minutes."""
        generator = self._torch.Generator(self.device).manual_seed(int(rng.integers(2**62)))
        return self._torch.randn(tuple(shape), generator=generator, device=self.device)

    def cast(self, values: Any, dtype: str) -> Any:
        """Convert on the device."""
        return values.to(framework_dtype(dtype, "torch"))


class JaxPlace(Place):
    """JAX on the CPU or on a GPU."""

    framework = "jax"

    def __init__(self, device: str) -> None:
        self.device = device
        self._jax: Any = importlib.import_module("jax")
        self._where = self._jax.devices("gpu" if self.on_gpu else "cpu")[0]

    def put(self, array: Any) -> Any:
        """Copy to the device."""
        return self._jax.device_put(array, self._where)

    def get(self, array: Any) -> Any:
        """Copy to the host."""
        return np.asarray(array)

    def wait(self, result: object = None) -> None:
        """Wait for a result."""
        self._jax.block_until_ready(list(result.values()) if isinstance(result, dict) else result)


class TorchGpu:
    """What :class:`~fe_runtime.bench.timing.EventTimer` needs of a GPU, through torch."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
        self._scratch = torch.empty(max(256 << 20, 4 * l2_bytes), dtype=torch.uint8, device=self._device)
        self.flush()  # the first one loads its kernel
        self.wait()

    def record(self) -> Any:
        """Record an event in the current stream."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened."""
        return float(start.elapsed_time(end)) * 1e-3

    def flush(self) -> None:
        """Write more than the L2 cache holds."""
        self._scratch.zero_()

    def wait(self) -> None:
        """Wait for the GPU."""
        self._torch.cuda.synchronize(self._device)


class ArraySource:
    """Random arrays in one place; the same seed gives the same arrays."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._rng = np.random.default_rng(seed)

    def activations(self, shape: Sequence[int], dtype: str) -> Any:
        """Return values as a trained network has them.

        Channels (the last dimension) differ in scale by a log-normal factor and one in a hundred is twenty times
        larger still; rows differ in scale too. So each row has outliers far above its root mean square.
        """
        channel, row = self._standard(shape[-1:]), self._standard((*shape[:-1], 1))
        outlier = 1 + 20.0 * (self._standard(shape[-1:]) > 2.33)
        values = self._standard(shape) * 2.0 ** (0.7 * channel) * outlier * 2.0 ** (0.5 * row)
        return self._place.cast(values, dtype)

    def weights(self, shape: Sequence[int], dtype: str) -> Any:
        """Return gains around 1."""
        return self._place.cast(1 + 0.2 * self._standard(shape), dtype)

    def normal(self, shape: Sequence[int], dtype: str, scale: float = 1.0) -> Any:
        """Return normal values."""
        return self._place.cast(scale * self._standard(shape), dtype)

    def array(self, values: Any) -> Any:
        """Return a copy of a numpy array."""
        return self._place.put(np.array(values))

    def _standard(self, shape: Sequence[int]) -> Any:
        return self._place.standard_normal(shape, self._rng)


def find_place(framework: str | None = None) -> Place:
    """Return where to run: the framework that was asked for, on the GPU if it sees one.

    Without a wish: torch on a GPU, else JAX on a GPU, else numpy.

    Raises
    ------
    ImportError
        The framework that was asked for is not installed.
    """
    if framework == "numpy":
        return NumpyPlace()
    if framework == "torch":
        torch: Any = importlib.import_module("torch")
        return TorchPlace("cuda:0" if torch.cuda.is_available() else "cpu")
    if framework == "jax":
        return JaxPlace("cuda:0" if _jax_sees_a_gpu() else "cpu")
    if cuda_is_available():
        for candidate in ("torch", "jax"):
            try:
                place = find_place(candidate)
            except ImportError:
                continue
            if place.on_gpu:
                return place
    return NumpyPlace()


def _jax_sees_a_gpu() -> bool:
    jax: Any = importlib.import_module("jax")
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # jax's word for "no such platform"
        return False


def _carrier(dtype: Any) -> str:
    """Return an integer dtype of the same width that every framework has."""
    return {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[np.dtype(dtype).itemsize]
