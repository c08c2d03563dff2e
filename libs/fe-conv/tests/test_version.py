"""A library without operations exports its version and nothing else."""

from importlib.metadata import version

import fe_conv


def test_version_is_the_distributions() -> None:
    assert fe_conv.__version__ == version("fe-conv")


def test_nothing_else_is_exported() -> None:
    assert fe_conv.__all__ == ["__version__"]
    assert [name for name in vars(fe_conv) if not name.startswith("_")] == []
