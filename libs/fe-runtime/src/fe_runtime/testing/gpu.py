"""Checks that need a GPU: graph replay with changed data, side streams, repeated runs; the lock for parallel runs."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .memory import to_numpy

__all__ = ["LOCK_FILE", "cuda_graph_replay", "gpu_lock", "release_gpu_memory", "repeat_identical", "run_on_side_stream"]

LOCK_FILE = Path(tempfile.gettempdir()) / "fe-gpu.lock"


def cuda_graph_replay(fn: Callable[[], Any], mutate: Callable[[], None]) -> tuple[Any, Any]:
    """Capture a call in a CUDA graph, change its inputs in place, replay; return the replayed and the eager result.

    Parameters
    ----------
    fn
        Makes the call and returns its output or outputs (torch tensors). It runs once before the capture, which
        compiles what has to be compiled.
    mutate
        Writes new contents into the inputs.

    Returns
    -------
    tuple
        Outputs as numpy, replayed and eager, both on the changed inputs; equal in every bit if the kernel is
        deterministic and reads its inputs at replay.
    """
    torch: Any = importlib.import_module("torch")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fn()
    mutate()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    replayed = _as_numpy(captured)
    return replayed, _as_numpy(fn())


def run_on_side_stream(
    fn: Callable[[Any], Any],
    *,
    produce: Callable[[], None] | None = None,
    current: bool = True,
    delay: int = 50_000_000,
) -> Any:
    """Run a call on a stream that is busy and whose operands are not written yet; return its result as numpy.

    Parameters
    ----------
    fn
        ``fn(stream)`` makes the call. A call that uses another stream reads its operands before ``produce`` has
        written them. It runs once before, so that nothing has to be compiled or loaded while the stream sleeps.
    produce
        Writes the operands; enqueued on the side stream after the delay.
    current
        Whether the side stream is torch's current stream during the call. Otherwise ``fn`` has to pass it on.
    delay
        GPU clock cycles that the stream sleeps first; the default is about 25 ms.
    """
    torch: Any = importlib.import_module("torch")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side) if current else nullcontext():
        fn(side)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(delay)
        if produce is not None:
            produce()
    with torch.cuda.stream(side) if current else nullcontext():
        result = fn(side)
    side.synchronize()
    return _as_numpy(result)


def repeat_identical(fn: Callable[[], Any], n: int = 20) -> Any:
    """Run a call ``n`` times and check that every output has the same bits each time; return them as numpy.

    Raises
    ------
    AssertionError
        Naming the run, the output and the number of elements that differ from the first run.
    """
    first = _as_numpy(fn())
    for run in range(1, n):
        again = _as_numpy(fn())
        for name, was, now in _pairs(first, again):
            if was.tobytes() != now.tobytes():
                count = sum(a != b for a, b in zip(_elements(was), _elements(now), strict=True))
                raise AssertionError(f"run {run}: {count} of {was.size} elements of {name} differ from run 0")
    return first


@contextmanager
def gpu_lock(exclusive: bool = False, path: Path = LOCK_FILE) -> Iterator[None]:
    """Hold the machine's GPU lock: shared by ordinary tests, exclusive for one that needs the GPU or its memory alone.

    Processes of every user and every run take the same lock file. Where the system has no such locks (which is where
    there are no GPUs either) nothing is locked.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        yield
        return
    with _open_for_all(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield  # closing the file releases the lock, also when the process dies


def release_gpu_memory(keep: int = 1 << 30) -> None:
    """Give the GPU memory that torch holds but does not use back, if it is more than ``keep`` bytes.

    Otherwise what each of many test processes has kept adds up until a large test finds no memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > keep:
        torch.cuda.empty_cache()


def _open_for_all(path: Path) -> Any:
    if not path.exists():
        path.touch()
        path.chmod(0o666)  # the next user locks it too
    return path.open("rb")


def _as_numpy(result: Any) -> Any:
    if result is None:
        return None
    if isinstance(result, Mapping):
        return {name: _as_numpy(result[name]) for name in result.keys()}  # noqa: SIM118 - a TupleDict iterates values
    if isinstance(result, Sequence):
        return tuple(_as_numpy(item) for item in result)
    return to_numpy(result)


def _pairs(first: Any, second: Any, name: str = "the output") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(first, Mapping):
        for key, value in first.items():
            yield from _pairs(value, second[key], str(key))
    elif isinstance(first, tuple):
        for number, value in enumerate(first):
            yield from _pairs(value, second[number], f"output {number}")
    elif first is not None:
        yield name, first, second


def _elements(array: Any) -> list[bytes]:
    raw, size = array.tobytes(), array.itemsize
    return [raw[at : at + size] for at in range(0, len(raw), size)]
