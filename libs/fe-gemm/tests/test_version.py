"""A library without operations exports its version and nothing else."""

from importlib.metadata import version

import fe_gemm


def test_version_is_the_distributions() -> None:
    assert fe_gemm.__version__ == version("fe-gemm")


def test_nothing_else_is_exported() -> None:
    assert fe_gemm.__all__ == ["__version__"]
    assert [name for name in vars(fe_gemm) if not name.startswith("_")] == []
