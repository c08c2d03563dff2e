"""Which kernels ``fe compile`` and ``fe warmup`` are about: libraries, architectures and a preset, as kernel specs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .support import CommandError, find_operations

if TYPE_CHECKING:
    from fe_runtime.bench.workload import Workload
    from fe_runtime.compile.spec import KernelSpec
    from fe_runtime.plan import Target

__all__ = ["add_selection", "kernel_specs", "selected", "target_for"]

EVERY_PRESET = "all"

_MULTIPROCESSORS = {8: 108, 9: 132, 10: 148, 12: 188}
"""Of the data-centre GPU of each generation, for plans that are made without one."""


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose kernels."""
    parser.add_argument("library", nargs="?", metavar="LIBRARY", help="for example fe-norm (default: every library)")
    parser.add_argument(
        "--arch", nargs="+", metavar="ARCH", help="for example sm_90a sm_100a (default: this GPU's, else sm_90a)"
    )
    parser.add_argument(
        "--preset", default="default", metavar="NAME", help=f"set of cases; {EVERY_PRESET!r} for all of them"
    )


def selected(options: argparse.Namespace) -> list[KernelSpec]:
    """Return the kernels that the options choose, without repeats."""
    try:
        workloads = find_operations().of_library(options.library)
    except LookupError as error:
        raise CommandError(str(error)) from error
    known = sorted({name for workload in workloads for name in workload.presets})
    if options.preset not in (*known, EVERY_PRESET):
        raise CommandError(f"unknown preset {options.preset!r}; there are {', '.join(known)} and {EVERY_PRESET}")
    return kernel_specs(workloads, [target_for(arch) for arch in options.arch or [_arch_here()]], options.preset)


def kernel_specs(workloads: Iterable[Workload], targets: Sequence[Target], preset: str) -> list[KernelSpec]:
    """Return every kernel that the cases of a preset need, without repeats."""
    from fe_runtime.bench.problem import plan_case

    plans = [
        plan_case(workload, case, target)
        for workload in workloads
        for name, cases in workload.presets.items()
        if preset in (EVERY_PRESET, name)
        for case in cases
        for target in targets
    ]
    return list(dict.fromkeys(plan.kernel.spec for plan in plans if plan.kernel is not None))


def target_for(arch: str) -> Target:
    """Return the target of ``"sm_90a"``: the GPU that is here if it is of that kind, else a typical one."""
    from fe_runtime.plan import Target

    here = _target_here()
    if here is not None and here.arch == arch:
        return here
    digits = arch.removeprefix("sm_").rstrip("af")
    if not (arch.startswith("sm_") and digits.isdigit() and len(digits) >= 2):
        raise CommandError(f"unknown architecture {arch!r}; use a name such as sm_80, sm_90a, sm_100a or sm_120a")
    capability = (int(digits[:-1]), int(digits[-1]))
    target = Target(capability, _MULTIPROCESSORS.get(capability[0], 132))
    if target.arch != arch:
        raise CommandError(f"kernels for {arch!r} are compiled as {target.arch!r}; use that name")
    return target


def _arch_here() -> str:
    here = _target_here()
    return here.arch if here is not None else "sm_90a"


def _target_here() -> Target | None:
    from fe_runtime.arrays import Device, cuda_is_available
    from fe_runtime.plan import Target

    return Target.of(Device("cuda", 0)) if cuda_is_available() else None
