"""The library says which version it is."""

from importlib.metadata import version

import fe_conv


def test_version_is_the_distributions() -> None:
    assert fe_conv.__version__ == version("fe-conv")
