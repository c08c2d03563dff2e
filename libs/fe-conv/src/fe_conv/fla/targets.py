"""What can be replaced, in the order in which it is: where it lives, by what, and what must hold before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from . import gates

__all__ = ["TARGETS", "Target", "select"]


@dataclass(frozen=True, slots=True)
class Target:
    """One function or method of the flash-linear-attention package.

    Parameters
    ----------
    name, alias
        What the user calls it.
    module, attribute
        Where it is. With ``owner``, the name of a class in the module, it is a method of that class.
    names
        The names under which modules hold the function.
    is_default
        Whether it is replaced unless a selection is given.
    gate
        ``gate(module)`` raises ``ImportError`` with the reason if the installed package is not the one that the
        replacement was made for; ``None``: anything that has the attribute will do.
    shim
        ``"module:function"``: makes the replacement from the original and the class or module that holds it.
    """

    name: str
    alias: str
    module: str
    attribute: str
    names: tuple[str, ...]
    shim: str
    is_default: bool = False
    owner: str | None = None
    gate: Callable[[Any], None] | None = None

    def find(self) -> Any:
        """Import the module and return the module or class that holds the attribute.

        Raises
        ------
        ImportError
            It cannot be imported, whatever the reason, has no such attribute, or fails its gate.
        """
        try:
            module = import_module(self.module)
            holder = module if self.owner is None else getattr(module, self.owner, None)
            getattr(holder, self.attribute, None)  # a lazy module may bind it now
        except Exception as error:  # the package may fail in any way on a machine that it does not support
            raise ImportError(f"{self.module} cannot be imported: {type(error).__name__}: {error}") from error
        if holder is None or not callable(vars(holder).get(self.attribute)):
            place = self.module if self.owner is None else f"{self.module}.{self.owner}"
            raise ImportError(f"{place} has no {self.attribute}")
        if self.gate is not None:
            self.gate(module)
        return holder

    def replacement(self, original: Callable[..., Any], holder: Any) -> Callable[..., Any]:
        """Return the function that takes the place of ``original``."""
        module, _, name = self.shim.partition(":")
        made: Callable[..., Any] = getattr(import_module(module), name)(original, holder)
        return made


_HERE = __package__

TARGETS = (
    Target(
        "gated_delta_rule",
        "gdn",
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        ("chunk_gated_delta_rule", "chunk_gdn"),
        f"{_HERE}.delta_rule:gated_delta_rule",
        is_default=True,
    ),
    Target("kda", "kda", "fla.ops.kda", "chunk_kda", ("chunk_kda",), f"{_HERE}.delta_rule:kda", is_default=True),
    Target(
        "gated_mlp",
        "mlp",
        "fla.modules.mlp",
        "forward",
        (),
        f"{_HERE}.gated_mlp:gated_mlp",
        owner="GatedMLP",
        gate=gates.gated_mlp,
    ),
    Target(
        "short_conv",
        "shortconv",
        "fla.modules.conv.triton.ops",
        "causal_conv1d_update",
        ("causal_conv1d_update",),
        f"{_HERE}.short_conv:short_conv",
        gate=gates.short_conv,
    ),
)


def select(targets: object, default: tuple[Target, ...]) -> tuple[Target, ...]:
    """Return the targets that a user's ``targets`` names, in the order of :data:`TARGETS`.

    ``None`` stands for ``default``; otherwise a name or an iterable of names, aliases included.

    Raises
    ------
    TypeError
        Something else, or a name that is no string.
    ValueError
        An unknown name, or no name at all.
    """
    if targets is None:
        return default
    try:
        names = [targets] if isinstance(targets, str) else list(targets)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"fla: targets must be a string or an iterable of strings; got {targets!r}.") from None
    known = {name: target for target in TARGETS for name in (target.name, target.alias)}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"fla: targets must be a string or an iterable of strings; got {name!r} among them.")
        if name not in known:
            raise ValueError(f"fla: targets must be among {', '.join(known)}; got {name!r}.")
    if not names:
        raise ValueError(f"fla: targets must name at least one of {', '.join(known)}; got none.")
    wanted = {known[name] for name in names}
    return tuple(target for target in TARGETS if target in wanted)
