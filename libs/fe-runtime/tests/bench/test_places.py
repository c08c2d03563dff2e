from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from fe_runtime.bench import places
from fe_runtime.bench.places import JaxPlace, NumpyPlace, Place, TorchPlace, find_place
from fe_runtime.dtypes import framework_dtype

PLACES = {"numpy": NumpyPlace, "torch": lambda: TorchPlace("cpu"), "jax": lambda: JaxPlace("cpu")}
DTYPES = [
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.uint8,
    np.int32,
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_survive_the_way_there_and_back(place: Place, dtype: str) -> None:
    rng = np.random.default_rng(0)
    array = (rng.standard_normal((3, 8)) * 5).astype(framework_dtype(dtype, "numpy"))
    back = place.get(place.put(array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back.view(np.uint8), array.view(np.uint8))


def test_packed_fp4_comes_back_as_bytes() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(8, dtype=np.uint8)
    packed = torch.from_numpy(codes).view(torch.float4_e2m1fn_x2)
    np.testing.assert_array_equal(TorchPlace("cpu").get(packed), codes)


def test_the_same_seed_gives_the_same_arrays(place: Place) -> None:
    def draw(seed: int) -> np.ndarray:
        return np.asarray(place.get(place.source(seed).activations((4, 32), "float32")))

    np.testing.assert_array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


def test_activations_have_outlier_channels_and_the_right_dtype(place: Place) -> None:
    made = place.source(0).activations((512, 1024), "bfloat16")
    values = np.asarray(place.get(made)).astype(np.float64)
    assert place.get(made).dtype == ml_dtypes.bfloat16
    assert np.isfinite(values).all()
    per_channel = np.sqrt((values**2).mean(axis=0))
    assert per_channel.max() > 20 * np.median(per_channel)
    kurtosis = (values**4).mean() / (values**2).mean() ** 2
    assert kurtosis > 30  # 3 for normal values


def test_difference_of_floats_is_relative_and_of_codes_is_a_share(place: Place) -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert place.difference(place.put(a), place.put(a)) == 0
    assert place.difference(place.put(a + np.array([0.5, 0], np.float32)), place.put(a)) == pytest.approx(0.1)
    codes = np.arange(4, dtype=np.uint8)
    assert place.difference(place.put(codes), place.put(codes | 1)) == pytest.approx(0.5)


def test_numpy_is_the_default_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cuda_is_available", lambda: False)
    assert isinstance(find_place(), NumpyPlace)


def test_numpy_is_the_default_where_no_framework_sees_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cuda_is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    assert isinstance(find_place(), NumpyPlace)


def test_a_framework_that_is_asked_for_but_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError):
        find_place("torch")
