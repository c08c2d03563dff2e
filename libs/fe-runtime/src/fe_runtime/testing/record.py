"""What a recorded run depends on: commit, versions, GPU and driver, date."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

from fe_runtime.bench.machine import commit_record, gpu_record, today, versions

__all__ = ["describe_run", "gpu_names"]

MORE = ("jaxlib", "fe-gemm", "fe-attention", "fe-norm", "fe-conv", "fe-rope")
"""Packages whose versions matter to a test run beside those that matter to a benchmark."""


def describe_run(root: Path, commit: str | None = None) -> dict[str, Any]:
    """Return commit, whether the tree differs from it, date, versions, GPUs and driver, as JSON values.

    Parameters
    ----------
    root
        The repository.
    commit
        Recorded instead of asking git, for a tree that travelled without its git folder; a suffix ``-dirty`` says that
        it differs.
    """
    if commit is None:
        found = commit_record(root) or {"id": None, "changed": None}
    else:
        found = {"id": commit.removesuffix("-dirty"), "changed": commit.endswith("-dirty")}
    return {
        "commit": found["id"],
        "dirty": found["changed"],
        "date": today(),
        "versions": {"python": platform.python_version(), **versions(MORE)},
        "gpus": gpu_names(),
        "driver": (gpu_record() or {}).get("driver"),
    }


def gpu_names() -> list[str]:
    """Return the names of the CUDA devices that this process sees; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for ordinal in range(count.value):
        name = ctypes.create_string_buffer(256)
        handle = ctypes.c_int()
        if not driver.cuDeviceGet(ctypes.byref(handle), ordinal) and not driver.cuDeviceGetName(name, 256, handle):
            names.append(name.value.decode(errors="replace"))
    return names
