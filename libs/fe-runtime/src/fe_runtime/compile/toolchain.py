"""The installed kernel compiler and FFI: versions, what is wrong with them, and the runtime library.

Everything is found by looking at folders and metadata; neither is imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fe_runtime.errors import NotSupportedError

__all__ = ["Toolchain", "ToolchainError", "check_toolchain", "current"]

MINIMUM_DSL = "4.8.1"
INSTALL = f"pip install 'nvidia-cutlass-dsl[cu13]>={MINIMUM_DSL},<4.9' apache-tvm-ffi"


class ToolchainError(NotSupportedError, ImportError):
    """What compiles or loads kernels is missing, too old or mixed up.

    An ``ImportError``, because something has to be installed; a ``NotSupportedError``, because this installation has
    no kernel for the request.
    """


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What this machine compiles kernels with, or would load them with.

    ``problem`` says why kernels cannot be compiled here and how to mend it; ``None`` when they can.
    """

    dsl: tuple[tuple[str, str], ...]
    tvm_ffi: str | None
    cuda: int | None
    runtime_library: Path | None
    platform: str
    settings: tuple[tuple[str, str], ...]
    problem: str | None

    @property
    def facts(self) -> dict[str, object]:
        """What a stored kernel depends on, as JSON values."""
        return {
            "dsl": dict(self.dsl),
            "tvm_ffi": self.tvm_ffi,
            "cuda": self.cuda,
            "platform": self.platform,
            "settings": dict(self.settings),
        }

    @property
    def label(self) -> str:
        """A folder name for the facts: readable, and unique by a hash."""
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        return f"dsl{dict(self.dsl).get(_DSL, '-')}-cuda{self.cuda}-{self.platform}-{digest[:12]}"

    def accepts(self, facts: Mapping[str, object]) -> bool:
        """Whether a kernel that was compiled under ``facts`` may be used here.

        With a compiler installed: only what this very compiler would make. Without one (a slim production image):
        whatever any compiler made under default settings for the same FFI, CUDA major version and platform.
        """
        if self.dsl:
            return facts == self.facts
        same = ("tvm_ffi", "cuda", "platform")
        return all(facts.get(name) == self.facts[name] for name in same) and not facts.get("settings")


@functools.lru_cache(maxsize=1)
def current() -> Toolchain:
    """Return the toolchain of this process."""
    dsl = _installed("nvidia_cutlass_dsl")
    tvm_ffi = _tvm_ffi_version()
    cuda, library, library_problem = _runtime_library()
    return Toolchain(
        dsl=tuple(sorted(dsl.items())),
        tvm_ffi=tvm_ffi,
        cuda=cuda,
        runtime_library=library,
        platform=f"{sys.platform}-{platform.machine()}",
        settings=tuple(sorted((name, os.environ[name]) for name in _CODE_SETTINGS if os.environ.get(name))),
        problem=_dsl_problem(dsl) or _tvm_ffi_problem(tvm_ffi) or library_problem,
    )


def check_toolchain() -> Toolchain:
    """Return the toolchain if kernels can be compiled here.

    Raises
    ------
    ToolchainError
        The compiler is missing, too old, incomplete or a mix of versions; the text names the fix.
    """
    toolchain = current()
    if toolchain.problem is not None:
        raise ToolchainError(toolchain.problem)
    return toolchain


_DSL = "nvidia-cutlass-dsl"

_CODE_SETTINGS = tuple(
    f"CUTE_DSL_{name}"
    for name in (
        "AUTO_M2S",
        "COMPILER_BACKEND",
        "COMPILER_OPT",
        "DEBUG",
        "ENABLE_ASSERTIONS",
        "ENABLE_PYIR",
        "LINEINFO",
        "LOC_TRACEBACKS",
        "TOLERATE_M2M",
    )
)
"""The compiler's own environment variables that change the code it makes."""


def _installed(prefix: str) -> dict[str, str]:
    """Return versions by distribution name, for the installed distributions whose folder starts with ``prefix``.

    The metadata folders' names say it all; reading each distribution's metadata would take ten times as long.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO.fullmatch(name)
            if match and name.startswith(prefix):
                found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return found


_DIST_INFO = re.compile(r"(?P<name>\w+)-(?P<version>[^-]+)\.dist-info")


def _tvm_ffi_version() -> str | None:
    installed = _installed("apache_tvm_ffi").get("apache-tvm-ffi")
    if installed is not None or _find_spec("tvm_ffi") is None:
        return installed
    import tvm_ffi  # without metadata only the package itself knows

    return str(tvm_ffi.__version__)


def _dsl_problem(dsl: Mapping[str, str]) -> str | None:
    """Say what is wrong with the installed compiler, and the fix."""
    if not dsl:
        return f"the kernel compiler nvidia-cutlass-dsl is not installed. Run: {INSTALL}"
    listed = ", ".join(f"{name} {version}" for name, version in sorted(dsl.items()))
    reinstall = f"Run: pip uninstall -y {' '.join(sorted(dsl))}; {INSTALL}"
    if len(set(dsl.values())) > 1:
        return f"the installed parts of nvidia-cutlass-dsl differ in version ({listed}). {reinstall}"
    version = next(iter(dsl.values()))
    if _numbers(version) < _numbers(MINIMUM_DSL):
        return f"nvidia-cutlass-dsl {version} is too old; {MINIMUM_DSL} or newer is needed ({listed}). {reinstall}"
    flavours = [name for name in dsl if re.search(r"-libs-cu\d+$", name)]
    if _DSL not in dsl or not flavours or _find_spec("cutlass") is None:
        return f"the installation of nvidia-cutlass-dsl is incomplete ({listed}). {reinstall}"
    return None


def _tvm_ffi_problem(version: str | None) -> str | None:
    return None if version else f"apache-tvm-ffi, which loads kernels, is not installed. Run: {INSTALL}"


def _runtime_library() -> tuple[int | None, Path | None, str | None]:
    """Return the CUDA major version and path of the compiler's runtime library, or what is wrong.

    The rule is the compiler's own: the newest flavour that the driver supports; without a driver, the newest.
    """
    flavours: dict[int, Path] = {}
    spec = _find_spec("nvidia_cutlass_dsl")
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in Path(folder).glob("cu*/lib/libcute_dsl_runtime.so"):
            number = library.parts[-3].removeprefix("cu")
            if number.isdigit():
                flavours.setdefault(int(number), library)
    if not flavours:
        return None, None, f"libcute_dsl_runtime.so of nvidia-cutlass-dsl was not found. Run: {INSTALL}"
    driver = _driver_cuda_major()
    usable = [number for number in flavours if driver is None or number <= driver]
    if not usable:
        return (
            None,
            None,
            (
                f"nvidia-cutlass-dsl is installed for CUDA {min(flavours)}, but the driver supports CUDA {driver}. "
                "Update the driver, or install nvidia-cutlass-dsl without the extra cu13"
            ),
        )
    return max(usable), flavours[max(usable)], None


def _driver_cuda_major() -> int | None:
    """Return the CUDA major version that the driver supports; ``None`` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or version.value == 0 else version.value // 1000


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a top-level package without importing it; ``None`` also when an import hook forbids it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
