"""What a library declares about one of its operations, so that the ``fe`` command can run, check and time it.

A library offers its workloads as ``fe_<library>.workloads:WORKLOADS``, a tuple, and names it as an entry point of the
group ``fe.operations``. Declaring a workload imports no framework.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fe_runtime.operation import Operation

__all__ = ["DTYPE_NAMES", "Arrays", "Case", "Expected", "Operands", "Peer", "Source", "Workload", "load_target"]

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Short names of dtypes, as the command line takes and shows them."""

Arrays = Mapping[str, Any]
"""Arrays by the contract's names."""

Operands = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and canonical dtype of each array that is passed, by the contract's names."""


@dataclass(frozen=True)
class Case:
    """One problem of an operation.

    Parameters
    ----------
    dims
        Extents by letter, in the workload's order.
    dtype
        Canonical dtype of the main input.
    options
        The options that differ from their defaults; values that JSON can hold.
    optional
        Names of the optional inputs that are passed.
    """

    dims: Mapping[str, int]
    dtype: str
    options: Mapping[str, object] = field(default_factory=dict)
    optional: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """The extents as text, ``"16384x8192"``."""
        return "x".join(str(extent) for extent in self.dims.values())

    @property
    def format(self) -> str:
        """Dtype, output dtype, other options and optional inputs as text, ``"bf16 -> fp8 + bias"``."""
        options = dict(self.options)
        text = _short(self.dtype)
        if "out_dtype" in options:
            text += f" -> {_short(options.pop('out_dtype'))}"
        text += "".join(f", {name}={value}" for name, value in options.items())
        return text + "".join(f" + {name.removesuffix('_tensor')}" for name in self.optional)


@dataclass(frozen=True)
class Expected:
    """What a formula in float64 gives: ``values``, and the largest error ``allowed`` to each of them."""

    values: Any
    allowed: Any


@dataclass(frozen=True)
class Peer:
    """Another implementation to time beside ours, run on torch tensors.

    Parameters
    ----------
    name
        Its library.
    does
        What the timed call computes, in a few words.
    make
        Returns the call for a case. Whatever it raises, an ``ImportError`` say, is reported as the reason why the
        peer is not available.
    same_work
        False if the call computes less than the operation; it is then shown but never called slower or faster.
    """

    name: str
    does: str
    make: Callable[[Case], Callable[[Arrays], Any]]
    same_work: bool = True

    @property
    def label(self) -> str:
        """Name and work."""
        return f"{self.name} ({self.does})"


class Source(Protocol):
    """Makes the arrays of a case where they are needed: see :mod:`fe_runtime.bench.places`."""

    def activations(self, shape: Sequence[int], dtype: str) -> Any:
        """Return values as a trained network has them: channels of very different scale, a few of them huge."""

    def weights(self, shape: Sequence[int], dtype: str) -> Any:
        """Return gains around 1."""

    def normal(self, shape: Sequence[int], dtype: str, scale: float = 1.0) -> Any:
        """Return normal values."""

    def array(self, values: Any) -> Any:
        """Return a copy of a numpy array."""


@dataclass(frozen=True)
class Workload:
    """One operation, as the ``fe`` command sees it.

    Parameters
    ----------
    operation
        ``"module:NAME"`` of its :class:`~fe_runtime.operation.Operation`.
    wrapper
        ``"module:function"`` of its wrapper, called with the contract's names.
    title
        The operation's name for the command line; by default that of the module that it lies in.
    adapt
        ``adapt(wrapper)`` makes a wrapper of another signature one that takes the contract's names and returns its
        results by name.
    summary
        The formula, in one line.
    dims
        Letters of the extents, in the order in which ``--shape`` gives them.
    operands
        Shapes and dtypes of a case.
    strides
        Strides of a case's arrays that are not contiguous, by name; ``None``: all are.
    inputs
        Arrays of a case, made by a source.
    expected
        The formula in float64, written independently of the operation: ``expected(case, numpy inputs)``.
    decode
        The operation's outputs (numpy, by name) as values that compare with ``expected``.
    plain
        The plain expression that a user would write, by framework name: ``plain[framework](case, inputs)``.
    make_class
        ``make_class(inputs, outputs, options)`` returns the object of the class form; ``None`` for an operation whose
        library offers no class.
    demo, bench
        Cases of ``fe demo`` (about 50 ms each on one slow core) and of ``fe bench``.
    host
        A case so small that a GPU finishes it sooner than the host launches it; host times are measured on it.
    presets
        Cases of ``fe compile --preset``, by name; ``"default"`` must be one.
    peers
        What ``fe bench --peers`` times beside it.
    flops
        Floating-point operations of a case, for operations that matrix units bound; ``None`` if memory bounds it.
    is_public
        Whether users call the wrapper: false for a gradient, which has no page in the documentation.
    """

    operation: str
    wrapper: str
    summary: str
    dims: tuple[str, ...]
    operands: Callable[[Case], Operands]
    inputs: Callable[[Case, Source], Arrays]
    expected: Callable[[Case, Arrays], Expected]
    decode: Callable[[Case, Arrays], Any]
    plain: Mapping[str, Callable[[Case, Arrays], Any]]
    demo: tuple[Case, ...]
    bench: tuple[Case, ...]
    host: Case
    presets: Mapping[str, tuple[Case, ...]]
    make_class: Callable[[Arrays, Arrays, Mapping[str, object]], Any] | None = None
    peers: tuple[Peer, ...] = ()
    flops: Callable[[Case], int] | None = None
    strides: Callable[[Case], Mapping[str, tuple[int, ...]]] | None = None
    title: str = ""
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    is_public: bool = True

    @property
    def name(self) -> str:
        """The operation's name, ``"rmsnorm_silu"``."""
        return self.title or self.operation.partition(":")[0].rpartition(".")[2]

    @property
    def library(self) -> str:
        """Import name of the library."""
        return self.operation.partition(".")[0]

    def load_operation(self) -> Operation:
        """Import the operation."""
        return load_target(self.operation)  # type: ignore[no-any-return]

    def load_wrapper(self) -> Callable[..., Any]:
        """Import the wrapper, adapted to the contract's names."""
        wrapper: Callable[..., Any] = load_target(self.wrapper)
        return wrapper if self.adapt is None else functools.wraps(wrapper)(self.adapt(wrapper))


def load_target(target: str) -> Any:
    """Import ``"module:attribute"``."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _short(dtype: object) -> str:
    return next((short for short, name in DTYPE_NAMES.items() if name == dtype), str(dtype))
