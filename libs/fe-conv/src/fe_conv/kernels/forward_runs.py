"""The convolution where tokens are neighbours in memory and every row of the batch is one sequence.

The threads of a warp hold neighbouring vectors (16 bytes) of tokens of one channel. Each loads the W-1 tokens before
its vector too: its neighbour loads the same ones, so they come from the first-level cache. It moves ``2 * size`` bytes
per value of x.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .runs import Run, load_run, store_run
from .setup import Setup
from .tiling import place_of_thread
from .values import activated, convolved, filters

__all__ = ["forward_runs_kernel"]


@cute.kernel
def forward_runs_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    initial: cute.Tensor | None,
    y: cute.Tensor,
) -> None:
    """Compute y for a few vectors of tokens of one channel."""
    batch, token, channel = place_of_thread(setup, x)
    if channel < x.shape[2]:
        run = Run(setup, x, initial, batch, channel)
        end = token - token % setup.launch.tokens + setup.launch.tokens
        (taps,), shifts = filters(setup, weight, bias, channel)
        if end <= x.shape[1]:
            _convolve(run, taps, None if shifts is None else shifts[0], token, y, True)
        else:
            _convolve(run, taps, None if shifts is None else shifts[0], token, y, False)


@cute.jit
def _convolve(
    run: Run, taps: list[Any], shift: Any, token: Int32, y: cute.Tensor, whole: cutlass.Constexpr[bool]
) -> None:
    """Compute the vectors that start at ``token`` and at every ``lanes * vector``-th after it, ``whole``: all exist."""
    launch = run.setup.launch
    tokens = [token + n * launch.lanes * launch.vector for n in range(launch.unroll)]
    loaded = [load_run(run, run.x, first, whole, before=True) for first in tokens]
    for first, values in zip(tokens, loaded, strict=True):
        wide = [run.setup.wide(value) for value in values]
        results = [activated(run.setup, convolved(wide[v : v + len(taps)], taps, shift)) for v in range(launch.vector)]
        store_run(run, results, y, first, whole)


forward_runs_kernel.set_name_prefix("fe_conv_forward_runs", remove_cutlass_symbol=True, keep_mangled_name=False)
