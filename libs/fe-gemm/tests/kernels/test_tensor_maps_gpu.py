"""Tensor maps that are made on a Hopper GPU: extents that end with a group, addresses out of a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fe_gemm.planning.grouped import table_bytes
from fe_runtime import testing
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError, load

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

BOX, K = 64, 128
SIZES = [[64, 1, 17, 63, 0, 30], [0, 3, 0, 64, 0], [64] * 5, [0, 0, 0], [1] * 1024, [0] * 256 + [10]]
STEPS = [[64, 8, 16, 56, 0, 40], [0, 8, 0, 64, 0], [64] * 5, [0, 0, 0], [8] * 1024, [0] * 256 + [16]]
"""Groups begin and end at multiples of 16 bytes, as they have to where rows are contiguous along them."""


@pytest.fixture(autouse=True)
def launcher_beside_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def kernel(mode: str, rows_contiguous: bool) -> Any:
    if capability(Device("cuda", 0)) != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")
    how = {"mode": mode, "rows_contiguous": rows_contiguous}
    try:
        return load(KernelSpec.of("fe_gemm.maps", "map_copies_for_tests:build", "sm_90a", **how))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def matrices(shape: tuple[int, int, int], rows_contiguous: bool, values: Any = None) -> testing.Guarded:
    rows, columns, _ = shape
    line = columns if rows_contiguous else -(-rows // 8) * 8
    stride = (line, 1, line * rows) if rows_contiguous else (1, line, line * columns)
    return testing.guarded(shape, "bfloat16", stride=stride, values=values, framework="torch", device="cuda")


def numbers(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.float32)


def groups_of(sizes: list[int]) -> tuple[Any, list[tuple[int, int]]]:
    """Return offsets on the GPU, and (start, end) of each group."""
    ends = np.cumsum(sizes)
    return torch.tensor(ends, dtype=torch.int32, device="cuda"), list(zip(ends - sizes, ends, strict=True))


def table(groups: int, arrays: int) -> Any:
    return torch.full((table_bytes(groups, arrays),), 0xA5, dtype=torch.uint8, device="cuda")


every_size = pytest.mark.parametrize(
    ("sizes", "rows_contiguous"),
    [*((sizes, True) for sizes in SIZES), *((sizes, False) for sizes in STEPS)],
    ids=[
        f"{len(sizes)} groups, {sum(sizes)} rows, {major}" for major, x in (("k", SIZES), ("m", STEPS)) for sizes in x
    ],
)


@every_size
def test_loads_end_with_the_group(sizes: list[int], rows_contiguous: bool) -> None:
    run, (offsets, groups) = kernel("loads", rows_contiguous), groups_of(sizes)
    values = numbers((max(sum(sizes), 1) + 40, K, 1), 1)
    values[sum(sizes) :] = np.nan
    source = matrices(values.shape, rows_contiguous, values)
    target = matrices((BOX, K, len(sizes)), rows_contiguous)
    run(source.array, target.array, offsets, torch.zeros_like(offsets, dtype=torch.int64), table(len(sizes), 1))
    torch.cuda.synchronize()
    target.check_surroundings()
    want = np.zeros((BOX, K, len(sizes)), np.float32)
    for e, (start, end) in enumerate(groups):
        want[: end - start, :, e] = values[start:end, :, 0]
    got = target.array.float().cpu().numpy()
    filled = [e for e, size in enumerate(sizes) if size]  # nobody reads anything for an empty group
    np.testing.assert_array_equal(got[..., filled], want[..., filled])


@every_size
def test_stores_end_with_the_group_and_loads_begin_where_addresses_say(sizes: list[int], rows_contiguous: bool) -> None:
    run, (offsets, groups) = kernel("stores", rows_contiguous), groups_of(sizes)
    place = np.random.default_rng(2).permutation(len(sizes))
    values = numbers((BOX, K, len(sizes)), 3)
    sources = matrices(values.shape, rows_contiguous, values)
    item = BOX * K * sources.array.element_size()
    addresses = torch.tensor(sources.array.data_ptr() + place * item, dtype=torch.int64, device="cuda")
    target = matrices((sum(sizes) + 40, K, 1), rows_contiguous)
    before = target.array.clone()
    run(sources.array[..., :1], target.array, offsets, addresses, table(len(sizes), 2))
    torch.cuda.synchronize()
    target.check_surroundings()
    want = before.float().cpu().numpy()
    for (start, end), e in zip(groups, place, strict=True):
        want[start:end, :, 0] = values[: end - start, :, e]
    np.testing.assert_array_equal(target.array.float().cpu().numpy(), want)
