"""Sums over the rows of matrices of partial sums: they compile anywhere, and have the same bits in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fe_runtime import compile as kernels
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError, resource_usage


@pytest.fixture(autouse=True)
def builder_beside_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def spec(arch: str, most: int, overlap: bool) -> KernelSpec:
    return KernelSpec.of("fe_test.sums", "partial_sums_for_tests:build", arch, most=most, overlap=overlap)


@pytest.mark.parametrize(
    ("arch", "overlap"), [("sm_80", False), ("sm_90a", True), ("sm_100a", False), ("sm_120a", False)]
)
def test_compiles_without_spills(arch: str, overlap: bool) -> None:
    ((symbol, usage),) = resource_usage(spec(arch, 300, overlap)).items()
    assert symbol.startswith("fe_test_sums")
    assert usage.frame_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 128, 299, 300])
def test_sums_of_whole_numbers_are_exact(rows: int) -> None:
    torch = pytest.importorskip("torch")
    try:
        run = kernels.load(spec(kernels.arch_for(capability(Device("cuda", 0))), 300, overlap=False))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")
    for columns in (1, 31, 32, 33, 1000):
        random = np.random.default_rng([rows, columns])
        values = [random.integers(-9, 10, (rows, columns)).astype(np.float32) for _ in range(2)]
        wide = torch.full((rows + 1, columns + 3), float("nan"), device="cuda")
        matrices = [wide.clone()[:rows, :columns].copy_(torch.from_numpy(x)) for x in values]
        for _ in range(2):
            found = [
                torch.full((columns,), float("nan"), device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16)
            ]
            run(*matrices, *found)
            np.testing.assert_array_equal(found[0].cpu().numpy(), values[0].sum(0))
            assert torch.equal(found[1].cpu(), torch.from_numpy(values[1].sum(0)).bfloat16())
