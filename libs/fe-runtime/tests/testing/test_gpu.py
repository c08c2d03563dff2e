"""The GPU lock here; graph replay, side streams and repetition on a GPU, with torch's own operations as the call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fe_runtime.testing import cuda_graph_replay, gpu_lock, repeat_identical, run_on_side_stream
from fe_runtime.testing.gpu import release_gpu_memory

HOLD = """
import sys, time
from pathlib import Path
from fe_runtime.testing.gpu import gpu_lock
print("ready", flush=True)
sys.stdin.readline()
with gpu_lock(sys.argv[2] == "True", Path(sys.argv[1])):
    entered = time.monotonic()
    time.sleep(0.5)
    print(entered, time.monotonic())
"""


def most_at_once(path: Path, modes: list[bool]) -> int:
    """How many processes held the lock at the same time."""
    commands = [[sys.executable, "-c", HOLD, str(path), str(mode)] for mode in modes]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    spans = [tuple(map(float, worker.communicate(timeout=60)[0].split())) for worker in workers]
    return max(sum(start <= moment < stop for start, stop in spans) for moment, _ in spans)


def test_ordinary_tests_share_the_lock(tmp_path: Path) -> None:
    assert most_at_once(tmp_path / "lock", [False, False]) == 2


@pytest.mark.parametrize("modes", [[True, True], [True, False]])
def test_an_exclusive_test_runs_alone(tmp_path: Path, modes: list[bool]) -> None:
    assert most_at_once(tmp_path / "lock", modes) == 1


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gpu_lock(True, tmp_path / "lock"):
        1 / 0  # noqa: B018
    with gpu_lock(True, tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666


def test_repetition_finds_a_change() -> None:
    values = iter(range(100))
    assert repeat_identical(lambda: {"y": np.ones(3)}, 5)["y"].tolist() == [1, 1, 1]
    with pytest.raises(AssertionError, match="run 1: 2 of 3 elements of y differ from run 0"):
        repeat_identical(lambda: {"x": np.ones(2), "y": np.array([0, (v := next(values)), v])})
    with pytest.raises(AssertionError, match="run 1: 1 of 1 elements of output 1 differ"):
        repeat_identical(lambda: (None, np.array([next(values)])))
    with pytest.raises(AssertionError, match="elements of the output differ"):
        repeat_identical(lambda: np.array([next(values)]))


def test_nan_with_the_same_bits_is_identical() -> None:
    repeat_identical(lambda: np.array([np.nan]))


@pytest.mark.gpu
def test_a_replay_reads_the_changed_inputs() -> None:
    import torch

    x = torch.ones(1000, device="cuda")
    replayed, eager = cuda_graph_replay(lambda: {"y": x * 2}, lambda: x.fill_(3))
    assert replayed["y"].tolist() == eager["y"].tolist() == [6.0] * 1000


@pytest.mark.gpu
def test_a_replay_of_a_call_that_copies_early_shows() -> None:
    import torch

    x = torch.ones(1000, device="cuda")
    early = x.clone()
    replayed, eager = cuda_graph_replay(lambda: early * 2, lambda: x.fill_(3))
    assert replayed[0] == eager[0] == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("current", [True, False])
def test_a_side_stream_shows_a_call_on_the_wrong_stream(current: bool) -> None:
    import torch

    x = torch.zeros(1000, device="cuda")

    def right(stream: Any) -> Any:
        with torch.cuda.stream(stream):
            return x + 1

    def wrong(_stream: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return x + 1

    def produce() -> None:
        x.fill_(5)

    assert run_on_side_stream(wrong, produce=produce, current=current)[0] == 1
    torch.cuda.synchronize()
    x.zero_()
    assert run_on_side_stream(right, produce=produce, current=current)[0] == 6


@pytest.mark.gpu(exclusive=True)
def test_unused_gpu_memory_is_given_back() -> None:
    import torch

    kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= 3 << 30
    release_gpu_memory()
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 1 << 30
    assert torch.cuda.memory_allocated() >= kept.numel()
