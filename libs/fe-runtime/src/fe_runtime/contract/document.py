"""A contract as Markdown, for the documentation and the READMEs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .declare import Contract, Input, Option
from .options import any_of

__all__ = ["support_table"]


def support_table(contract: Contract) -> str:
    """Return the tables of a contract: arrays, options, results, and the rules between them.

    Everything stands in the declaration, so the text cannot differ from what is checked.
    """
    inputs = _table(("array", "shape", "dtype", "layout", "meaning"), map(_input_row, contract.inputs))
    options = _table(("option", "kind", "default", "values", "meaning"), map(_option_row, contract.options))
    outputs = _table(("result", "meaning"), ((_code(output.name), output.doc) for output in contract.outputs))
    rules = "\n".join(f"* {_code(rule.argument)} must {_cell(rule.rule)}." for rule in contract.rules)
    dynamic = [_code(letter) for letter in contract.dynamic]
    derived = ", ".join(_code(letter) for letter in contract.derived)
    follow = f"These follow from the other extents and the options: {derived}." if derived else ""
    free = f"A compiled object accepts any {any_of(dynamic)}; everything else is fixed." if dynamic else ""
    return "\n\n".join(part for part in (inputs, options, outputs, rules, follow, free) if part) + "\n"


def _input_row(declared: Input) -> Sequence[str]:
    shapes = [_code(str(pattern)) for pattern in declared.patterns]
    dtypes = [*declared.dtypes, *declared.dtype_aliases]
    if declared.pairs is not None:
        dtypes = [f"{name} (packed pairs; also in uint8)" if name == "float4_e2m1fn" else name for name in dtypes]
    dtype = f"that of {_code(declared.dtype_of)}" if declared.dtype_of else ", ".join(dtypes)
    layout = declared.layout.rule.partition(" ")[2]
    name = _code(declared.name) + (" (optional)" if declared.optional else "")
    return name, any_of(shapes), dtype, layout, declared.doc


def _option_row(option: Option) -> Sequence[str]:
    kind = option.kind.__name__ if isinstance(option.kind, type) else option.kind
    values = ", ".join(map(str, (*option.choices, *option.aliases))) or option.rule.removeprefix("be ")
    return _code(option.name), kind, _code(repr(option.default)), values, option.doc


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`"
