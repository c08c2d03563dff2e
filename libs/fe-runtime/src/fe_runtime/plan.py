"""Which backend serves a call, and with which kernel: a pure function of metadata."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import env
from ._callers import user_stacklevel
from .arrays import Device, capability, sm_count
from .compile.spec import KernelSpec, arch_for
from .errors import FallbackWarning, InvalidArgumentError, NotSupportedError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from .contract import Bound

__all__ = [
    "BACKENDS",
    "HOPPER",
    "Form",
    "Kernel",
    "NoKernel",
    "Plan",
    "Target",
    "backend_of",
    "check_backend",
    "choose",
    "fall_back",
]

KERNEL_BACKENDS = ("sm80", "sm90", "sm100", "sm120")
KERNEL_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
BACKENDS = ("auto", "reference", *KERNEL_BACKENDS)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU that a plan is made for: its compute capability and its number of multiprocessors."""

    capability: tuple[int, int]
    sm_count: int

    @staticmethod
    def of(device: Device) -> Target:
        """Read the target off a device; without a driver, plan for :data:`HOPPER`, so that compiling needs no GPU."""
        try:
            return Target(capability(device), sm_count(device))
        except RuntimeError:
            return HOPPER

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for."""
        return arch_for(self.capability)


HOPPER = Target((9, 0), 132)
"""The target that plans are made for on a machine without a GPU: an H100 or H200."""


@dataclass(frozen=True, slots=True)
class Form:
    """How operands are presented to a kernel: shapes to view them as (``None``: absent), and the scalars after them.

    ``scratch``: shape and dtype of workspaces that are allocated for each call, uninitialised. ``related``: the
    compiled signature relates the extents of all operands as the contract does (one symbol for equal extents), so it
    rejects by itself every shape that the contract rejects.

    A kernel's arguments are the present inputs, the outputs that it accumulates into, the present outputs, the mutated
    inputs once more, the scratch, the scalars. It reads a mutated input, and what an accumulating output holds so far,
    from its first place and writes to its second one: the same memory in torch, in JAX the result that takes over the
    input's buffer. Packed FP4 pairs are bytes, also in these shapes.
    """

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    scalars: tuple[str, ...] = ()
    scratch: tuple[tuple[Shape, str], ...] = ()
    related: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that serves a call.

    ``copies`` names the inputs that have to be made contiguous first; a mutated input cannot be one of them.
    """

    spec: KernelSpec
    form: Form
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoKernel:
    """Why no kernel serves a call, and what the caller can do about it.

    ``supported`` lists the compute capabilities that would do, where the GPU is the reason.
    """

    reason: str
    fix: str = ""
    supported: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one call, made for ``target`` (``None``: the CPU, or the reference was asked for).

    ``kernel`` is ``None`` for the reference; ``missing`` then says why, but for arrays on the CPU and for a reference
    that was asked for.
    """

    operation: str
    backend: str
    kernel: Kernel | None = None
    missing: NoKernel | None = None
    target: Target | None = None

    def explain(self) -> str:
        """Return the plan in words."""
        lines = [f"{self.operation}: backend {self.backend}"]
        if self.kernel is not None:
            lines.append(f"  architecture {self.kernel.spec.arch}")
            lines.extend(f"  {name} = {value}" for name, value in self.kernel.spec.config)
            lines.extend(f"  copies {name} first: its leading dimensions do not merge" for name in self.kernel.copies)
        if self.missing is not None:
            lines.append(f"  no kernel: {self.missing.reason}. {self.missing.fix}".rstrip())
        return "\n".join(lines)


def backend_of(arch: str) -> str:
    """Return the backend name of an architecture, ``"sm90"`` for ``"sm_90a"``."""
    number = int("".join(c for c in arch if c.isdigit()))
    return f"sm{number // 10}0"


def check_backend(operation: str, backend: object) -> str:
    """Return ``backend`` if it is one of :data:`BACKENDS`.

    Raises
    ------
    TypeError
        Not a string.
    InvalidArgumentError
        An unknown name.
    """
    fix = 'Leave it out for "auto".'
    if not isinstance(backend, str):
        raise TypeError(explain(operation, "backend", "be a string", f"{type(backend).__name__} {backend!r}", fix))
    if backend not in BACKENDS:
        rule = f"be one of {', '.join(BACKENDS)}"
        raise InvalidArgumentError(explain(operation, "backend", rule, repr(backend), fix))
    return backend


def choose(
    bound: Bound, backend: str, find_kernel: Callable[[Bound, Target], Kernel | NoKernel], target: Target | None
) -> Plan:
    """Choose the backend for a call. Warns about nothing and touches no GPU; see :func:`fall_back`.

    Parameters
    ----------
    bound
        The checked call.
    backend
        ``"auto"``, ``"reference"`` or the name of a kernel backend.
    find_kernel
        The operation's own plan: a kernel for the target, or the reason why there is none.
    target
        The GPU; ``None`` for arrays on the CPU.

    Raises
    ------
    NotSupportedError
        A kernel was asked for by name and cannot serve the call.
    """
    if backend == "reference" or (backend == "auto" and target is None):
        return Plan(bound.operation, "reference")
    found = _kernel_for(bound, backend, find_kernel, target)
    if isinstance(found, Kernel):
        return Plan(bound.operation, backend_of(found.spec.arch), found, target=target)
    if backend != "auto":
        raise _not_supported(bound.operation, backend, found, target)
    return Plan(bound.operation, "reference", None, found, target)


def fall_back(plan: Plan) -> None:
    """Say that a CUDA problem runs the reference: warn once per operation and reason, or raise under ``FE_STRICT=1``.

    Raises
    ------
    NotSupportedError
        Under strict mode.
    """
    if plan.missing is None:
        return
    if env.strict():
        raise _not_supported(plan.operation, "auto", plan.missing, plan.target)
    seen = (plan.operation, plan.missing.reason)
    if seen in _warned:
        return
    _warned.add(seen)
    advice = f"{plan.missing.fix} Set FE_STRICT=1 to make this an error.".lstrip()
    text = f"{plan.operation}: runs the reference on the GPU: {plan.missing.reason}. {advice}"
    warnings.warn(text, FallbackWarning, stacklevel=user_stacklevel())


_warned: set[tuple[str, str]] = set()


def _kernel_for(
    bound: Bound, backend: str, find_kernel: Callable[[Bound, Target], Kernel | NoKernel], target: Target | None
) -> Kernel | NoKernel:
    if target is None:
        return NoKernel(f"the arrays are on {bound.device}, which has no kernels", "Move them to a GPU.")
    if backend_of(target.arch) not in KERNEL_BACKENDS:
        reason = f"no kernel is made for compute capability {_dotted(target.capability)}"
        return NoKernel(reason, "Use another GPU.", KERNEL_CAPABILITIES)
    if backend not in ("auto", backend_of(target.arch)):
        reason = f"the device is of compute capability {_dotted(target.capability)}"
        return NoKernel(reason, 'Use backend="auto".', ((int(backend.removeprefix("sm")) // 10, 0),))
    return find_kernel(bound, target)


def _not_supported(operation: str, backend: str, missing: NoKernel, target: Target | None) -> NotSupportedError:
    text = explain(operation, "backend", "have a kernel for this call", f"{backend!r}: {missing.reason}", missing.fix)
    found = target.capability if target is not None else None
    return NotSupportedError(text, reason=missing.reason, found=found, supported=missing.supported)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
