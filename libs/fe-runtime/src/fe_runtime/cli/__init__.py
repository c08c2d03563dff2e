"""The ``fe`` command: one module per subcommand.

Each module has ``SUMMARY``, ``add_arguments(parser)`` and ``run(options) -> exit status``; it imports what it needs
when it runs, so that ``fe --help`` loads no framework.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from fe_runtime._version import __version__

from .support import CommandError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("demo", "doctor", "bench", "plot", "compile", "warmup")

_MODULES = {"compile": "compile_ahead"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 0, 1 for a result that is not good, 2 for a wrong request."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(_module(options.command).run(options))
    except CommandError as error:
        print(f"fe {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output, "head" say, has seen enough; Python must not flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fe", description="Fused GPU operations: show, check, time and compile them.")
    parser.add_argument("--version", action="version", version=f"fe-runtime {__version__}")
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name in COMMANDS:
        module = _module(name)
        module.add_arguments(subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY))
    return parser


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_MODULES.get(command, command)}")
