"""The clock and the limits on a real GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from fe_runtime.bench.limits import copy_limit, matmul_limit
from fe_runtime.bench.machine import gpu_record
from fe_runtime.bench.places import TorchPlace, find_place
from fe_runtime.bench.timing import EventTimer, host_time

pytestmark = pytest.mark.gpu


@pytest.fixture
def place() -> TorchPlace:
    return TorchPlace("cuda:0")


def test_torch_on_the_gpu_is_the_default() -> None:
    assert str(find_place()) == "torch on cuda:0"


def test_a_copy_from_memory_is_slower_than_one_from_the_cache_would_be(place: TorchPlace) -> None:
    """16 MiB fit into the L2 of any recent GPU; the flush makes them come from memory each time."""
    torch: Any = importlib.import_module("torch")
    source = torch.randn(4 << 20, device="cuda")
    target = torch.empty_like(source)
    timer = place.timer()
    assert isinstance(timer, EventTimer)
    timings = timer.measure({"copy": lambda _: target.copy_(source), "nothing": lambda _: None}, 20)
    rate = 2 * 16 * 2**20 / timings["copy"].median
    assert rate < 1.1 * copy_limit(place).per_second
    assert timings["nothing"].median < timings["copy"].median


def test_launch_gaps_are_not_counted(place: TorchPlace) -> None:
    torch: Any = importlib.import_module("torch")
    small = torch.zeros(32, device="cuda")

    def many_launches(_round_number: int) -> None:
        for _ in range(20):
            small.add_(1)

    median = place.timer().measure({"many": many_launches}, 20)["many"].median
    host = host_time(lambda: many_launches(0), place.wait, calls=100, batch=1).median
    assert median < host


def test_limits_are_plausible(place: TorchPlace) -> None:
    assert 1e11 < copy_limit(place).per_second < 2e13
    assert 1e13 < matmul_limit(place, extent=4096).per_second < 1e16


def test_clocks_are_read_under_load(place: TorchPlace) -> None:
    place.keep_busy()
    found = gpu_record()
    place.wait()
    assert found is not None
    assert float(found["sm_clock_mhz"]) > 500
