"""The one place of this library's version."""

__version__ = "0.1.0"
