"""What a recorded run depends on: commit, versions, GPU and driver, date."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["describe_run", "gpu_names"]

DISTRIBUTIONS = (
    "torch",
    "jax",
    "jaxlib",
    "numpy",
    "ml_dtypes",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "jax-tvm-ffi",
)
LIBRARIES = ("fe_runtime", "fe_gemm", "fe_attention", "fe_norm", "fe_conv", "fe_rope")


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
    dirty: bool | None
    if commit is not None:
        dirty = commit.endswith("-dirty")
        commit = commit.removesuffix("-dirty")
    else:
        commit = _git(root, "rev-parse", "HEAD")
        status = _git(root, "status", "--porcelain")
        dirty = None if status is None else bool(status)
    return {
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "gpus": gpu_names(),
        "driver": _driver_version(),
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


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in LIBRARIES:  # by import, since a source tree on the path is not an installed distribution
        with contextlib.suppress(ImportError):
            found[name.replace("_", "-")] = str(importlib.import_module(f"{name}._version").__version__)
    return found


def _driver_version() -> str | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2():
        return None
    status = library.nvmlSystemGetDriverVersion(text, 96)
    library.nvmlShutdown()
    return None if status else text.value.decode(errors="replace")
