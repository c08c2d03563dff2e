"""torch.vmap: the mapped dimension is one more leading dimension, or a clear error."""

from __future__ import annotations

import fe_toy
import numpy as np
import pytest
import torch
from fe_toy import expected

from fe_runtime.errors import NotSupportedError

X = expected.sample(5, 3, 4)
BIAS = np.float32([0.2, -0.4, 0.1, 0.6])


def y(x, bias=None):
    return fe_toy.scale_clamp(x, bias)["y"]


@pytest.mark.parametrize("dim", [0, 1])
def test_leading_dimensions(dim):
    made = torch.vmap(y, in_dims=dim, out_dims=dim)(torch.tensor(X))
    np.testing.assert_allclose(made, expected.value(X), rtol=1e-6)


def test_nested_and_strided():
    x = torch.tensor(np.moveaxis(X, -1, 0).copy())  # the channels come first in memory
    made = torch.vmap(torch.vmap(y, in_dims=1), in_dims=1)(x)
    np.testing.assert_allclose(made, expected.value(X), rtol=1e-6)


def test_shared_and_optional_operands():
    made = torch.vmap(lambda x: fe_toy.scale_clamp(x, torch.tensor(BIAS), mask=True))(torch.tensor(X))
    np.testing.assert_allclose(made["y"], expected.value(X, BIAS), rtol=1e-6)
    np.testing.assert_array_equal(made["kept"], expected.kept(X, BIAS))


def test_unmapped_rows_are_repeated():
    made = torch.vmap(lambda dy, x: torch.ops.fe_toy.scale_clamp_backward(dy, x)[0], in_dims=(0, None))(
        torch.tensor(X), torch.tensor(X[0])
    )
    np.testing.assert_allclose(made, X * (np.abs(X[:1]) <= 1), rtol=1e-6)


def test_per_sample_gradients():
    made = torch.vmap(torch.func.grad(lambda x: y(x).square().sum()))(torch.tensor(X))
    np.testing.assert_allclose(made, 2 * X * (np.abs(X) <= 1), rtol=1e-6)


def test_gradient_of_a_mapped_call():
    made = torch.func.grad(lambda x: torch.vmap(y)(x).square().sum())(torch.tensor(X))
    np.testing.assert_allclose(made, 2 * X * (np.abs(X) <= 1), rtol=1e-6)


def test_mapped_channels_have_no_rule():
    with pytest.raises(NotSupportedError, match="bias has no leading batch dimensions"):
        torch.vmap(y)(torch.tensor(X), torch.ones(5, 4))


def test_sums_over_rows_have_no_rule():
    with pytest.raises(NotSupportedError, match="the output dbias combines all rows"):
        torch.vmap(torch.func.grad(lambda b, x: y(x, b).sum()), in_dims=(None, 0))(torch.ones(4), torch.tensor(X))
