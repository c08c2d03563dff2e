"""What the commands print: lines, tables that fit the terminal, and progress."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Column", "Terminal"]

GAP = "  "
LINE = "-"
PLAIN_WIDTH = 140
"""Columns of an output that is no terminal."""

STYLES = {"good": "green", "bad": "bold red", "note": "yellow", "strong": "bold"}

Row = Sequence[str] | str
"""The cells of a row, or the heading of the rows that follow."""


@dataclass(frozen=True)
class Column:
    """A column of a table; where the width does not suffice, those of the highest ``rank`` go first, 0 stays."""

    heading: str
    right: bool = False
    rank: int = 0


@dataclass
class Terminal:
    """Standard output, ``width`` characters wide; it is asked for where none is given (``COLUMNS`` counts too)."""

    width: int = field(default_factory=lambda: shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns)
    interactive: bool = field(default_factory=lambda: sys.stdout.isatty())

    def __post_init__(self) -> None:
        self._console = _console(self.width, self.interactive)

    def print(self, text: str = "", style: str = "") -> None:
        """Print a text in one of :data:`STYLES`; the terminal breaks long lines."""
        from rich.text import Text

        self._console.print(Text(text, STYLES.get(style, "")), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print something to know while the work goes on, above the line that shows progress."""
        self.print(text, "note")

    def wrapped(self, text: str, indent: str = "") -> None:
        """Print a text in lines that are indented and break between words, never within one."""
        print(
            textwrap.fill(
                text,
                self.width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    def table(self, title: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Print a table no wider than the terminal, every cell whole.

        Where the width does not suffice, what is the same in every row moves below the title, then columns of a
        rank are left out; where that does not suffice either, each row becomes a list.
        """
        self.print(title, "strong")
        cells = [row for row in rows if not isinstance(row, str)]
        shared, kept = _fitting(columns, cells, self.width)
        if shared:
            self.wrapped("; ".join(f"{columns[n].heading}: {cells[0][n]}" for n in shared))
        chosen = [columns[n] for n in kept]
        widths = _widths(chosen, [[row[n] for n in kept] for row in cells])
        if _total(widths) > self.width:
            self._lists(chosen, [row if isinstance(row, str) else [row[n] for n in kept] for row in rows])
            return
        self.print(_line([column.heading for column in chosen], chosen, widths), "strong")
        print(LINE * _total(widths))
        for row in rows:
            if isinstance(row, str):
                self.print(row, "strong")
            else:
                print(_line([row[n] for n in kept], chosen, widths))

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Give ``show(done, what)``, which shows how far the work is; nothing where stdout is no terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        parts = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*parts, console=self._console, transient=True, disable=not self.interactive) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, what: bar.update(task, completed=done, description=what, refresh=True)

    def _lists(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        for row in rows:
            if isinstance(row, str):
                self.print(row, "strong")
                continue
            print(LINE * min(self.width, 20))
            for column, cell in zip(columns, row, strict=True):
                if cell:
                    self.wrapped(f"{column.heading}: {cell}")


def _console(width: int, interactive: bool) -> Any:
    from rich.console import Console  # not for the sake of ``fe --help``

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the command's own business

    return Output(width=width, force_terminal=interactive)


def _fitting(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the columns that are told once for all rows, and of those that stay."""
    shared: list[int] = []
    kept = list(range(len(columns)))

    def too_wide() -> bool:
        return _total(_widths([columns[n] for n in kept], [[row[n] for n in kept] for row in cells])) > width

    def leave(candidates: list[int]) -> list[int]:
        gone = []
        for number in sorted(candidates, key=lambda n: columns[n].rank, reverse=True):
            if not too_wide():
                break
            kept.remove(number)
            gone.append(number)
        return gone

    if len(cells) > 1:
        shared = leave([n for n in kept if len({row[n] for row in cells}) == 1])
    leave([n for n in reversed(kept) if columns[n].rank])
    return sorted(shared), kept


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(text) for text in (column.heading, *(row[n] for row in cells))) for n, column in enumerate(columns)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    aligned = (
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    return GAP.join(aligned).rstrip()
