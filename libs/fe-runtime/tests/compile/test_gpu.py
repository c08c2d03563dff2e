"""Compiled kernels on a GPU: values, streams, and CUDA graphs that meet a kernel for the first time.

Where no compiler is installed, the kernels have to be in the cache already, as for any user of such a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fe_runtime import compile as kernels
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import KernelSpec, ToolchainError

pytestmark = pytest.mark.gpu

THREADS = {"values": 128, "stream": 160, "first launch": 192, "first load": 224}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return pytest.importorskip("torch")


def spec(case: str) -> KernelSpec:
    arch = kernels.arch_for(capability(Device("cuda", 0)))
    return KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", arch, threads=THREADS[case])


def load(case: str) -> Callable[..., None]:
    try:
        return kernels.load(spec(case))
    except ToolchainError as error:
        pytest.skip(f"the kernel is not stored, and {error}")


def test_values(torch: Any) -> None:
    scale = load("values")
    for n in (1, 7, 100, 128):
        x = torch.randn(n, device="cuda")
        out = torch.full_like(x, float("nan"))
        scale(x, out, 2.5)
        assert torch.equal(out, x * 2.5)


def test_current_stream_is_used(torch: Any) -> None:
    """The input is produced late on a side stream; a launch on any other stream would read the old values."""
    scale = load("stream")
    x, out = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        x.fill_(3.0)
        scale(x, out, 2.0)
        result = out.clone()
    torch.cuda.synchronize()
    assert torch.equal(result, torch.full_like(x, 6.0))


@pytest.mark.parametrize("case", ["first launch", "first load"])
def test_graph_that_captures_a_first_time(torch: Any, case: str) -> None:
    """Neither the first launch of a loaded kernel nor reading one from disk disturbs the capture."""
    early = load(case) if case == "first launch" else None
    if early is None and not kernels.is_stored(spec(case)):
        load(case)  # compile and store it, then forget it
        kernels.cache_clear()
    x, out = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (early or load(case))(x, out, 2.0)
    for value in (1.0, -4.5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(x, 2 * value))
