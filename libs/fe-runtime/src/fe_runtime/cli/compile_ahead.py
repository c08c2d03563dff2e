"""``fe compile``: build the disk cache ahead of time, on any machine, for any architecture."""

from __future__ import annotations

import argparse

from .selection import add_selection, selected
from .support import CommandError
from .terminal import Terminal

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "compile kernels into the cache ahead of time; needs no GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_selection(parser)
    parser.add_argument(
        "--spec", nargs="+", default=[], metavar="JSON", help="these kernels only, as an error named them"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compiling processes (default: as many as fit)")


def run(options: argparse.Namespace) -> int:
    """Compile; status 1 if a kernel could not be compiled."""
    from fe_runtime import env
    from fe_runtime.compile.ahead import compile_many
    from fe_runtime.compile.spec import KernelSpec
    from fe_runtime.compile.toolchain import ToolchainError

    terminal = Terminal()
    specs = [KernelSpec.from_identity(text) for text in options.spec] or selected(options)
    failures: list[tuple[KernelSpec, Exception]] = []
    seconds: list[float] = []
    with terminal.progress(len(specs)) as show:

        def done(number: int, _total: int, spec: KernelSpec, outcome: float | Exception) -> None:
            show(number, f"{spec.operation} {spec.arch}")
            if isinstance(outcome, Exception):
                failures.append((spec, outcome))
            else:
                seconds.append(outcome)

        show(0, "compiling")
        try:
            compile_many(specs, jobs=options.jobs, progress=done)
        except ToolchainError as error:
            raise CommandError(str(error)) from error
    for spec, problem in failures:
        config = ", ".join(f"{name}={value}" for name, value in spec.config)
        terminal.print(f"failed: {spec.operation} {spec.arch} ({config}): {problem}", "bad")
    built = sum(1 for value in seconds if value > 0)
    terminal.print(
        f"{built} kernels compiled, {len(seconds) - built} were there already, {len(failures)} failed; "
        f"cache: {env.cache_dir()}"
    )
    return int(bool(failures))
