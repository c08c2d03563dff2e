"""A library without operations exports its version and nothing else."""

from importlib.metadata import version

import fe_attention


def test_version_is_the_distributions() -> None:
    assert fe_attention.__version__ == version("fe-attention")


def test_nothing_else_is_exported() -> None:
    assert fe_attention.__all__ == ["__version__"]
    assert [name for name in vars(fe_attention) if not name.startswith("_")] == []
