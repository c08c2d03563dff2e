from __future__ import annotations

from collections.abc import Mapping

import pytest

from fe_runtime.bench.limits import copy_limit, matmul_limit, rate_text
from fe_runtime.bench.places import NumpyPlace
from fe_runtime.bench.timing import Call, Timing


class FixedTimer:
    """Runs every call once and says that it took a millisecond."""

    label = "fixed"

    def measure(self, calls: Mapping[str, Call], repetitions: int) -> dict[str, Timing]:
        for call in calls.values():
            call(0)
        return {name: Timing((1e-3,) * repetitions) for name in calls}


class FixedPlace(NumpyPlace):
    def timer(self) -> FixedTimer:
        return FixedTimer()


def test_a_copy_counts_what_is_read_and_what_is_written() -> None:
    limit = copy_limit(FixedPlace(), size=1 << 20)
    assert limit.kind == "bytes"
    assert limit.per_second == pytest.approx(2 * (1 << 20) / 1e-3)
    assert "on the CPU" in limit.what


def test_a_product_counts_multiplications_and_additions() -> None:
    limit = matmul_limit(FixedPlace(), extent=64)
    assert limit.kind == "flops"
    assert limit.per_second == pytest.approx(2 * 64**3 / 1e-3)
    assert limit.as_json()["what"] == "numpy matmul, float32, 64^3 on the CPU"


@pytest.mark.parametrize(
    ("kind", "rate", "text"),
    [("bytes", 4.0519e12, "4052 GB/s"), ("bytes", 3.14159e8, "0.314 GB/s"), ("flops", 7.86e14, "786 TFLOP/s")],
)
def test_rates_are_readable(kind: str, rate: float, text: str) -> None:
    assert rate_text(kind, rate) == text
