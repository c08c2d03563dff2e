"""What is allocated and not written must show, in every dtype and by every way to allocate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fe_runtime.arrays import empty
from fe_runtime.dtypes import DTYPES
from fe_runtime.testing import poisoned_memory, to_numpy

TORCH = [name for name in DTYPES if name != "float4_e2m1fn"]


def is_poison(tensor: torch.Tensor) -> bool:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return bool((raw == 0xFF).all()) and raw.numel() > 0


@pytest.mark.parametrize("name", TORCH)
def test_every_dtype_of_torch(name: str) -> None:
    with poisoned_memory():
        assert is_poison(empty("torch", (3, 5), name, "cpu"))


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("float4")])
def test_every_dtype_of_numpy(name: str) -> None:
    with poisoned_memory():
        array = empty("numpy", (3, 5), name, "cpu")
    assert set(array.tobytes()) == {0xFF}
    if "float" in name:
        assert np.isnan(array.astype(np.float64)).all()


def test_every_way_to_allocate() -> None:
    like = torch.zeros(4, 6)[:, ::2]
    kept = torch.empty  # a reference that somebody took before
    with poisoned_memory():
        made = [
            kept(3, 2),
            torch.empty((2, 3), dtype=torch.int64),
            torch.empty_like(like),
            torch.empty_like(like, dtype=torch.bfloat16),
            torch.empty_strided((2, 3), (7, 2)),
            torch.empty_permuted((2, 3), (1, 0)),
            like.new_empty(5),
            like.new_empty_strided((2, 2), (4, 1)),
        ]
        arrays = [np.empty(3), np.empty_like(np.ones((2, 2), order="F")), np.empty((2, 0))]
    assert all(map(is_poison, made))
    assert all(set(array.tobytes()) <= {0xFF} for array in arrays)


def test_what_is_not_touched() -> None:
    target = torch.zeros(3)
    with poisoned_memory():
        torch.empty(3, out=target)
        assert torch.empty(0).numel() == 0
        assert torch.empty(3, device="meta").is_meta
        assert torch.zeros(3).tolist() == torch.ones(3).sub(1).tolist() == [0, 0, 0]
        assert np.zeros(2).tolist() == [0, 0]
    assert target.tolist() == [0, 0, 0]


def test_afterwards_nothing_is_left() -> None:
    before = np.empty, np.empty_like
    with poisoned_memory():
        assert np.empty is not before[0]
    assert (np.empty, np.empty_like) == before
    with pytest.raises(ZeroDivisionError), poisoned_memory():
        1 / 0  # noqa: B018
    assert np.empty is before[0]
    assert torch._C._len_torch_function_stack() == 0


def test_an_unwritten_element_is_nan() -> None:
    with poisoned_memory():
        tensor = torch.empty(4)
    tensor[:3] = 1
    assert math.isnan(to_numpy(tensor)[3])


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    with poisoned_memory():
        for name in TORCH:
            tensor = empty("torch", (3, 5), name, "cuda:0")
            assert set(to_numpy(tensor.view(torch.uint8)).tobytes()) == {0xFF}


@pytest.mark.gpu
def test_each_replay_of_a_graph_starts_from_poison() -> None:
    graph = torch.cuda.CUDAGraph()
    torch.empty(4, device="cuda")
    with poisoned_memory(), torch.cuda.graph(graph):
        tensor = torch.empty(4, device="cuda")
    for _ in range(2):
        tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bool(torch.isnan(tensor).all())
