"""The library says which version it is."""

from importlib.metadata import version

import fe_attention


def test_version_is_the_distributions() -> None:
    assert fe_attention.__version__ == version("fe-attention")
