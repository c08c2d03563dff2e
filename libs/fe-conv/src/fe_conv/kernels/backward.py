"""Launcher of the gradient: dy, dfinal?, x, weight, bias?, labels?, offsets?, initial states? -> dx, dweight, dbias?,
dinitial?, with scratch for partial sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import cute

from fe_conv.tiles import split_config

from .any_dx import any_dx_kernel
from .any_forward import any_forward_kernel
from .any_sums import any_sums_kernel, blocks_of_sums
from .backward_rows import backward_rows_kernel
from .backward_runs import backward_runs_kernel
from .initial_gradient import launch_initial_gradient
from .partials import launch_sum
from .setup import Setup, fake_arguments, named
from .tiling import blocks_of, carveout, walks_of

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments; ``config`` is what :func:`fe_conv.tiles.config` returns."""
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def causal_conv1d_backward(*arguments: Any) -> None:
        _launch(setup, arguments)

    return causal_conv1d_backward, fake_arguments(setup)


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    operands = named(setup, arguments)
    walks = walks_of(setup, operands["x"], operands["partials"])
    for kernel, names, blocks in _kernels(setup, operands, walks):
        kernel(setup, *(operands[name] for name in names), *walks).launch(
            grid=(blocks, 1, 1),
            block=(setup.launch.threads, 1, 1),
            stream=operands["stream"],
            min_blocks_per_mp=setup.launch.blocks_per_sm,
            preferred_smem_carveout=carveout(setup),
        )
    launch_sum(setup, operands)
    if setup.problem.has_initial:
        launch_initial_gradient(setup, operands)


def _kernels(setup: Setup, operands: dict[str, Any], walks: tuple[Any, ...]) -> list[tuple[Any, tuple[str, ...], Any]]:
    """Return the kernels that compute dx and the partial sums, one after the other, with operands and blocks."""
    x = operands["x"]
    if setup.launch.kernel == "rows":
        names = ("dy", "dfinal", "x", "weight", "bias", "labels", "offsets", "initial", "dx", "partials")
        return [(backward_rows_kernel, names, blocks_of(setup, x, *walks[:1]))]
    if setup.launch.kernel == "runs":
        names = ("dy", "dfinal", "x", "weight", "bias", "initial", "dx", "partials")
        return [(backward_runs_kernel, names, blocks_of(setup, x))]
    dz_names = ("dy", "x", "weight", "bias", "labels", "offsets", "initial", "dz")
    dx_names = ("dz", "dfinal", "x", "weight", "labels", "offsets", "dx")
    sum_names = ("dz", "x", "labels", "offsets", "initial", "partials")
    return [
        (any_forward_kernel, dz_names, blocks_of(setup, x)),
        (any_dx_kernel, dx_names, blocks_of(setup, x)),
        (any_sums_kernel, sum_names, blocks_of_sums(setup, x)),
    ]
