"""The library's version is its distribution's, and its names load."""

from importlib.metadata import version

import fe_gemm
from fe_gemm import compat


def test_version_is_the_distributions() -> None:
    assert fe_gemm.__version__ == version("fe-gemm")


def test_every_name_loads() -> None:
    assert all(getattr(fe_gemm, name) is not None for name in fe_gemm.__all__)


def test_the_peers_names_are_our_objects() -> None:
    ours = {id(getattr(fe_gemm, name)) for name in fe_gemm.__all__}
    assert compat.__all__
    assert all(id(getattr(compat, name)) in ours for name in compat.__all__)
