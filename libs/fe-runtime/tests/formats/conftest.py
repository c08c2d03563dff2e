"""The frameworks that every format function is tested with, and an exact model of the narrow types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

ONE_BYTE = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "uint8")


@dataclass(frozen=True)
class Framework:
    """Carries numpy arrays into a framework and back, and calls functions on them."""

    name: str
    device: str = "cpu"

    def array(self, x: np.ndarray) -> Any:
        if self.name == "numpy":
            return x
        if self.name == "jax":
            return jnp.asarray(x)
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(self.device)
        if x.dtype.name in ONE_BYTE:
            return torch.from_numpy(x.view(np.uint8).copy()).to(self.device).view(getattr(torch, x.dtype.name))
        return torch.from_numpy(x.copy()).to(self.device)

    def numpy(self, x: Any) -> np.ndarray:
        """One-byte types come back as ``uint8``, bfloat16 and fp32 as they are."""
        if self.name == "torch":
            if x.dtype == torch.bfloat16:
                return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return (x.view(torch.uint8) if x.element_size() == 1 else x).cpu().numpy()
        x = np.asarray(x)
        return x.view(np.uint8) if x.dtype.itemsize == 1 else x

    def call(self, function: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """The results of ``function`` as numpy arrays; JAX runs it under ``jit``."""
        if self.name == "jax":
            function = jax.jit(function)
        results = function(*(self.array(x) for x in arrays))
        return tuple(map(self.numpy, results)) if isinstance(results, tuple) else self.numpy(results)

    def is_array(self, x: Any, dtype: str) -> bool:
        kind = {"numpy": np.ndarray, "jax": jax.Array, "torch": torch.Tensor}[self.name]
        return isinstance(x, kind) and str(x.dtype).removeprefix("torch.") == dtype


@pytest.fixture(params=["numpy", "torch", "jax"])
def framework(request: pytest.FixtureRequest) -> Framework:
    return Framework(request.param)


@pytest.fixture
def torch_cuda() -> Framework:
    return Framework("torch", "cuda")


class Model:
    """The element and scale types in exact arithmetic; shares nothing with the library."""

    # name -> exponent bits, mantissa bits, bias, largest finite code, NaN code
    TYPES: ClassVar = {
        "float8_e4m3fn": (4, 3, 7, 0x7E, 0x7F),
        "float8_e5m2": (5, 2, 15, 0x7B, 0x7F),
        "float4_e2m1fn": (2, 1, 1, 0x7, 0x7),
    }

    def magnitudes(self, name: str) -> np.ndarray:
        """The values of the codes 0..max as fp64 (exact)."""
        _, mantissa_bits, bias, last, _ = self.TYPES[name]
        values = []
        for code in range(last + 1):
            exponent, mantissa = code >> mantissa_bits, Fraction(code & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
            scale = Fraction(2) ** (max(exponent, 1) - bias)
            values.append(float(scale * (mantissa + (exponent > 0))))
        return np.array(values)

    def cast(self, x: np.ndarray, name: str) -> np.ndarray:
        """Codes of fp32 ``x``: the nearest of all values, of two equally near ones that with the even code."""
        exponent_bits, mantissa_bits, _, last, nan_code = self.TYPES[name]
        values = self.magnitudes(name)
        middles = (values[:-1] + values[1:]) / 2
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitude = np.abs(x.astype(np.float64))
        below = np.searchsorted(middles, magnitude, side="left")  # ties go down
        above = np.searchsorted(middles, magnitude, side="right")  # ties go up
        code = np.minimum(np.where(below % 2 == 0, below, above), last)
        code |= np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)
        return np.where(np.isnan(x), nan_code, code).astype(np.uint8)

    def e8m0_up(self, v: Fraction) -> int:
        """The byte of the smallest power of two in range that is >= v."""
        return next((byte for byte in range(254) if Fraction(2) ** (byte - 127) >= v), 254)

    def fp32(self, v: Fraction) -> Fraction:
        """The fp32 number nearest to ``v``, ties to even; overflow is not modelled."""
        if v == 0:
            return v
        exponent = abs(v).numerator.bit_length() - abs(v).denominator.bit_length()
        exponent -= abs(v) < Fraction(2) ** exponent
        unit = Fraction(2) ** (max(exponent, -126) - 23)
        return round(v / unit) * unit  # round() of a Fraction takes ties to even


@pytest.fixture(scope="session")
def model() -> Model:
    return Model()


@pytest.fixture(scope="session")
def random_bits() -> np.ndarray:
    """200,000 fp32 numbers with uniformly random bits: every exponent, subnormals, infinities and NaN."""
    return np.random.default_rng(7).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
