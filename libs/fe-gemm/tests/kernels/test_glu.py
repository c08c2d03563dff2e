"""The gated activations of epilogues, their arithmetic run by numpy, against the reference and finite differences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from grouped_numbers import GATES, SCALARS, UPS

from fe_gemm.kernels.sm90.epilogue import glu
from fe_gemm.kernels.sm90.epilogue.glu import Glu
from fe_gemm.planning.grouped import ACTIVATIONS
from fe_gemm.reference.grouped.activations import Activation

NAMES = tuple(ACTIVATIONS)
every_activation = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b)

    def sigmoid(z: Any) -> Any:
        with np.errstate(over="ignore"):
            return np.float64(1) / (1 + np.exp(-z))

    def chosen_or_nan(which: str, a: Any, b: Any) -> Any:
        return {"min": np.minimum, "max": np.maximum}[which](a, b)

    monkeypatch.setattr(glu, "Float32", np.float64)
    monkeypatch.setattr(glu, "sigmoid", sigmoid)
    monkeypatch.setattr(glu, "tanh", np.tanh)
    monkeypatch.setattr(glu, "_chosen_or_nan", chosen_or_nan)
    monkeypatch.setattr(glu, "cutlass", SimpleNamespace(select_=select))


def activation(name: str) -> tuple[Glu, Activation]:
    given = {scalar: np.float64(SCALARS[scalar]) for scalar in ACTIVATIONS[name]}
    how = SCALARS
    clamps = how["glu_clamp_max"], how["glu_clamp_min"]
    reference = Activation.of(
        name, how["linear_offset"], how["geglu_alpha"], *clamps, how["situ_beta1"], how["situ_beta2"]
    )
    return Glu.of(name, given), reference


@every_activation
def test_values_and_slopes_are_those_of_the_reference(name: str) -> None:
    own, reference = activation(name)
    np.testing.assert_allclose(own.value(GATES, UPS), reference.forward(GATES, UPS), rtol=1e-12, atol=1e-12)
    for got, want in zip(own.slopes(GATES, UPS), reference.backward(GATES, UPS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@every_activation
def test_slopes_are_differences(name: str) -> None:
    own, _ = activation(name)
    value, by_gate, by_up = own.slopes(GATES, UPS)
    h = 1e-6
    np.testing.assert_allclose(value, own.value(GATES, UPS), rtol=1e-12, atol=1e-12)
    for got, (x, y) in ((by_gate, (h, 0)), (by_up, (0, h))):
        want = (own.value(GATES + x, UPS + y) - own.value(GATES - x, UPS - y)) / (2 * h)
        np.testing.assert_allclose(got, want, atol=1e-6)


@every_activation
def test_nan_stays_nan(name: str) -> None:
    own, _ = activation(name)
    for gate, up in ((np.nan, 0.5), (0.5, np.nan)):
        assert np.isnan(own.value(np.float64(gate), np.float64(up)))


@pytest.fixture
def fragments_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glu, "fragment", lambda blocks: np.zeros((2, 2, blocks)))
    monkeypatch.setattr(glu, "cute", SimpleNamespace(size=lambda x, mode: x.shape[mode[0]]))


@every_activation
@pytest.mark.usefixtures("fragments_of_numpy")
def test_gradients_of_gates_and_ups(name: str) -> None:
    own, _ = activation(name)
    random = np.random.default_rng(1)
    r, saved, prob = random.standard_normal((2, 2, 8)), random.standard_normal((2, 2, 16)), np.array([2.0, -3.0])
    values, terms, acts = own.gradient(r, saved, tuple(prob))
    for block in range(8):
        gate = 8 * (block // 4) + block % 4
        act, by_gate, by_up = own.slopes(saved[..., gate], saved[..., gate + 4])
        np.testing.assert_allclose(values[..., gate], r[..., block] * prob * by_gate)
        np.testing.assert_allclose(values[..., gate + 4], r[..., block] * prob * by_up)
        np.testing.assert_allclose(terms[..., block], r[..., block] * act)
        np.testing.assert_allclose(acts[..., block], act * prob)
    plain = own.gradient(r, saved, None)
    np.testing.assert_allclose(plain[0] * prob[:, None], values)
    np.testing.assert_allclose(plain[1], terms)


@pytest.mark.usefixtures("fragments_of_numpy")
def test_pairs_are_four_blocks_apart() -> None:
    """Columns alternate in blocks of 32, which are four blocks of 8: gate, up, gate, up."""
    own, _ = activation("swiglu")
    x = np.random.default_rng(0).standard_normal((2, 2, 16))
    got = own.of_fragment(x, (2.0, 3.0))
    assert got.shape == (2, 2, 8)
    for block in range(8):
        gate = 8 * (block // 4) + block % 4
        for half, prob in enumerate((2.0, 3.0)):
            want = own.value(x[:, half, gate], x[:, half, gate + 4]) * prob
            np.testing.assert_array_equal(got[:, half, block], want)
    np.testing.assert_array_equal(own.of_fragment(x, None)[:, 0] * 2.0, got[:, 0])
