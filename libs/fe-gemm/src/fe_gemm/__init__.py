"""Fused GEMM and grouped GEMM operations. No operation is built yet; see the README."""

from fe_gemm._version import __version__

__all__ = ["__version__"]
