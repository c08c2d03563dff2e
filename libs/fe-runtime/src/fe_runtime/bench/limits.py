"""What this machine can reach, measured in the same run as what is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .places import Place, TorchPlace

__all__ = ["Limit", "copy_limit", "matmul_limit", "rate_text"]

GIB = 1 << 30


@dataclass(frozen=True)
class Limit:
    """A measured rate: bytes or floating-point operations per second, and what was timed."""

    kind: str
    per_second: float
    what: str

    def as_json(self) -> dict[str, object]:
        """Return the limit as records keep it."""
        return {"kind": self.kind, "per_second": self.per_second, "what": self.what}


def copy_limit(place: Place, repetitions: int = 20, size: int | None = None) -> Limit:
    """Measure a copy: bytes read plus bytes written per second.

    ``size`` is that of the array in bytes; 2 GiB of bfloat16 on a GPU, 256 MiB on the CPU.
    """
    if place.on_gpu and isinstance(place, TorchPlace):
        size = size or 2 * GIB
        values = place.source(0).normal((size // 2 // 1024, 1024), "bfloat16")
        target = values.clone()
        timing = place.timer().measure({"copy": lambda _: target.copy_(values)}, repetitions)["copy"]
        what = f"torch copy of {size / GIB:g} GiB bfloat16"
    else:
        size = size or GIB // 4
        source = np.random.default_rng(0).integers(0, 1 << 62, size // 8)
        sink = source.copy()
        timing = place.timer().measure({"copy": lambda _: np.copyto(sink, source)}, repetitions)["copy"]
        what = f"numpy copy of {size / GIB:g} GiB on the CPU"
    return Limit("bytes", 2 * size / timing.median, what)


def matmul_limit(place: Place, repetitions: int = 20, extent: int | None = None) -> Limit:
    """Measure a square matrix product on random data: floating-point operations per second.

    bfloat16 of extent 8192 on a GPU, float32 of extent 1024 on the CPU.
    """
    on_gpu = place.on_gpu and isinstance(place, TorchPlace)
    extent = extent or (8192 if on_gpu else 1024)
    if on_gpu:
        source = place.source(0)
        a, b = source.normal((extent, extent), "bfloat16"), source.normal((extent, extent), "bfloat16")
        what = f"torch matmul, bfloat16, {extent}^3"
    else:
        a, b = np.random.default_rng(0).standard_normal((2, extent, extent), dtype=np.float32)
        what = f"numpy matmul, float32, {extent}^3 on the CPU"
    timing = place.timer().measure({"matmul": lambda _: a @ b}, repetitions)["matmul"]
    return Limit("flops", 2 * extent**3 / timing.median, what)


def rate_text(kind: str, per_second: float) -> str:
    """Return a rate (of ``"bytes"`` or ``"flops"``) with its unit."""
    value, unit = (per_second / 1e9, "GB/s") if kind == "bytes" else (per_second / 1e12, "TFLOP/s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
