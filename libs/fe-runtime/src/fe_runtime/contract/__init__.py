"""What an operation accepts and returns, declared once and checked everywhere."""

from .bind import Bound, Sample, bind
from .declare import Contract, Input, Option, Output, OutputSpec, Rule
from .options import check_option_kinds, check_option_values
from .outputs import check_outputs
from .shapes import ANY_LAYOUT, CONTIGUOUS, UNIT_INNER, Layout, ShapePattern, compact, merged_strides, pitched

__all__ = [
    "ANY_LAYOUT",
    "CONTIGUOUS",
    "UNIT_INNER",
    "Bound",
    "Contract",
    "Input",
    "Layout",
    "Option",
    "Output",
    "OutputSpec",
    "Rule",
    "Sample",
    "ShapePattern",
    "bind",
    "check_option_kinds",
    "check_option_values",
    "check_outputs",
    "compact",
    "merged_strides",
    "pitched",
]
