"""What to tell the user when a dependency is missing or too old; read from our own package metadata."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

__all__ = ["import_problem"]

# Distributions whose name is not the import name. jaxlib comes and goes with jax.
_DISTRIBUTIONS = {
    "cutlass": "nvidia-cutlass-dsl",
    "jax_tvm_ffi": "jax-tvm-ffi",
    "jaxlib": "jax",
    "ml_dtypes": "ml-dtypes",
    "tvm_ffi": "apache-tvm-ffi",
}


def import_problem(symbol: str, error: ImportError) -> str | None:
    """Return a sentence for an import that failed because of a dependency, None if the failure is of another kind.

    Parameters
    ----------
    symbol
        What the user asked for, with its module: ``"fe_norm.rms_norm_jax"``. Its first part names the library.
    error
        The failure. A dependency that is installed but lacks what we import is a version problem.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, imports and packaging.
    """
    module = (error.name or "").partition(".")[0]
    library = symbol.partition(".")[0].replace("_", "-")
    distribution = _DISTRIBUTIONS.get(module, module)
    requirement, extra = _requirement(library, distribution) or _requirement("fe-runtime", distribution) or ("", "")
    if not requirement:
        return None
    if importlib.util.find_spec(module) is None:
        install = f"{library}[{extra}]" if extra else requirement
        return f"{symbol} needs {distribution}, which is not installed. Run: pip install '{install}'"
    return (
        f"{symbol} needs {requirement}; {distribution} {_version(distribution)} is installed and does not fit "
        f"({error}). Run: pip install --upgrade '{requirement}'"
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _requirement(library: str, distribution: str) -> tuple[str, str] | None:
    """Return ``library``'s requirement on ``distribution`` and the extra it belongs to ("" for none)."""
    try:
        lines = metadata.requires(library) or []
    except metadata.PackageNotFoundError:
        return None
    for line in lines:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0].lower().replace("_", "-") == distribution:
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
            return requirement.strip(), extra[1] if extra else ""
    return None
