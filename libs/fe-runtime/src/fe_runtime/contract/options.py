"""Check and normalise the arguments of a call that are no arrays."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from fe_runtime.arrays import is_tracer
from fe_runtime.dtypes import DTYPES, canonical_dtype
from fe_runtime.errors import explain

from .declare import Contract, Option

__all__ = ["any_of", "check_option_kinds", "check_option_values", "short"]

_MEANT = {
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "fp64": ("float64",),
    "fp8": ("float8_e4m3fn", "float8_e5m2"),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "float8_e4m3": ("float8_e4m3fn",),
    "fp4": ("nvfp4", "float4_e2m1fn_x2", "float4_e2m1fn"),
    "float4": ("nvfp4", "float4_e2m1fn_x2", "float4_e2m1fn"),
}
"""Names that are no dtype, and the names that may be meant: the first that the option accepts."""


def check_option_kinds(contract: Contract, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options in declared order, defaults filled in, numbers as Python numbers.

    Raises
    ------
    TypeError
        An unknown name, or a value of the wrong Python kind. A dtype may come in many kinds:
        :func:`check_option_values` looks at it.
    """
    unknown = next((name for name in options if name not in contract.option_names), None)
    if unknown is not None:
        rule = f"be one of the options {', '.join(contract.option_names) or '(there are none)'}"
        raise TypeError(explain(contract.operation, unknown, rule, short(options[unknown]), "Leave it out."))
    return {
        option.name: _of_kind(contract, option, options.get(option.name, option.default)) for option in contract.options
    }


def check_option_values(contract: Contract, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of :func:`check_option_kinds` with dtypes by canonical name, every value allowed.

    Raises
    ------
    InvalidArgumentError
        A value that its option forbids.
    """
    return {option.name: _allowed(contract.operation, option, options[option.name]) for option in contract.options}


def any_of(names: Sequence[object]) -> str:
    """Return ``"a, b or c"``."""
    texts = [str(name) for name in names]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def short(value: object, limit: int = 60) -> str:
    """Return the value's repr, cut to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _of_kind(contract: Contract, option: Option, value: object) -> object:
    if option.kind == "dtype" or (value is None and option.default is None):
        return value
    if option.kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer beyond all floats
            return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]
    if option.kind is int and _is_integer(value):
        return int(value)  # type: ignore[call-overload]
    if option.kind in (bool, str) and isinstance(option.kind, type) and isinstance(value, option.kind):
        return value
    kind = option.kind.__name__ if isinstance(option.kind, type) else option.kind
    given, fix = f"{type(value).__name__} {short(value)}", _fix(option, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        given, fix = _array_fix(contract, option, value)
    raise TypeError(explain(contract.operation, option.name, f"be a Python {kind}", given, fix))


def _array_fix(contract: Contract, option: Option, array: Any) -> tuple[str, str]:
    """Return what was given and the fix where an array was passed for an option: most likely one of its neighbours."""
    shape = tuple(array.shape)
    given = f"{type(array).__name__} of shape {shape}"
    if is_tracer(array):
        return given, f'Make it static: jax.jit(..., static_argnames="{option.name}").'
    if not shape:
        return given, f"Pass {option.name}.item()."
    names = [declared.name for declared in contract.inputs if declared.optional]
    if not names:
        return given, _fix(option, array)
    return given, f"If it is meant for another argument, name that: {any_of([f'{name}=' for name in names])}."


def _is_integer(value: object) -> bool:
    # Symbolic integers of a tracer have __index__ but are no Integral; arrays have it too, and reading one would wait
    # for the GPU.
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral) or (hasattr(value, "__index__") and not hasattr(value, "dtype"))


def _allowed(operation: str, option: Option, value: object) -> object:
    if value is None and option.default is None:
        return None
    normal = _dtype(operation, option, value) if option.kind == "dtype" else value
    normal = option.aliases.get(normal, normal)
    allowed = normal in option.choices if option.choices else True
    if allowed and (option.holds is None or option.holds(normal)):
        return normal
    raise option.error(explain(operation, option.name, _rule(option), short(value), _fix(option, value)))


def _dtype(operation: str, option: Option, value: object) -> object:
    if isinstance(value, str) and value in _names(option):
        return value
    try:
        return canonical_dtype(value)
    except ValueError as error:
        text = explain(operation, option.name, _rule(option), short(value), _fix(option, value))
        raise option.error(text) from error


def _names(option: Option) -> tuple[object, ...]:
    return (*option.choices, *option.aliases)


def _rule(option: Option) -> str:
    return option.rule or ("be " + any_of(_names(option)) if option.choices else "be a dtype")


def _fix(option: Option, value: object) -> str:
    if option.kind == "dtype" and isinstance(value, str):
        accepted = _names(option) or DTYPES
        meant = next((name for name in _MEANT.get(value.lower(), ()) if name in accepted), None)
        if meant is not None:
            return f"Did you mean {meant!r}?"
    if option.default is not None and option.holds is not None and not option.holds(option.default):
        return f"Pass another value than the default {option.default!r}, which is refused too."
    if option.default is not None:
        return f"Leave it out for the default {option.default!r}."
    meaning = option.doc.partition("None: ")[2] or option.doc
    return "Leave it out for the default None" + (f" ({meaning})." if meaning else ".")
