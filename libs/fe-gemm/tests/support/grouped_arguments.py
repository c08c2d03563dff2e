"""Arguments of the grouped products in every framework, form and weight mode, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from naive_gemm import E2M1, FORMATS
from naive_grouped import BF16, by_row, canonical, ends, plain, product, scaled

from fe_runtime.testing import to_framework, to_numpy

FRAMEWORKS = ("numpy", "torch", "jax")
FORMS = ("legacy", "canonical", "by columns", "legacy by columns")
MODES = ("dense", "discrete", "discrete by columns")


def address(x: Any) -> int:
    """Return where the memory of an array on the host starts."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    return int(x.data_ptr() if isinstance(x, torch.Tensor) else x.unsafe_buffer_pointer())


def table(matrices: list[Any], framework: str) -> Any:
    """Return a table of addresses of arrays, which the caller keeps alive; in JAX its bytes."""
    addresses = np.array([address(x) for x in matrices], np.int64)
    return to_framework(addresses.view(np.uint8) if framework == "jax" else addresses, framework)


def dense(b: Any, framework: str, form: str) -> dict[str, Any]:
    """Return weights (E, N, K) in a form, with the major that goes with it."""
    by_columns = np.ascontiguousarray(b.transpose(0, 2, 1))
    array, order, major = {
        "canonical": (b, (0, 1, 2), "k"),
        "legacy": (b, (1, 2, 0), "k"),
        "by columns": (by_columns, (0, 1, 2), "n"),
        "legacy by columns": (by_columns, (2, 1, 0), "n"),
    }[form]
    stored = to_framework(array, framework)
    view = stored.permute(order) if framework == "torch" else stored.transpose(order)
    return {"b_tensor": view, "b_major": major}


class Forward:
    """A bf16 product of small whole numbers, exact in fp32: A (M, K), weights (E, N, K), bias (N, E), row factors."""

    def __init__(
        self, sizes: tuple[int, ...] = (5, 0, 40, 3), rows: int = 64, n: int = 32, k: int = 48, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.off, self.n, self.k = ends(list(sizes)), n, k
        self.a = rng.integers(-3, 4, (rows, k)).astype(BF16)
        self.b = rng.integers(-3, 4, (len(sizes), n, k)).astype(BF16)
        self.alpha = rng.choice([0.5, 1.0, -2.0], len(sizes)).astype(np.float32)
        self.bias = np.asfortranarray(rng.integers(-8, 9, (n, len(sizes))).astype(np.float32))
        self.prob = rng.choice([0.25, 1.0, 2.0], rows).astype(np.float32)
        self.a[self.off[-1] :], self.prob[self.off[-1] :] = np.nan, np.nan

    def arguments(
        self, framework: str = "numpy", mode: str = "dense", form: str = "canonical", rank: int = 2
    ) -> dict[str, Any]:
        """Return the arguments of the wrapper, without a bias."""
        a, prob = (self.a[:, :, None], self.prob[:, None, None]) if rank == 3 else (self.a, self.prob)
        known = {"a_tensor": a, "padded_offsets": self.off, "alpha_tensor": self.alpha, "prob_tensor": prob}
        given = {key: to_framework(x, framework) for key, x in known.items()}
        return {**given, **(dense(self.b, framework, form) if mode == "dense" else self._discrete(framework, mode))}

    def bias_in(self, framework: str, dtype: Any = np.float32) -> Any:
        """Return the bias (N, E), by expert in memory where there are strides."""
        return to_framework(np.asfortranarray(self.bias.astype(dtype)), framework)

    def _discrete(self, framework: str, mode: str) -> dict[str, Any]:
        by_columns = mode == "discrete by columns"
        self.kept = [to_framework(np.ascontiguousarray(x.T if by_columns else x), framework) for x in self.b]
        major = "n" if by_columns else "k"
        return {"b_ptrs": table(self.kept, framework), "n": self.n, "b_dtype": "bfloat16", "b_major": major}

    def expected(self, with_bias: bool = False) -> tuple[Any, Any]:
        """Return D and C in float64, rows of the tail 0."""
        c = by_row(self.alpha, self.off, len(self.a))[:, None] * product(self.a, self.b, self.off)
        factor = np.nan_to_num(self.prob.astype(np.float64))[:, None]
        if not with_bias:
            return c * factor, c
        c = c + by_row(np.asarray(self.bias, np.float64).T, self.off, len(self.a)) * factor
        return c, c

    def assert_is(self, got: Any, want: Any) -> None:
        """Compare the rows that experts own, exactly, with float64 rounded to the dtype of the result."""
        values, owned = to_numpy(got), int(self.off[-1])
        assert values.shape[:2] == want.shape
        values = values.reshape(want.shape)
        np.testing.assert_array_equal(values[:owned], want[:owned].astype(np.float32).astype(values.dtype))


class Gated:
    """Operands of a gated product, forward and backward, of any family: ``"bfloat16"`` or a block-scaled format.

    ``n`` rows of a weight: gates and ups together for the forward, one branch for the backward.
    """

    def __init__(
        self, name: str = "bfloat16", sizes: tuple[int, ...] = (33, 0, 95), rows: int = 160, n: int = 128, k: int = 64
    ) -> None:
        rng = np.random.default_rng(5)
        self.name, self.off, self.n, self.rows = name, ends(list(sizes)), n, rows
        self.scaled = name != "bfloat16"
        count = len(sizes)
        if self.scaled:
            left, right = scaled(rng, name, rows, n, k, count, whole=True)
            self.element, self.scale, self.vec = FORMATS[name]
            self.a, self.b = left.elements()[..., 0], canonical(right.elements())
            self.sfa, self.sfb = left.blocked("physical"), right.blocked("physical")
        else:
            self.a, self.b, self.vec = plain(rng, (rows, k), True), plain(rng, (count, n, k), True), 16
            self.a[self.off[-1] :] = np.nan
        self.alpha = (rng.choice([0.5, 1.0], count) / 64).astype(np.float32)
        self.beta = rng.choice([0.5, 1.0], count).astype(np.float32)
        self.bias = np.asfortranarray(rng.integers(-2, 3, (n, count)).astype(np.float32) / 4)
        self.prob = rng.choice([0.25, 1.0, -2.0], rows).astype(np.float32)
        self.c = (rng.integers(-8, 9, (rows, 2 * n)) / 4).astype(BF16)
        self.norm = np.array([0.3], np.float32)

    def arguments(
        self, framework: str = "numpy", mode: str = "dense", rank: int = 2, form: str = "canonical"
    ) -> dict[str, Any]:
        """Return what the forward and the backward have in common, and the dtype controls."""
        known: dict[str, Any] = {
            "a_tensor": self._ranked(self.a, rank),
            "sfa_tensor": self.sfa if self.scaled else None,
            "padded_offsets": self.off,
            "alpha_tensor": self.alpha,
            "prob_tensor": self._numbers(self.prob, rank),
        }
        given = {key: None if x is None else to_framework(x, framework) for key, x in known.items()}
        if self.scaled:
            given["sf_vec_size"] = self.vec
            if rank == 3 and framework != "jax":
                given["sfa_tensor"] = logical(given["sfa_tensor"])
        if mode != "dense":
            return {**given, **self._discrete(framework, mode)}
        weights = dense(self.b, framework, form)
        if self.scaled:
            weights["sfb_tensor"] = to_framework(self.sfb, framework)
            if rank == 3 and framework != "jax":
                weights["sfb_tensor"] = logical(weights["sfb_tensor"])
        return {**given, **weights}

    def rows_like(self, x: Any, framework: str, rank: int = 2) -> Any:
        """Return numbers of rows, or a matrix of rows, in a framework and in the form of A."""
        shaped = self._ranked(x, rank) if x.ndim == 2 else self._numbers(x, rank)
        return to_framework(shaped, framework)

    def _discrete(self, framework: str, mode: str) -> dict[str, Any]:
        by_columns = mode == "discrete by columns"
        self.kept = [to_framework(np.ascontiguousarray(x.T if by_columns else x), framework) for x in self.b]
        dtype = "bfloat16" if not self.scaled else "uint8" if self.element == E2M1 else self.element
        given = {"b_ptrs": table(self.kept, framework), "n": self.n, "b_dtype": dtype}
        if self.scaled:
            self.kept_scales = [to_framework(np.ascontiguousarray(x), framework) for x in self.sfb]
            given["sfb_ptrs"] = table(self.kept_scales, framework)
        return {**given, "b_major": "n" if by_columns else "k"}

    @staticmethod
    def _ranked(x: Any, rank: int) -> Any:
        return x[:, :, None] if rank == 3 else x

    @staticmethod
    def _numbers(x: Any, rank: int) -> Any:
        return x[:, None, None] if rank == 3 else x


def logical(scales: Any) -> Any:
    """Return scales in the physical form as the logical view."""
    order = (3, 4, 1, 5, 2, 0)
    return scales.permute(order) if isinstance(scales, torch.Tensor) else scales.transpose(order)


def assert_close(got: Any, want: Any, owned: int) -> None:
    """Compare a result with the reference's, up to what exp of another library may change in the last place.

    ``None`` must be ``None``; rows from ``owned`` on are unspecified.
    """
    assert (got is None) == (want is None)
    if got is None:
        return
    x, y = to_numpy(got), np.asarray(want)
    if x.ndim == 6:
        x = x.transpose(5, 2, 4, 0, 1, 3) if x.shape[:2] == (32, 4) and x.shape[3] == 4 else x
        assert x.shape == y.shape
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
        return
    assert x.dtype == y.dtype
    if x.ndim == 3 and x.shape[2] == 1 and y.ndim == 2:
        x = x[:, :, 0]
    assert x.shape == y.shape
    x, y = x[:owned], y[:owned]
    if x.dtype.itemsize == 1:
        different = x.view(np.uint8) != y.view(np.uint8)
        assert different.mean() < 0.01
        return
    np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=2.0**-6, atol=1e-6)
