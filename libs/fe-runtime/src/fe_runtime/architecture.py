"""Facts about GPU architectures such as ``"sm_90a"``, for plans and kernels alike: this module imports nothing."""

from __future__ import annotations

__all__ = ["architecture_number", "shared_memory_per_sm", "threads_per_sm"]


def architecture_number(arch: str) -> int:
    """Return 90 for ``"sm_90a"``."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def threads_per_sm(arch: str) -> int:
    """Return how many threads a multiprocessor holds."""
    return 2048 if architecture_number(arch) in (80, 90, 100, 103) else 1536


def shared_memory_per_sm(arch: str) -> int:
    """Return the bytes of shared memory of a multiprocessor."""
    number = architecture_number(arch)
    return (228 if number in (90, 100, 103) else 164 if number == 80 else 100) << 10
