"""The library's version is its distribution's, and its names load."""

from importlib.metadata import version
from types import ModuleType

import fe_gemm
from fe_gemm import compat


def test_version_is_the_distributions() -> None:
    assert fe_gemm.__version__ == version("fe-gemm")


def test_every_name_loads() -> None:
    assert all(getattr(fe_gemm, name) is not None for name in fe_gemm.__all__)


def test_the_peers_names_are_our_objects() -> None:
    ours = {id(getattr(fe_gemm, name)) for name in fe_gemm.__all__}
    found = {name: getattr(compat, name) for name in compat.__all__}
    namespaces = [value for value in found.values() if isinstance(value, ModuleType)]
    assert len(namespaces) == 4
    for module in namespaces:
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    assert [name for name, value in found.items() if id(value) not in ours and value not in namespaces] == []
