"""``fe warmup``: load the kernels that the cache holds for this machine, and say which are missing."""

from __future__ import annotations

import argparse

from .selection import add_selection, selected
from .support import CommandError
from .terminal import Terminal

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "load the kernels that the cache holds, to see that they are there and whole; compiles nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_selection(parser)


def run(options: argparse.Namespace) -> int:
    """Load; status 1 if a kernel of the selection is not in the cache."""
    from fe_runtime import env
    from fe_runtime.compile.ahead import warmup
    from fe_runtime.compile.cache import is_stored
    from fe_runtime.compile.toolchain import ToolchainError

    terminal = Terminal()
    specs = selected(options)
    stored = [spec for spec in specs if is_stored(spec)]
    with terminal.progress(len(stored)) as show:
        try:
            loaded = warmup(stored, progress=lambda number, _total, spec, _seconds: show(number, spec.operation))
        except ToolchainError as error:
            raise CommandError(str(error)) from error
    total = sum(seconds for _, seconds in loaded)
    text = f"{len(loaded)} of {len(specs)} kernels loaded in {total * 1e3:.0f} ms; cache: {env.cache_dir()}"
    terminal.print(text)
    if len(stored) < len(specs):
        library = f" {options.library}" if options.library else ""
        terminal.print(f"{len(specs) - len(stored)} are missing. Build them: fe compile{library}", "note")
    return int(len(stored) < len(specs))
