"""Trace, compile and export a kernel. The only module of this package that imports the kernel compiler."""

from __future__ import annotations

import importlib
import shlex
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .cubin import ResourceUsage, kernel_resources
from .scratch import temporary_folder
from .spec import KernelSpec
from .store import FUNCTION
from .toolchain import INSTALL, ToolchainError

__all__ = ["Built", "build", "load_object"]


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel: the object file, what its GPU code occupies, and the seconds each step took."""

    object_file: bytes
    resources: dict[str, ResourceUsage]
    seconds: dict[str, float]


def build(spec: KernelSpec) -> Built:
    """Compile a kernel for its architecture; no GPU is needed.

    Raises
    ------
    ToolchainError
        The compiler does not import.
    Exception
        Whatever the builder or the compiler raises.
    """
    with _compiler, temporary_folder() as folder:
        start = time.perf_counter()
        cute = _import_dsl()
        launcher, arguments = _builder(spec)(spec.arch, **dict(spec.config))
        begin = time.perf_counter()
        compiled = cute.compile(launcher, *arguments, options=_options(spec.arch, folder))
        middle = time.perf_counter()
        made = folder / "kernel.o"
        compiled.export_to_c(object_file_path=str(made), function_name=FUNCTION, export_only_tvm_ffi_symbols=True)
        end = time.perf_counter()
        seconds = {"import": begin - start, "compile": middle - begin, "export": end - middle}
        return Built(made.read_bytes(), kernel_resources(compiled.__cubin__), seconds)


def load_object(path: Path) -> Any:
    """Load an object file that could not be linked, with the compiler's own loader. Returns a module."""
    with _compiler:
        return _import_dsl().runtime.load_module(str(path), enable_tvm_ffi=True)


_compiler = threading.RLock()
"""The compiler is not thread-safe: tracing, compiling and exporting happen one at a time in a process."""


def _options(arch: str, folder: Path) -> str:
    """Return the compiler's options. Keeping the GPU code changes nothing in the object; it is read for its numbers."""
    return f"--enable-tvm-ffi --gpu-arch {arch} --keep-cubin --dump-dir {shlex.quote(str(folder))}"


def _builder(spec: KernelSpec) -> Any:
    module, _, name = spec.builder.partition(":")
    return getattr(importlib.import_module(module), name)


def _import_dsl() -> ModuleType:
    try:
        return importlib.import_module("cutlass.cute")
    except ImportError as error:
        raise ToolchainError(f"nvidia-cutlass-dsl does not import: {error}. Run: {INSTALL}") from error
