"""Compiled kernels: from a :class:`KernelSpec` to a callable, through memory, disk and the compiler.

| module | concern |
|---|---|
| ``spec`` | :class:`KernelSpec`, what is compiled; :func:`arch_for` |
| ``cache`` | :func:`load`: memory, then disk, then compile |
| ``memory`` | the bounded table of one operation, one maker per key |
| ``store`` | entries on disk: read, verify, write, lock |
| ``sources`` | the source files that a kernel is made of, and their hash |
| ``toolchain`` | the installed compiler and FFI: versions, problems, runtime library |
| ``build`` | trace, compile, export; the only module here that imports the compiler |
| ``link`` | object file to shared library |
| ``loader`` | verified bytes to callable, without the compiler |
| ``scratch`` | temporary files |
| ``cubin`` | registers, stack and shared memory, read from the GPU code |
| ``ahead`` | many kernels in separate processes (``worker``), for ``fe compile`` and ``fe warmup`` |
"""

from __future__ import annotations

from fe_runtime._lazy import lazy_exports

_HERE = "fe_runtime.compile"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CacheInfo": f"{_HERE}.memory:CacheInfo",
        "KernelSpec": f"{_HERE}.spec:KernelSpec",
        "ResourceUsage": f"{_HERE}.cubin:ResourceUsage",
        "ToolchainError": f"{_HERE}.toolchain:ToolchainError",
        "arch_for": f"{_HERE}.spec:arch_for",
        "cache_clear": f"{_HERE}.cache:cache_clear",
        "cache_info": f"{_HERE}.cache:cache_info",
        "check_toolchain": f"{_HERE}.toolchain:check_toolchain",
        "compile_many": f"{_HERE}.ahead:compile_many",
        "is_stored": f"{_HERE}.cache:is_stored",
        "load": f"{_HERE}.cache:load",
        "resource_usage": f"{_HERE}.cache:resource_usage",
        "warmup": f"{_HERE}.ahead:warmup",
    },
)
