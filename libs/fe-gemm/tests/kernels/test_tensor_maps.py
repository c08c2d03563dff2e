"""Tensor maps that are made on the device compile, and copies take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fe_runtime
from fe_gemm.planning.grouped import MAP_BYTES, table_bytes
from fe_runtime.compile import KernelSpec, resource_usage


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def test_a_table_has_a_map_for_each_group_of_each_array() -> None:
    assert MAP_BYTES == 128
    assert table_bytes(7, 3) == 7 * 3 * 128


@pytest.mark.compile
@pytest.mark.parametrize("mode", ["loads", "stores"])
@pytest.mark.parametrize("rows_contiguous", [True, False])
def test_maps_and_copies_compile(mode: str, rows_contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    how = {"mode": mode, "rows_contiguous": rows_contiguous}
    usage = resource_usage(KernelSpec.of("fe_gemm.maps", "map_copies_for_tests:build", "sm_90a", **how))
    assert any(symbol.startswith("fe_gemm_tensor_maps") for symbol in usage)
    assert all(found.frame_bytes == 0 for found in usage.values())
