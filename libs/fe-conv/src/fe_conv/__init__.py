"""Fused causal convolution operations. No operation is built yet; see the README."""

from fe_conv._version import __version__

__all__ = ["__version__"]
