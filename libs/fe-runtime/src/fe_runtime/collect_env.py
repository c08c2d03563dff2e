"""Report of the environment, for bug reports: ``python -m fe_runtime.collect_env [--json]``.

Runs as a stand-alone file too. Imports the standard library only, writes nothing, needs no network, and never raises:
a question that cannot be answered has the error as its answer.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["collect_env_info", "format_report", "main"]

Section = dict[str, str]

_OUR_PREFIX = "fe-"
_STACK = (
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "jax-tvm-ffi",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "numpy",
    "ml-dtypes",
    "array-api-compat",
    "cuda-python",
    "cuda-bindings",
    "cuda-pathfinder",
    "filelock",
    "platformdirs",
)
_STACK_PREFIXES = ("nvidia-", "cuda-", "jax-cuda")
_ENVIRONMENT_PREFIXES = ("FE_", "CUDNN_", "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "JAX_", "XLA_")
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_GPU_LIBRARIES = (
    "cuda",
    "cudart",
    "cublas",
    "cublasLt",
    "cudnn",
    "nccl",
    "nvrtc",
    "nvJitLink",
    "cute_dsl_runtime",
    "tvm_ffi",
)
_SYSTEM_FOLDERS = ("/usr/local/cuda/lib64", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu")
_WHEEL_FOLDERS = ("nvidia/*/lib", "nvidia_cutlass_dsl*/**/lib", "tvm_ffi/lib", "torch/lib")
_FLAVOUR = re.compile(r"/nvidia_cutlass_dsl/cu\d+/")  # the kernel compiler brings its runtime once per CUDA version
_NO_DRIVER = "no NVIDIA driver"
_TIMEOUT = 10  # seconds for a tool that hangs, as nvidia-smi does when the driver is in trouble


def main(arguments: list[str] | None = None) -> int:
    """Print the report; the command line's entry."""
    parser = argparse.ArgumentParser(prog="fe_runtime.collect_env", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    report = collect_env_info()
    print(json.dumps(report, indent=2) if options.json else format_report(report))
    return 0


def collect_env_info() -> dict[str, Section]:
    """Return ``{section: {key: value}}``, sections in the order of the report.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, logging and environment report.
    """
    return {title: _guarded(probe) for title, probe in _SECTIONS.items()}


def format_report(report: dict[str, Section]) -> str:
    """Return the report as text, one block per section, continuation lines of a value indented."""
    blocks = []
    for title, section in report.items():
        lines = [f"{key}: {value}".replace("\n", "\n    ") for key, value in section.items()]
        blocks.append("\n".join([title, "-" * len(title), *(lines or ["(nothing found)"])]))
    return "\n\n".join(blocks)


def _guarded(probe: Callable[[], Section]) -> Section:
    try:
        return probe()
    except Exception as error:
        return {"error": _describe(error)}


def _value(probe: Callable[[], object]) -> str:
    try:
        return str(probe())
    except Exception as error:
        return _describe(error)


def _of_driver(probe: Callable[[], object]) -> str:
    """Answer a question to the driver or its tool; a machine that lacks them has no driver."""
    try:
        return str(probe())
    except OSError:  # neither the tool nor the library is there
        return _NO_DRIVER
    except Exception as error:
        return _describe(error)


def _describe(error: BaseException) -> str:
    return f"unavailable ({type(error).__name__}: {error})"


def _libraries() -> Section:
    return _versions(lambda name: name.startswith(_OUR_PREFIX))


def _python() -> Section:
    return {
        "python": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "platform": _value(platform.platform),
        "machine": _value(platform.machine),
        "libc": _value(lambda: " ".join(platform.libc_ver())),
        "cpus": _value(os.cpu_count),
    }


def _gpus() -> Section:
    """List the GPUs in torch's order if torch is loaded or installed, else as the management tool does."""
    section = {"driver": _of_driver(lambda: _smi("driver_version").splitlines()[0])}
    if section["driver"] == _NO_DRIVER:
        return section
    torch_gpus = _value(lambda: "\n".join(_torch_gpus()))
    if torch_gpus and not torch_gpus.startswith("unavailable"):
        return {**section, "gpus (torch order)": torch_gpus}
    return {**section, "gpus (nvidia-smi order)": _of_driver(lambda: _smi("index,name,compute_cap,memory.total"))}


def _torch_gpus() -> Iterator[str]:
    torch = importlib.import_module("torch")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        yield f"{index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {memory:.0f} GiB"


def _cuda_toolkit() -> Section:
    section = {
        "driver supports CUDA": _of_driver(_driver_cuda_version),
        "nvcc": _value(lambda: _run("nvcc", "--version").splitlines()[-1] if shutil.which("nvcc") else "not found"),
        "ptxas": _value(lambda: shutil.which("ptxas") or "not found"),
    }
    for name in ("CUDA_HOME", "CUDA_PATH"):
        section[name] = os.environ.get(name, "not set")
    return section


def _driver_cuda_version() -> str:
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _torch() -> Section:
    if importlib.util.find_spec("torch") is None:
        return {"torch": "not installed"}
    torch = importlib.import_module("torch")
    return {
        "torch": _value(lambda: torch.__version__),
        "built for CUDA": _value(lambda: torch.version.cuda),
        "CUDA available": _value(torch.cuda.is_available),
        "cuDNN": _value(torch.backends.cudnn.version),
        "deterministic algorithms": _value(torch.are_deterministic_algorithms_enabled),
        "C++ ABI": _value(torch.compiled_with_cxx11_abi),
    }


def _gpu_libraries() -> Section:
    """Tell for each GPU library which file is loaded and which lie on disk; more than one of either is flagged.

    The kernel compiler's runtime lies there once for each CUDA version, of which one is loaded: that is no duplicate.
    """
    section: Section = {}
    loaded, on_disk = _loaded_libraries(), _libraries_on_disk()
    for name in _GPU_LIBRARIES:
        in_memory, files = loaded.get(name, []), on_disk.get(name, [])
        if not in_memory and not files:
            continue
        lines = [f"loaded:  {path}" for path in in_memory] + [f"on disk: {path}" for path in files]
        different = {_FLAVOUR.sub("/", path) for path in files}
        duplicates = [what for what, paths in (("loaded", in_memory), ("on disk", different)) if len(paths) > 1]
        if duplicates:
            lines.insert(0, f"DUPLICATE ({' and '.join(duplicates)})")
        section[name] = "\n".join(lines)
    return section


def _loaded_libraries() -> dict[str, list[str]]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return {}
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return _by_library(path for path in paths if path.startswith("/"))


def _libraries_on_disk() -> dict[str, list[str]]:
    """Look in the loader's search path, where the wheels put their libraries, and in the usual system folders."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    sites = [Path(entry) for entry in dict.fromkeys(sys.path) if Path(entry).name == "site-packages"]
    folders += [folder for site in sites for pattern in _WHEEL_FOLDERS for folder in site.glob(pattern)]
    folders += [Path(folder) for folder in _SYSTEM_FOLDERS]
    return _by_library(file for folder in folders for file in _files(folder))


def _files(folder: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder)]
    except OSError:  # absent or not readable
        return []


def _by_library(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for path in paths:
        stem, dot, _ = Path(path).name.partition(".so")
        if dot and stem.startswith("lib") and stem[3:] in _GPU_LIBRARIES:
            found.setdefault(stem[3:], set()).add(os.path.realpath(path))
    return {name: sorted(files) for name, files in found.items()}


def _packages() -> Section:
    return _versions(lambda name: name in _STACK or name.startswith(_STACK_PREFIXES))


def _versions(wanted: Callable[[str], bool]) -> Section:
    """Return name and version of the installed distributions that are wanted; two copies of one are flagged."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if wanted(name):
            found.setdefault(name, []).append(distribution.version)
    return {
        name: found[name][0] if len(found[name]) == 1 else f"DUPLICATE: {', '.join(found[name])}"
        for name in sorted(found)
    }


def _environment() -> Section:
    """Return the variables with the known prefixes and the search paths; nothing else, since others hold secrets."""
    names = [name for name in sorted(os.environ) if name.startswith(_ENVIRONMENT_PREFIXES)]
    section = {name: os.environ[name] for name in [*names, *_SEARCH_PATHS] if name in os.environ}
    return {name: "(set)" if any(word in name for word in _SECRET_WORDS) else section[name] for name in section}


def _topology() -> Section:
    return {"nvidia-smi topo -m": _of_driver(lambda: _run("nvidia-smi", "topo", "-m"))}


def _smi(fields: str) -> str:
    return _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    return result.stdout.strip()


_SECTIONS: dict[str, Callable[[], Section]] = {
    "library versions": _libraries,
    "Python and platform": _python,
    "GPU and driver": _gpus,
    "CUDA toolkit": _cuda_toolkit,
    "torch": _torch,
    "GPU libraries": _gpu_libraries,
    "packages": _packages,
    "environment variables": _environment,
    "GPU topology": _topology,
}


if __name__ == "__main__":
    if not __package__:
        # Run as a file: Python put this folder first, where modules with the names of the frameworks lie.
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    raise SystemExit(main())
