"""A library without operations exports its version and nothing else."""

from importlib.metadata import version
from types import ModuleType

import fe_gemm


def test_version_is_the_distributions() -> None:
    assert fe_gemm.__version__ == version("fe-gemm")


def test_nothing_else_is_exported() -> None:
    assert fe_gemm.__all__ == ["__version__"]
    public = {name: value for name, value in vars(fe_gemm).items() if not name.startswith("_")}
    assert [name for name, value in public.items() if not isinstance(value, ModuleType)] == []
