"""How an operation is differentiated, declared once for torch autograd and JAX ``custom_vjp``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contract import Contract
    from .operation import Operation

__all__ = ["Gradient"]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The backward operation of a forward operation.

    Parameters
    ----------
    operation
        The backward. Its inputs are, in order, one gradient for each differentiable output of the forward, then the
        residuals. Its outputs are the gradients of ``wrt``, in order; an absent input's gradient is ``None``.
    residuals
        Names of the forward's inputs and outputs that the backward reads.
    wrt
        Names of the forward's inputs that have gradients; every other input gets none.
    outputs
        Names of the forward's outputs that are differentiable.
    options
        Names of the forward's options that the backward takes too.
    """

    operation: Operation
    residuals: tuple[str, ...]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()

    def check(self, forward: Contract) -> None:
        """Raise ``ValueError`` if the declaration does not fit the forward's contract or the backward's."""
        backward = self.operation.contract
        arrays = {*forward.input_names, *forward.output_names}
        unknown = [
            *(set(self.residuals) - arrays),
            *(set(self.wrt) - set(forward.input_names)),
            *(set(self.outputs) - set(forward.output_names)),
            *(set(self.options) - (set(forward.option_names) & set(backward.option_names))),
        ]
        if unknown:
            raise ValueError(f"{forward.operation}: its gradient names {', '.join(sorted(unknown))}, which it has not")
        if len(backward.inputs) != len(self.outputs) + len(self.residuals):
            raise ValueError(f"{backward.operation}: must take the gradients of {self.outputs}, then {self.residuals}")
        if len(backward.outputs) != len(self.wrt):
            raise ValueError(f"{backward.operation}: must return the gradients of {self.wrt}")
