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
from fe_runtime.strides import contiguous_stride, ordered_stride

from .shapes import CONTIGUOUS, UNITS, Layout, ShapePattern

if TYPE_CHECKING:
    from .bind import Bound

__all__ = ["KINDS", "Contract", "Input", "Option", "Output", "OutputSpec", "Rule"]

KINDS = ("missing", "rank", "shape", "layout", "dtype")
"""Kinds of violation for which a contract may name another exception class."""


@dataclass(frozen=True, slots=True)
class Input:
    """One array argument.

    ``shape`` is the canonical pattern; ``also`` lists other accepted forms of the same elements (a trailing unit
    dimension, say; ``1*`` stands for any number of them), which are viewed as the canonical one. The first form that
    agrees with the arguments before it counts, so a ``...`` that is still open takes all leading dimensions.
    ``dtype_of`` names an earlier input whose dtype this one must share. ``mutated``: the operation writes into it; it
    may overlap no other operand.

    What the bytes of an array mean may depend on how it comes:

    * ``view``: it may also come with the canonical dimensions in this order, as a view of the canonical array (in the
      layout of that one). The reference and kernels get the canonical one.
    * ``dtype_aliases``: dtypes that only stand for another one, ``{"uint8": "float8_e8m0fnu"}`` for scales as bytes.
    * ``pairs``: the dimension along which FP4 codes are packed, two in a byte. ``float4_e2m1fn`` in ``dtypes`` then
      means torch's ``float4_e2m1fn_x2`` or a ``uint8`` container; extents and strides are those of the codes.

    ``alignment``: bytes of which the address of an array on a GPU is a multiple, and in a layout with gaps also, on
    every device, the length and the distances of its runs.
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
    view: tuple[int, ...] = ()
    dtype_aliases: Mapping[str, str] = field(default_factory=dict)
    pairs: int | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        for text in self.also:
            if _without_units(text) != _without_units(self.shape):
                raise ValueError(f"{self.name}: the form {text!r} must be {self.shape!r} but for entries 1")
        if UNITS in self.shape.split():
            raise ValueError(f"{self.name}: only another form may have {UNITS!r}")
        if self.view and sorted(self.view) != list(range(len(self.shape.split()))):
            raise ValueError(f"{self.name}: view must be an order of the dimensions {self.shape!r}")
        if self.mutated and (self.view or self.pairs is not None):
            raise ValueError(f"{self.name}: an input that is written must come in its canonical form")

    @property
    def patterns(self) -> tuple[ShapePattern, ...]:
        """The canonical pattern, then the other accepted ones, last the view."""
        return tuple(ShapePattern(text) for text in (self.shape, *self.also, *self._view_pattern))

    @property
    def _view_pattern(self) -> tuple[str, ...]:
        tokens = self.shape.split()
        return (" ".join(tokens[dim] for dim in self.view),) if self.view else ()


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
    """What one output of one call is.

    ``shape`` and ``dtype`` are canonical: as the reference returns it and a kernel writes it. Packed FP4 pairs
    (``float4_e2m1fn_x2``) count bytes; they lie along ``pairs``.

    A reference may leave out ones that are there for the sake of the operands' form only.

    * ``order``: its dimensions in memory, outermost first; without it row-major.
    * ``view``: torch gets the canonical array with its dimensions in this order; a caller's own array may have either
      form.
    * ``accumulate``: ``"add"`` or ``"max"``: a kernel adds to what the output holds, or raises it. A fresh output
      starts at zero or minus infinity; the class form leaves what its caller put there. The reference returns the
      result of the call alone.
    * ``layout``: strides that a caller's own array may have; by default only those of ``order`` without gaps.
    * ``alignment``: as for :class:`Input`.
    * ``any_units``: a caller's own array may have any number of trailing ones.
    * ``byte_aliases``: dtypes by which a caller's own array may call the same bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()
    view: tuple[int, ...] = ()
    accumulate: str = ""
    layout: Layout | None = None
    alignment: int = 1
    any_units: bool = False
    byte_aliases: tuple[str, ...] = ()
    pairs: int = -1

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of a fresh canonical array."""
        return ordered_stride(self.shape, self.order) if self.order else contiguous_stride(self.shape)

    def place(self, framework: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides in which a framework gets a fresh output."""
        if framework != "torch" or not self.view:
            return self.shape, self.stride
        stride = self.stride
        return tuple(self.shape[dim] for dim in self.view), tuple(stride[dim] for dim in self.view)


@dataclass(frozen=True, slots=True)
class Output:
    """One result: ``spec`` gives its shape and dtype for a call, or ``None`` when the call does not produce it.

    ``onto``: its ``accumulate`` by the options alone, for a program that torch traces, where results are copied into
    the caller's arrays.
    """

    name: str
    spec: Callable[[Bound], OutputSpec | None]
    doc: str = ""
    onto: Callable[[Mapping[str, object]], str] | None = None


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
    names the exception class for each kind of violation of :data:`KINDS` that is not an ``InvalidArgumentError``; a
    missing array is a ``TypeError`` otherwise.
    ``derived`` computes the letters that follow from the other letters and the options, tiles for example; they are
    checked last, when everything that they follow from is known to be right. An operation without outputs has mutated
    inputs.
    """

    operation: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    options: tuple[Option, ...] = ()
    rules: tuple[Rule, ...] = ()
    dynamic: tuple[str, ...] = ("...",)
    errors: Mapping[str, type[Exception]] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Bound], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.errors) - set(KINDS)
        if unknown:
            raise ValueError(f"{self.operation}: errors names {sorted(unknown)}; the kinds are {KINDS}")

    def error(self, kind: str) -> type[Exception]:
        """Return the exception class for a kind of violation."""
        return self.errors.get(kind, TypeError if kind == "missing" else InvalidArgumentError)

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
    return [token for token in shape.split() if token not in ("1", UNITS)]
