"""What the subcommands share: errors, the choice of operations and of the place to run."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fe_runtime.bench.discover import Found
    from fe_runtime.bench.places import Place

__all__ = ["NO_DRAWING", "CommandError", "can_draw", "find_operations", "place_for", "require_drawing"]

NO_DRAWING = "matplotlib, which is not installed. Run: pip install matplotlib"


class CommandError(Exception):
    """A request that cannot be carried out; the text says what to do."""


def can_draw() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_drawing() -> None:
    """Raise unless pictures can be drawn."""
    if not can_draw():
        raise CommandError(f"it needs {NO_DRAWING}")


def find_operations() -> Found:
    """Return the workloads of the installed libraries, saying on stderr which library could not be read."""
    from fe_runtime.bench.discover import find_workloads

    found = find_workloads()
    for library, reason in found.broken.items():
        print(f"fe: {library} is left out: {reason}", file=sys.stderr)
    if not found.workloads:
        advice = "In a clone of fe, run: pip install ./libs/fe-runtime ./libs/fe-norm"  # none is released yet
        raise CommandError(f"no operation is installed. {advice}")
    return found


def place_for(framework: str | None) -> Place:
    """Return where to run; see :func:`fe_runtime.bench.places.find_place`."""
    from fe_runtime.bench.places import find_place

    try:
        return find_place(framework)
    except ImportError as error:
        raise CommandError(f"{framework} is not installed. Run: pip install 'fe-runtime[{framework}]'") from error
