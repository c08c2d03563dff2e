"""Launcher of the convolution: x, weight, bias?, labels?, offsets?, initial states? -> y, final states?."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import cute

from fe_conv.tiles import split_config

from .any_forward import any_forward_kernel
from .forward_rows import forward_rows_kernel
from .forward_runs import forward_runs_kernel
from .setup import Setup, fake_arguments, named
from .states import launch_states
from .tiling import blocks_of, carveout, walks_of

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments; ``config`` is what :func:`fe_conv.tiles.config` returns."""
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def causal_conv1d(*arguments: Any) -> None:
        _launch(setup, arguments)

    return causal_conv1d, fake_arguments(setup)


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    operands = named(setup, arguments)
    kernel, names = _KERNELS[setup.launch.kernel]
    walks = walks_of(setup, operands["x"], None)
    kernel(setup, *(operands[name] for name in names), *walks).launch(
        grid=(blocks_of(setup, operands["x"], *walks[:1]), 1, 1),
        block=(setup.launch.threads, 1, 1),
        stream=operands["stream"],
        min_blocks_per_mp=setup.launch.blocks_per_sm,
        preferred_smem_carveout=carveout(setup),
    )
    if setup.problem.has_final:
        launch_states(setup, operands)


_KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rows": (forward_rows_kernel, ("x", "weight", "bias", "labels", "offsets", "initial", "y")),
    "any": (any_forward_kernel, ("dy", "x", "weight", "bias", "labels", "offsets", "initial", "y")),
    "runs": (forward_runs_kernel, ("x", "weight", "bias", "initial", "y")),
}
