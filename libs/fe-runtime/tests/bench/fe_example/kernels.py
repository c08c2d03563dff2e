"""Stands for device code: specs name it, no test compiles it."""

from __future__ import annotations


def build(arch: str, columns: int) -> object:
    raise NotImplementedError(f"no kernel of {columns} columns for {arch}")
