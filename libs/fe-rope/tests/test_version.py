"""A library without operations exports its version and nothing else."""

from importlib.metadata import version

import fe_rope


def test_version_is_the_distributions() -> None:
    assert fe_rope.__version__ == version("fe-rope")


def test_nothing_else_is_exported() -> None:
    assert fe_rope.__all__ == ["__version__"]
    assert [name for name in vars(fe_rope) if not name.startswith("_")] == []
