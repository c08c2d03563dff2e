"""Results in the caller's arrays: which are written, which are made, and what is refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fe_dummy import NAME, OPERATION, StandInLoader, scale_rows
from fe_storage import OPERATION as ACCUMULATING

from fe_runtime.errors import InvalidArgumentError
from fe_runtime.testing import to_framework, to_numpy

X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal(8).astype(np.float32)


def into(framework: str, *outputs: Any, **options: Any) -> Any:
    arrays = (*((X, W) if framework == "numpy" else (to_framework(x, framework) for x in (X, W))), None, None)
    return OPERATION.outputs_into(arrays, outputs, options)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_given_arrays_are_written_and_returned_and_others_made(framework: str) -> None:
    want = scale_rows(X, W)
    y, total = (to_framework(np.full(x.shape, np.nan, np.float32), framework) for x in want)
    for given in [(y, None), (None, total), (y, total), (None, None)]:
        made = into(framework, *given)
        for mine, got, expected in zip(given, made, want, strict=True):
            assert mine is None or got is mine
            np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-6)


def test_an_output_that_the_options_do_not_produce() -> None:
    y = np.empty((3, 8), np.float32)
    made = into("numpy", y, None, total=False)
    assert made[0] is y
    assert made[1] is None
    with pytest.raises(InvalidArgumentError, match=f"{NAME}: total must be None"):
        into("numpy", y, np.empty(8, np.float32), total=False)


@pytest.mark.parametrize(
    ("y", "text"),
    [
        (np.empty((3, 9), np.float32), "have shape"),
        (np.empty((3, 8), np.float64), "have dtype"),
        (np.empty((8, 3), np.float32).T, "be contiguous"),
        (torch.empty(3, 8), "come from the framework"),
        (X, "not share memory with x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arrays_are_refused(y: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{NAME}: y must {text}"):
        into("numpy", y, None)


def test_jax_arrays_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=f"{NAME}: y must be None for JAX arrays"):
        into("jax", jnp.zeros((3, 8)), None)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_results_that_accumulate(framework: str) -> None:
    x = to_framework(np.full((8, 32), 3, np.float32), framework)
    scale = to_framework(np.full((1, 8, 1), 127, np.uint8), framework)
    peak = to_framework(np.array([5], np.float32), framework)
    total = to_framework(np.ones(8, np.float32), framework)
    made = ACCUMULATING.outputs_into((x, scale, None), (None, None, peak, None), {})
    assert made[2] is peak
    assert float(peak[0]) == 5
    np.testing.assert_array_equal(to_numpy(made[3]), [96] * 8)
    ACCUMULATING.outputs_into((x, scale, None), (None, None, None, total), {})
    np.testing.assert_array_equal(to_numpy(total), [97] * 8)


def test_under_torch_compile_results_are_copied() -> None:
    x, w = torch.from_numpy(X), torch.from_numpy(W)

    def run(x: Any, w: Any, y: Any) -> Any:
        return OPERATION.outputs_into((x, w, None, None), (y, None), {"out_dtype": "float32", "group": 8})

    y = torch.empty(3, 8)
    got, total = torch.compile(run, backend="eager", fullgraph=True)(x, w, y)
    np.testing.assert_allclose(y.numpy(), scale_rows(X, W)["y"], rtol=1e-6)
    np.testing.assert_allclose(got.numpy(), y.numpy())
    assert total.shape == (8,)
    with pytest.raises(Exception, match="y must have shape"):
        torch.compile(run, backend="eager", fullgraph=True)(x, w, torch.empty(3, 9))


def test_the_kernel_writes_the_callers_array_and_warm_calls_are_remembered(pretended_gpu: StandInLoader) -> None:
    x, w, y = torch.from_numpy(X), torch.from_numpy(W), torch.empty(3, 8)
    want = X * W
    for _ in range(2):
        y.fill_(torch.nan)
        made = OPERATION.outputs_into((x, w, None, None), (y, None), {})
        assert made[0] is y
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)
    assert pretended_gpu.launches[-1][2] is y
    assert (len(pretended_gpu.requests), len(pretended_gpu.launches)) == (1, 2)
