"""PNGs of the demonstration and of benchmark records, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .limits import rate_text
from .problem import CPU_REFERENCE, ON_THE_CPU
from .run import OURS, PLAIN
from .timing import time_text

if TYPE_CHECKING:
    from .demo import DemoRow

__all__ = ["draw_demo", "draw_record"]

INK, FAINT, GRID = "#1c2430", "#6b7684", "#e4e8ee"
BLUE, GREY, GREEN, RED, OCHRE = "#1f6feb", "#b8c2cf", "#1a7f4b", "#d1242f", "#8a5a00"
PEERS = ("#8957e5", "#e07b39", "#2da6a0", "#c4478f", "#7d8590", "#a3b31e", "#5b6ee1")
DPI = 150
DASHES = (0, (4, 3))
MARGIN = 0.12
"""Inches between what is drawn and the edge."""


def draw_demo(rows: Mapping[str, Sequence[DemoRow]], path: Path) -> None:
    """Draw the error of every row beside its bound, and its time beside the plain expression's.

    Parameters
    ----------
    rows
        Lines of the table by place.
    path
        The PNG to write.
    """
    lines = [(place, row) for place, group in rows.items() for row in group]
    several = len(rows) > 1
    names = [_name(row, place if several else "") for place, row in lines]
    figure, (errors, times) = _figure(len(lines), (1.0, 1.0))
    _draw_errors(errors, [row for _, row in lines], names)
    _draw_times(times, [row for _, row in lines])
    wrong = sum(not row.ok for _, row in lines)
    verdict = f"{wrong} of {len(lines)} outside their bound" if wrong else f"all {len(lines)} within their bound"
    where = ", ".join(rows)
    if all(row.backend == CPU_REFERENCE for _, row in lines):
        where += f". {ON_THE_CPU}"
    _title(figure, f"fe demo: {verdict}", where)
    _save(figure, path)


def draw_record(record: Mapping[str, Any], path: Path) -> None:
    """Draw the rate of every case and implementation, with the measured limit of the machine.

    Many cases get a row each, with a mark per implementation; a single case gets a bar per implementation.
    """
    results, limit = record["results"], record["limit"]
    unit, scale = ("GB/s", 1e9) if limit["kind"] == "bytes" else ("TFLOP/s", 1e12)
    single = len(results) == 1
    figure, (axes,) = _figure(len(results[0]["entries"] if single else results), (1.0,), wide=9.5)
    labels = list(dict.fromkeys(entry["name"] for result in results for entry in result["entries"]))
    others = [label for label in labels if label not in (OURS, PLAIN)]
    colours = {OURS: BLUE, PLAIN: GREY, **dict(zip(others, PEERS * len(others), strict=False))}
    axes.axvline(limit["per_second"] / scale, color=OCHRE, linewidth=1.2, linestyle=DASHES, zorder=0)
    if single:
        _draw_bars(axes, results[0], limit, scale, colours)
    else:
        _draw_marks(axes, results, limit["per_second"], scale, colours)
    what = "minimum bytes" if unit == "GB/s" else "operations"
    axes.set_xlabel(f"{unit}: {what} over median time", color=FAINT, fontsize=9)
    _legend(figure, results, [] if single else labels, colours, rate_text(limit["kind"], limit["per_second"]))
    machine = record["gpu"]["name"] if record["gpu"] else f"{record['machine']['cpu']} (no GPU: the reference)"
    case = f"{_case(results[0])}; " if single else ""
    _title(figure, f"{record['operation']}: {record['summary']}", f"{case}{machine}, {record['date'][:10]}")
    _save(figure, path)


def _draw_marks(
    axes: Any, results: Sequence[Mapping[str, Any]], limit: float, scale: float, colours: Mapping[str, str]
) -> None:
    for row, result in enumerate(results):
        rates = [entry["per_second"] / scale for entry in result["entries"]]
        axes.plot([min(rates), max(rates)], [row, row], color=GRID, linewidth=3, solid_capstyle="round", zorder=1)
        for entry, rate in zip(reversed(result["entries"]), reversed(rates), strict=True):
            _draw_dot(axes, rate, row, colours[entry["name"]], entry["name"] == OURS, entry["same_work"])
    _rows(axes, [_case(result) for result in results])
    every = [limit / scale, *(entry["per_second"] / scale for result in results for entry in result["entries"])]
    if max(every) > 20 * min(every):
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xlim(min(every) / 1.5, max(every) * 1.5)
    else:
        axes.set_xlim(0, max(every) * 1.06)


def _draw_bars(
    axes: Any, result: Mapping[str, Any], limit: Mapping[str, Any], scale: float, colours: Mapping[str, str]
) -> None:
    """Draw a bar for each implementation; only a hollow frame for one that does less work."""
    entries = result["entries"]
    top = max(limit["per_second"], *(entry["per_second"] for entry in entries)) / scale
    for row, entry in enumerate(entries):
        rate, colour = entry["per_second"] / scale, colours[entry["name"]]
        face = colour if entry["same_work"] else "white"
        axes.barh(row, rate, height=0.55, color=face, edgecolor=colour, linewidth=1.4, zorder=2)
        share = entry["per_second"] / limit["per_second"]
        text = f"{rate_text(limit['kind'], entry['per_second'])}, {share:.1%} of the limit"
        inside = rate > top / 2
        axes.text(
            rate + (-0.01 if inside else 0.01) * top,
            row,
            text,
            ha="right" if inside else "left",
            va="center",
            fontsize=8.5,
            color="white" if inside and face == BLUE else INK,
            zorder=3,
        )
    _rows(axes, [entry["name"] + ("" if entry["same_work"] else ": less work") for entry in entries])
    axes.set_xlim(0, top * 1.06)


def _case(result: Mapping[str, Any]) -> str:
    return f"{result['shape']}   {result['format']}"


def _draw_errors(axes: Any, rows: Sequence[DemoRow], names: Sequence[str]) -> None:
    axes.set_xscale("log")
    for number, row in enumerate(rows):
        if row.error is None or row.bound is None:
            continue
        axes.plot(row.bound, number, marker="|", markersize=13, markeredgewidth=2, color=OCHRE, zorder=2)
        if row.error == 0:  # it has no place on a logarithmic axis
            place = {"xytext": (8, 0), "textcoords": "offset points", "ha": "left", "va": "center"}
            axes.annotate("exact", (row.bound, number), color=GREEN, fontsize=8.5, fontweight="bold", **place)
            continue
        error = row.error if math.isfinite(row.error) else row.bound * 1e3
        axes.plot([error, row.bound], [number, number], color=GRID, linewidth=3, zorder=1)
        axes.plot(error, number, marker="o", markersize=7, color=GREEN if row.ok else RED, zorder=3)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 2, high * 4)
    _rows(axes, names)
    _heading(axes, "relative error", [_mark("o", GREEN, "found"), _mark("|", OCHRE, "what rounding allows")])


def _draw_times(axes: Any, rows: Sequence[DemoRow]) -> None:
    pairs = [(row.seconds or 0.0, row.plain_seconds or 0.0) for row in rows]
    longest = max((max(pair) for pair in pairs), default=0.0) or 1.0
    for number, pair in enumerate(pairs):
        for seconds, colour, offset in zip(pair, (BLUE, GREY), (-0.19, 0.19), strict=True):
            if not seconds:
                continue
            axes.barh(number + offset, seconds * 1e3, height=0.34, color=colour, zorder=2)
            place = (seconds * 1e3 + longest * 12, number + offset)
            axes.text(*place, time_text(seconds), va="center", fontsize=7.5, color=FAINT)
    axes.set_xlim(0, longest * 1.25e3)
    _rows(axes, None, len(rows))
    ours = "fe: the reference" if all(row.backend == CPU_REFERENCE for row in rows) else "fe"
    _heading(axes, "median time (ms)", [_mark("s", BLUE, ours), _mark("s", GREY, "plain expression")])


def _heading(axes: Any, title: str, handles: Sequence[Any]) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left", pad=10)
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=FAINT,
    )


def _figure(rows: int, ratios: Sequence[float], wide: float = 12.0) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, 1.9 + 0.46 * max(rows, 2)), dpi=DPI, layout="constrained", facecolor="white")
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=MARGIN, h_pad=MARGIN / 3)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
    return figure, axes


def _rows(axes: Any, names: Sequence[str] | None, count: int = 0) -> None:
    """Make one labelled row per case, the first on top."""
    count = len(names) if names is not None else count
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks(range(count), names if names is not None else [""] * count, fontsize=8.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=FAINT, labelsize=8)
    axes.minorticks_off()
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _draw_dot(axes: Any, x: float, y: int, colour: str, ours: bool, same_work: bool) -> None:
    axes.plot(
        x,
        y,
        marker="D" if ours else "o",
        markersize=8 if ours else 6.5,
        color=colour,
        markerfacecolor=colour if same_work else "white",
        markeredgewidth=1.4,
        linestyle="none",
        zorder=4 if ours else 3,
    )


def _legend(
    figure: Any, results: Sequence[Mapping[str, Any]], labels: Sequence[str], colours: Mapping[str, str], limit: str
) -> None:
    from matplotlib.lines import Line2D

    same = {e["name"]: e["same_work"] for result in results for e in result["entries"]}
    handles = [
        _mark(
            "D" if label == OURS else "o", colours[label], label if same[label] else f"{label}: less work", same[label]
        )
        for label in labels
    ]
    handles.append(Line2D([], [], color=OCHRE, linestyle=DASHES, label=f"measured limit, {limit}"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=FAINT)


def _mark(marker: str, colour: str, label: str, filled: bool = True) -> Any:
    from matplotlib.lines import Line2D

    face = colour if filled else "white"
    size = 11 if marker == "|" else 7
    return Line2D(
        [],
        [],
        marker=marker,
        markersize=size,
        markeredgewidth=1.5,
        color=colour,
        markerfacecolor=face,
        linestyle="none",
        label=label,
    )


def _title(figure: Any, title: str, subtitle: str) -> None:
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    figure.text(0.01, 0.985, f"\n\n{subtitle}", ha="left", va="top", fontsize=8.5, color=FAINT)


def _name(row: DemoRow, place: str) -> str:
    text = f"{row.operation}  {row.shape}  {row.format}"
    return f"{text}  ({place})" if place else text


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
