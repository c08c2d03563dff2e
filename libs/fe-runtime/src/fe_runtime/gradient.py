"""How an operation is differentiated, declared once for torch autograd and JAX ``custom_vjp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .dtypes import canonical_dtype
from .errors import InvalidArgumentError, explain

if TYPE_CHECKING:
    from .contract import Contract
    from .operation import Operation

__all__ = ["Gradient", "reject_required"]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The backward operation of a forward operation.

    Parameters
    ----------
    operation
        The backward. Its inputs are, in order, one gradient for each differentiable output of the forward, then the
        residuals. Its outputs are the gradients of ``wrt``, in order; an absent input's gradient is ``None``.
    residuals
        Names of the forward's inputs and outputs that the backward reads. Of a tuple of names, the first that the
        call has.
    wrt
        Names of the forward's inputs that have gradients; every other input gets none. The inputs in a tuple, those
        that the operation adds for example, share one gradient.
    outputs
        Names of the forward's outputs that are differentiable.
    options
        Names of the forward's options that the backward takes too.
    applies
        ``applies(dtypes)`` says whether a call has a gradient, by the dtypes of its present inputs by name. Any other
        call runs on detached data in torch, and has no derivative in JAX.
    """

    operation: Operation
    residuals: tuple[str | tuple[str, ...], ...]
    wrt: tuple[str | tuple[str, ...], ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, str]], bool] | None = None

    def serves(self, names: Sequence[str], dtypes: Sequence[object]) -> bool:
        """Whether a call whose inputs ``names`` have these dtypes (``None``: absent) has a gradient."""
        if self.applies is None:
            return True
        given = zip(names, dtypes, strict=True)
        return self.applies({name: canonical_dtype(dtype) for name, dtype in given if dtype is not None})

    def saved(self, known: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what the backward reads of a call's inputs and outputs, which ``known`` holds by name."""
        found = [[known.get(name) for name in _names(entry)] for entry in self.residuals]
        return tuple(next((array for array in arrays if array is not None), None) for arrays in found)

    def by_input(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """Return the backward's results by the input that each belongs to."""
        entries = zip(self.wrt, gradients, strict=True)
        return {name: gradient for entry, gradient in entries for name in _names(entry)}

    def check(self, forward: Contract) -> None:
        """Raise ``ValueError`` if the declaration does not fit the forward's contract or the backward's."""
        backward = self.operation.contract
        arrays = {*forward.input_names, *forward.output_names}
        unknown = [
            *({name for entry in self.residuals for name in _names(entry)} - arrays),
            *({name for entry in self.wrt for name in _names(entry)} - set(forward.input_names)),
            *(set(self.outputs) - set(forward.output_names)),
            *(set(self.options) - (set(forward.option_names) & set(backward.option_names))),
        ]
        if forward.mutated:
            raise ValueError(f"{forward.operation}: writes into its inputs, so it can have no gradient")
        if unknown:
            raise ValueError(f"{forward.operation}: its gradient names {', '.join(sorted(unknown))}, which it has not")
        if len(backward.inputs) != len(self.outputs) + len(self.residuals):
            raise ValueError(f"{backward.operation}: must take the gradients of {self.outputs}, then {self.residuals}")
        if len(backward.outputs) != len(self.wrt):
            raise ValueError(f"{backward.operation}: must return the gradients of {self.wrt}")


def reject_required(operation: str, **arrays: object) -> None:
    """Raise for an operand that requires a gradient, whether or not gradients are being recorded.

    Raises
    ------
    InvalidArgumentError
        An array has ``requires_grad`` set.
    """
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False):
            rule, fix = "not require a gradient: the operation has none", "Pass a detached tensor."
            raise InvalidArgumentError(explain(operation, name, rule, "requires_grad=True", fix))


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry
