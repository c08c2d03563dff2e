"""Tables that fit, whatever the width."""

from __future__ import annotations

import io
import sys

import pytest

from fe_runtime.cli.terminal import Column, Terminal

COLUMNS = (
    Column("operation"),
    Column("shape"),
    Column("backend", rank=1),
    Column("time", right=True, rank=2),
)
ROWS = [["scale", "3x16", "kernel", "10 us"], ["scale", "1600x1024", "reference", "5 us"]]


def printed(width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    Terminal(width, interactive=False).table("title", COLUMNS, ROWS)
    return capsys.readouterr().out.splitlines()


def test_all_columns_where_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(140, capsys) == [
        "title",
        "operation  shape      backend     time",
        "-" * 38,
        "scale      3x16       kernel     10 us",
        "scale      1600x1024  reference   5 us",
    ]


def test_what_all_rows_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(37, capsys) == [
        "title",
        "operation: scale",
        "shape      backend     time",
        "-" * 27,
        "3x16       kernel     10 us",
        "1600x1024  reference   5 us",
    ]


def test_the_least_important_column_goes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(26, capsys)[2] == "shape      backend"
    assert printed(19, capsys)[2] == "shape"


def test_a_row_becomes_a_list_where_nothing_else_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(8, capsys)[3:] == ["-" * 8, "shape:", "3x16", "-" * 8, "shape:", "1600x1024"]


def test_headings_stand_between_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(80, interactive=False).table("title", COLUMNS[:2], ["first", ROWS[0], "second", ROWS[1]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["first", "scale", "second", "scale"]


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert Terminal().width == 77


def test_colour_and_progress_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(interactive: bool) -> str:
        out = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.delenv("NO_COLOR", raising=False)
            terminal = Terminal(80, interactive)
            with terminal.progress(3) as show:
                show(1, "a step with a very long description")
                terminal.note("known")
            terminal.print("done", "good")
        return out.getvalue()

    assert shown(False) == "known\ndone\n"
    seen = shown(True)
    assert "1/3" in seen
    assert "\x1b[32mdone" in seen
