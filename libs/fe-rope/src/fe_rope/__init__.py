"""Fused rotary embedding operations. No operation is built yet; see the README."""

from fe_rope._version import __version__

__all__ = ["__version__"]
