"""What is compiled: an operation's kernel builder, its static configuration and the architecture."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

__all__ = ["KernelSpec", "Value", "arch_for"]

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """One kernel to compile: everything that changes its code, and nothing else.

    Two specs are equal when they compile to the same code; ``1``, ``1.0`` and ``True`` are different values here.

    Parameters
    ----------
    operation
        Name of the operation, ``"fe_norm.rmsnorm_silu"``. The memory cache is bounded per operation.
    builder
        ``"module:function"``. The function is called as ``build(arch, **config)`` and returns
        ``(launcher, fake_arguments)``. The module is imported only when the kernel has to be compiled.
    config
        Static configuration, pairs sorted by name; see :meth:`of`.
    arch
        Target architecture, ``"sm_90a"``.

    Raises
    ------
    TypeError
        A value of the configuration that is not exactly ``str``, ``int``, ``float``, ``bool`` or ``None``.
    ValueError
        A malformed name, or pairs that are not sorted.
    """

    operation: str
    builder: str
    config: tuple[tuple[str, Value], ...]
    arch: str
    identity: str = field(init=False, repr=False)
    """The spec as JSON in one canonical form; equality and hash are those of this text."""

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "identity", _canonical(self))

    @classmethod
    def of(cls, operation: str, builder: str, arch: str, **config: Value) -> KernelSpec:
        """Make a spec from keyword arguments."""
        return cls(operation, builder, tuple(sorted(config.items())), arch)

    @classmethod
    def from_identity(cls, text: str) -> KernelSpec:
        """Make the spec whose :attr:`identity` is ``text``."""
        fields = json.loads(text)
        return cls.of(fields["operation"], fields["builder"], fields["arch"], **fields["config"])

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.identity == other.identity


def arch_for(capability: tuple[int, int]) -> str:
    """Return the architecture to compile for on a GPU of this compute capability.

    From Hopper on it is the architecture-specific one, because tensor-core and bulk-copy instructions need it.

    Examples
    --------
    >>> arch_for((8, 9)), arch_for((9, 0))
    ('sm_89', 'sm_90a')
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


_OPERATION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BUILDER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ARCH = re.compile(r"sm_\d+[a-z]?")


def _check(spec: KernelSpec) -> None:
    for name, pattern in (("operation", _OPERATION), ("builder", _BUILDER), ("arch", _ARCH)):
        value = getattr(spec, name)
        if not pattern.fullmatch(value):
            raise ValueError(f"KernelSpec: {name} must match {pattern.pattern}; got {value!r}.")
    names = [name for name, _ in spec.config]
    if names != sorted(set(names)):
        raise ValueError(f"KernelSpec: config must be sorted by name without repeats; got {names}. Use KernelSpec.of.")
    for name, value in spec.config:
        if type(value) not in (str, int, float, bool, type(None)):
            raise TypeError(
                f"KernelSpec: config value {name} must be a str, int, float, bool or None; "
                f"got {type(value).__name__} {value!r}."
            )


def _canonical(spec: KernelSpec) -> str:
    fields = {"operation": spec.operation, "builder": spec.builder, "config": dict(spec.config), "arch": spec.arch}
    return json.dumps(fields, sort_keys=True)
