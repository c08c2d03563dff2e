"""What is static while a convolution is compiled: its configuration, the names of its operands, their stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Float64, Int32, cute

from fe_conv.tiles import Launch, Problem
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.types import numeric

__all__ = ["Setup", "fake_arguments", "floating", "named", "tokens_first"]


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: Problem
    launch: Launch

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Type of x."""
        return floating(self.problem.x_dtype)

    @property
    def wide(self) -> type[cutlass.Numeric]:
        """Type of all arithmetic."""
        return Float64 if self.problem.x_dtype == "float64" else Float32

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        problem = self.problem
        present = {
            "bias": problem.has_bias,
            "dbias": problem.has_bias,
            "labels": problem.has_labels,
            "offsets": problem.offsets is not None,
            "initial": problem.has_initial,
            "dinitial": problem.has_initial,
            "final": problem.has_final,
            "dfinal": problem.has_final,
            "dz": problem.backward and self.launch.kernel == "any",
        }
        inputs = ("x", "weight", "bias", "labels", "offsets", "initial")
        if problem.backward:
            names = ("dy", "dfinal", *inputs, "dx", "dweight", "dbias", "dinitial", "partials", "dz", "stream")
        else:
            names = (*inputs, "y", "final", "stream")
        return tuple(name for name in names if present.get(name, True))


def floating(name: str) -> type[cutlass.Numeric]:
    """Return the kernel type of a float dtype, float64 included."""
    return Float64 if name == "float64" else numeric(name)


def named(setup: Setup, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return a launcher's arguments by name, those in x's layout as (B, T, D), ``None`` for absent ones."""
    operands: dict[str, Any] = dict.fromkeys(("dy", "bias", "labels", "offsets", "initial", "dfinal", "dbias"))
    operands |= dict(zip(setup.operands, arguments, strict=True))
    if not setup.problem.channel_last:
        for name in ("x", "dy", "y", "dx", "dz"):
            if operands.get(name) is not None:
                operands[name] = tokens_first(operands[name])
    return operands


def tokens_first(x: cute.Tensor) -> cute.Tensor:
    """View (B, D, T) as (B, T, D)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))


def fake_arguments(setup: Setup) -> tuple[Any, ...]:
    """Return stand-ins for the arguments: only dtypes, the width and what divides the rows' starts are fixed."""
    problem = setup.problem
    extents = _Extents(setup)
    x, weight, wide = setup.dtype, floating(problem.weight_dtype), setup.wide
    load, store, parameters = problem.load_alignment, problem.store_alignment, problem.parameter_alignment
    batch, tokens, channels, states = extents.batch, extents.tokens, extents.channels, extents.states
    history = problem.width - 1
    made = {
        "x": lambda: extents.tokens_of(x, load),
        "dy": lambda: extents.tokens_of(x, load),
        "y": lambda: extents.tokens_of(x, store),
        "dx": lambda: extents.tokens_of(x, store),
        "dz": lambda: extents.tokens_of(wide, wide.width // 8),
        "weight": lambda: _array(weight, (channels, problem.width), (problem.width, 1), parameters),
        "dweight": lambda: _array(weight, (channels, problem.width), (problem.width, 1)),
        "bias": lambda: _array(x, (channels,), (1,), parameters),
        "dbias": lambda: _array(x, (channels,), (1,)),
        "labels": lambda: _array(Int32, (batch, tokens), (cute.sym_int64(), 1)),
        "offsets": lambda: _array(numeric(problem.offsets or "int32"), (cute.sym_int64(),), (1,)),
        "initial": lambda: _array(x, (states, channels, history)),
        "final": lambda: _array(x, (states, history, channels)),
        "dfinal": lambda: _array(x, (states, history, channels)),
        "dinitial": lambda: _array(x, (states, channels, history)),
        "partials": lambda: _array(wide, (cute.sym_int64(), cute.sym_int64()), (cute.sym_int64(), 1)),
        "stream": fake_stream,
    }
    return tuple(made[name]() for name in setup.operands)


class _Extents:
    """Symbols for the sizes that operands share."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        vector = setup.launch.vector if setup.launch.kernel == "rows" else 1
        self.batch, self.tokens, self.channels = cute.sym_int64(), cute.sym_int64(), cute.sym_int64(divisibility=vector)
        self.states = self.batch if setup.problem.offsets is None else cute.sym_int64()

    def tokens_of(self, dtype: type[cutlass.Numeric], alignment: int) -> cute.Tensor:
        """Return an array in x's layout whose rows all start at ``alignment`` bytes."""
        steps = [cute.sym_int64(divisibility=max(1, 8 * alignment // dtype.width)) for _ in range(2)]
        inner = (self.tokens, self.channels) if self.setup.problem.channel_last else (self.channels, self.tokens)
        return cute.runtime.make_fake_tensor(dtype, (self.batch, *inner), (*steps, 1), assumed_align=alignment)


def _array(
    dtype: type[cutlass.Numeric], shape: tuple[Any, ...], stride: tuple[Any, ...] | None = None, alignment: int = 0
) -> cute.Tensor:
    """Return an array, by default of any strides and aligned as its items are."""
    stride = stride or tuple(cute.sym_int64() for _ in shape)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=max(alignment, dtype.width // 8))
