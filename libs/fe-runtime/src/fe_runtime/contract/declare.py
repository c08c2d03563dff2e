"""How an operation declares what it accepts: inputs, options, outputs and the rules between them.

One :class:`Contract` is the single source of an operation's checks, its error texts, its output allocation, the fake
function for ``torch.compile``, JAX's abstract evaluation, the random valid calls and the invalid calls of the tests,
and the table in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fe_runtime.errors import InvalidArgumentError

from .shapes import CONTIGUOUS, Layout, ShapePattern

if TYPE_CHECKING:
    from .bind import Bound

__all__ = ["KINDS", "Contract", "Input", "Option", "Output", "OutputSpec", "Rule"]

KINDS = ("rank", "shape", "layout", "dtype")
"""Kinds of violation for which a contract may name another exception class."""


@dataclass(frozen=True, slots=True)
class Input:
    """One array argument.

    ``shape`` is the canonical pattern; ``also`` lists other accepted forms of the same elements (a trailing unit
    dimension, say), which are viewed as the canonical one. The first form that agrees with the arguments before it
    counts, so a ``...`` that is still open takes all leading dimensions. ``dtype_of`` names an earlier input whose
    dtype this one must share. ``mutated``: the operation writes into it; it may overlap no other operand.
    """

    name: str
    shape: str
    dtypes: tuple[str, ...]
    layout: Layout = CONTIGUOUS
    also: tuple[str, ...] = ()
    optional: bool = False
    dtype_of: str | None = None
    mutated: bool = False
    doc: str = ""

    def __post_init__(self) -> None:
        for text in self.also:
            if _without_units(text) != _without_units(self.shape):
                raise ValueError(f"{self.name}: the form {text!r} must be {self.shape!r} but for entries 1")

    @property
    def patterns(self) -> tuple[ShapePattern, ...]:
        """The canonical pattern, then the other accepted ones."""
        return tuple(ShapePattern(text) for text in (self.shape, *self.also))


@dataclass(frozen=True, slots=True)
class Option:
    """One argument that is no array.

    ``kind`` is ``float``, ``int``, ``bool``, ``str`` or ``"dtype"``. ``runtime`` options reach the kernel as scalars
    and never cause a compilation. ``aliases`` maps other accepted values to those in ``choices``. ``holds`` is the
    rule on its value in code, ``rule`` the same in words; ``invalid`` lists values that break it, for the generated
    tests. ``None`` is accepted where it is the default and means "choose for me": ``resolve`` then chooses, from the
    inputs. ``error`` is the class for a value that is not allowed.
    """

    name: str
    kind: type | str
    default: object = None
    choices: tuple[object, ...] = ()
    aliases: Mapping[object, object] = field(default_factory=dict)
    holds: Callable[[object], bool] | None = None
    rule: str = ""
    invalid: tuple[object, ...] = ()
    runtime: bool = False
    resolve: Callable[[Bound], object] | None = None
    error: type[Exception] = InvalidArgumentError
    doc: str = ""

    def __post_init__(self) -> None:
        if self.holds is not None and not self.rule:
            raise ValueError(f"{self.name}: a rule in code needs the same rule in words")


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Shape and dtype of one output of one call."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Output:
    """One result: ``spec`` gives its shape and dtype for a call, or ``None`` when the call does not produce it."""

    name: str
    spec: Callable[[Bound], OutputSpec | None]
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that spans arguments. ``violation`` builds a call that breaks it, for the generated tests."""

    argument: str
    rule: str
    holds: Callable[[Bound], bool]
    given: Callable[[Bound], object]
    fix: str
    error: type[Exception] = InvalidArgumentError
    violation: Callable[[Mapping[str, object]], Mapping[str, object]] | None = None


@dataclass(frozen=True)
class Contract:
    """Everything an operation promises about its arguments and results.

    ``dynamic`` lists the dimension letters that may change between the executions of one compiled object. ``errors``
    names the exception class for each kind of violation of :data:`KINDS` that is not an ``InvalidArgumentError``.
    An operation without outputs has mutated inputs.
    """

    operation: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    options: tuple[Option, ...] = ()
    rules: tuple[Rule, ...] = ()
    dynamic: tuple[str, ...] = ("...",)
    errors: Mapping[str, type[Exception]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.errors) - set(KINDS)
        if unknown:
            raise ValueError(f"{self.operation}: errors names {sorted(unknown)}; the kinds are {KINDS}")

    def error(self, kind: str) -> type[Exception]:
        """Return the exception class for a kind of violation."""
        return self.errors.get(kind, InvalidArgumentError)

    @cached_property
    def mutated(self) -> tuple[int, ...]:
        """Numbers of the inputs that the operation writes into."""
        return tuple(number for number, argument in enumerate(self.inputs) if argument.mutated)

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """Names of the array arguments, in order."""
        return tuple(argument.name for argument in self.inputs)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Keys of the result, in order."""
        return tuple(output.name for output in self.outputs)

    @cached_property
    def static_options(self) -> tuple[Option, ...]:
        """Options that select code."""
        return tuple(option for option in self.options if not option.runtime)

    @cached_property
    def runtime_options(self) -> tuple[Option, ...]:
        """Options that reach the kernel as scalars."""
        return tuple(option for option in self.options if option.runtime)

    @cached_property
    def option_names(self) -> tuple[str, ...]:
        """Names of the options, in order."""
        return tuple(option.name for option in self.options)


def _without_units(shape: str) -> list[str]:
    return [token for token in shape.split() if token != "1"]
