"""``fe plot``: draw a benchmark record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .support import CommandError, require_drawing

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "draw the JSON of fe bench as a PNG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("record", type=Path, metavar="JSON", help="what fe bench --json wrote")
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: beside the record")


def run(options: argparse.Namespace) -> int:
    """Draw."""
    require_drawing()
    from fe_runtime.bench.pictures import draw_record
    from fe_runtime.bench.run import SCHEMA

    try:
        record = json.loads(options.record.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{options.record} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise CommandError(f"{options.record} is no record of fe bench (schema {SCHEMA})")
    picture = options.output or options.record.with_suffix(".png")
    draw_record(record, picture)
    print(picture)
    return 0
