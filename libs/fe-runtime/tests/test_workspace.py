"""Cutting a workspace into scratch arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fe_runtime import workspace
from fe_runtime.contract import Bound

SCRATCH = (((3, 5), "float32"), ((7,), "bfloat16"), ((2, 2), "float32"))


def test_size_has_room_for_every_array_at_a_multiple_of_128() -> None:
    assert workspace.size(SCRATCH) == 3 * 128
    assert workspace.size([((33,), "float32")]) == 256
    assert workspace.size(()) == 0


def test_arrays_lie_apart_in_the_memory_of_the_workspace() -> None:
    memory = torch.zeros(workspace.size(SCRATCH), dtype=torch.uint8)
    arrays = workspace.cut(memory, SCRATCH)
    assert [(tuple(x.shape), x.dtype) for x in arrays] == [
        ((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 2), torch.float32),
    ]  # fmt: skip
    assert [x.data_ptr() - memory.data_ptr() for x in arrays] == [0, 128, 256]
    for number, x in enumerate(arrays):
        x.fill_(number + 1)
    assert [float(x.max()) for x in arrays] == [float(x.min()) for x in arrays] == [1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(99, dtype=torch.uint8),
        torch.zeros(400, dtype=torch.uint8)[::2],
        torch.zeros(100, 2, dtype=torch.uint8),
        torch.zeros(400, dtype=torch.int8),
        torch.zeros(400, dtype=torch.uint8, device="meta"),
        [0] * 400,
    ],
)
def test_what_is_no_workspace(bad: Any) -> None:
    with pytest.raises(
        ValueError, match="operation: workspace must be a contiguous uint8 vector of at least 100 bytes"
    ):
        workspace.check("operation", bad, 100, Bound("operation"))


def test_what_is_one() -> None:
    for size in (100, 101):
        workspace.check("operation", torch.zeros(size, dtype=torch.uint8), 100, Bound("operation"))


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="operation: descriptor_workspace must be a contiguous uint8 vector"):
        workspace.check("operation", torch.zeros(9, dtype=torch.uint8), 10, Bound("operation"), "descriptor_workspace")


def test_a_workspace_lies_apart_from_all_operands() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    apart = [("a", None), ("b", torch.zeros(4)), ("c", memory[:0])]
    workspace.check_apart("operation", memory[:128], [*apart, ("d", memory[128:])])
    with pytest.raises(ValueError, match=r"operation: workspace must not overlap .* overlap with d"):
        workspace.check_apart("operation", memory[:129], [*apart, ("d", memory[128:])])
