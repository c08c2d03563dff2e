"""Compile many kernels ahead of time, in separate processes, and load many before they are needed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from fe_runtime import env

from .cache import is_stored, load
from .spec import KernelSpec
from .toolchain import check_toolchain

__all__ = ["Outcome", "Progress", "compile_many", "warmup"]

Outcome = float | Exception
"""Seconds that a kernel took (0.0 if it was stored already), or why it could not be compiled."""

Progress = Callable[[int, int, KernelSpec, Outcome], None]
"""Called after each kernel with: how many are done, how many there are, the kernel, its outcome."""


def compile_many(
    specs: Iterable[KernelSpec], jobs: int | None = None, progress: Progress | None = None
) -> list[tuple[KernelSpec, Outcome]]:
    """Compile kernels into the disk cache, several at a time, whatever ``FE_NO_JIT`` says. Needs no GPU.

    Parameters
    ----------
    specs
        What to compile, for any mix of architectures. What is stored already is left alone.
    jobs
        Number of compiling processes, about 0.5 GB each; by default as many as processors and memory allow.
    progress
        Called in this thread after each kernel.

    Returns
    -------
    list of (spec, outcome)
        In the order of ``specs``. A kernel that fails does not stop the others, nor does a compiler that crashes.

    Raises
    ------
    ToolchainError
        There is something to compile and no usable compiler.
    """
    wanted = list(specs)
    outcomes: dict[KernelSpec, Outcome] = {spec: 0.0 for spec in wanted if is_stored(spec)}
    total = len(set(wanted))
    if progress is not None:
        for number, spec in enumerate(outcomes, 1):
            progress(number, total, spec, 0.0)
    missing = [spec for spec in dict.fromkeys(wanted) if spec not in outcomes]
    if missing:
        check_toolchain()
        for spec, outcome in _compile_each(missing, jobs or _default_jobs(len(missing))):
            outcomes[spec] = outcome
            if progress is not None:
                progress(len(outcomes), total, spec, outcome)
    return [(spec, outcomes[spec]) for spec in wanted]


def warmup(
    specs: Iterable[KernelSpec], jobs: int | None = None, progress: Progress | None = None
) -> list[tuple[KernelSpec, float]]:
    """Load kernels into memory, so that their first use neither compiles nor reads the disk.

    Several missing kernels are compiled in separate processes first, unless ``FE_NO_JIT`` forbids it.

    Returns
    -------
    list of (spec, seconds)
        The time each kernel took to load.

    Raises
    ------
    Exception
        As :func:`~fe_runtime.compile.load`, for the first kernel that cannot be had.
    """
    wanted = list(specs)
    missing = [spec for spec in dict.fromkeys(wanted) if not is_stored(spec)]
    if len(missing) > 1 and not env.no_jit():
        compile_many(missing, jobs)  # what fails there fails again below, where it raises
    loaded = []
    for spec in wanted:
        start = time.perf_counter()
        load(spec)
        loaded.append((spec, time.perf_counter() - start))
        if progress is not None:
            progress(len(loaded), len(wanted), *loaded[-1])
    return loaded


_BYTES_PER_JOB = 1 << 30


def _default_jobs(kernels: int) -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(kernels, processors, _available_memory() // _BYTES_PER_JOB))


def _available_memory() -> int:
    """Return the bytes that new processes can take, page cache that would be given up included."""
    with open("/proc/meminfo") as lines:
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024


def _compile_each(specs: list[KernelSpec], jobs: int) -> Iterable[tuple[KernelSpec, Outcome]]:
    waiting: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[KernelSpec, Outcome]] = queue.SimpleQueue()
    for spec in specs:
        waiting.put(spec)
    workers = [_Worker(waiting, done) for _ in range(max(1, min(jobs, len(specs))))]
    try:
        for worker in workers:
            worker.start()
        for _ in specs:
            yield done.get()
    finally:
        for worker in workers:
            worker.stop()


class _Worker(threading.Thread):
    """A thread that feeds one compiling process, and starts another when that one dies."""

    def __init__(
        self, waiting: queue.SimpleQueue[KernelSpec], done: queue.SimpleQueue[tuple[KernelSpec, Outcome]]
    ) -> None:
        super().__init__(daemon=True)
        self._waiting, self._done = waiting, done
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._stopped:
                spec = self._waiting.get_nowait()
                try:
                    outcome: Outcome = self._compile(spec)
                except Exception as error:
                    outcome = error
                self._done.put((spec, outcome))

    def stop(self) -> None:
        """End the process and the thread, whatever they are doing."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()
        self.join()
        self._close()

    def _compile(self, spec: KernelSpec) -> float:
        process = self._process = self._process or _start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(spec.identity + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            code = process.wait()
            self._close()
            raise RuntimeError(f"the compiling process ended with status {code}")
        fields = json.loads(answer)
        if "error" in fields:
            raise RuntimeError(fields["error"])
        return float(fields["seconds"])

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _start_process() -> subprocess.Popen[str]:
    """Start a fresh interpreter that sees the modules and the cache folder of this one.

    Neither a fork, which the compiler's threads would not survive, nor ``multiprocessing``, whose children run the
    caller's main module again.
    """
    settings = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "FE_CACHE_DIR": str(env.cache_dir()),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fe_runtime.compile.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )
