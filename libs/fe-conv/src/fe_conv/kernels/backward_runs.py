"""The gradients of x, weight and bias where tokens are neighbours in memory and a row of the batch is one sequence.

The threads of a warp hold neighbouring vectors (16 bytes) of tokens of one channel. A thread computes ``z`` and ``dz``
of its tokens and, again, of the W-1 after them, which its gradients need. The warp adds up its sums for the filter. It
moves ``3 * size`` bytes per value of x; what neighbours share comes from the first-level cache.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from fe_runtime.cute.reduce import warp_sum

from .runs import Run, load_run, store_run
from .setup import Setup
from .tiling import place_of_thread, row_of_partials
from .values import convolved, derivative, filters, keep

__all__ = ["backward_runs_kernel"]


@cute.kernel
def backward_runs_kernel(
    setup: cutlass.Constexpr[Setup],
    dy: cute.Tensor,
    dfinal: cute.Tensor | None,
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    initial: cute.Tensor | None,
    dx: cute.Tensor,
    partials: cute.Tensor,
) -> None:
    """Compute dx for a few vectors of tokens of one channel, and their partial sums."""
    batch, token, channel = place_of_thread(setup, x)
    if channel < x.shape[2]:
        run = Run(setup, x, initial, batch, channel)
        first = token - token % setup.launch.tokens
        (taps,), shifts = filters(setup, weight, bias, channel)
        sums = cute.make_rmem_tensor((setup.problem.sums,), setup.wide)
        sums.fill(0.0)
        parameters = (taps, None if shifts is None else shifts[0])
        if first + setup.launch.tokens + setup.problem.width <= x.shape[1]:
            _differentiate(run, parameters, dy, dfinal, dx, token, sums, True)
        else:
            _differentiate(run, parameters, dy, dfinal, dx, token, sums, False)
        totals = [warp_sum(sums[j]) for j in range(setup.problem.sums)]
        row = row_of_partials(setup, x, batch, first)
        if cute.arch.lane_idx() == 0:
            for j in cutlass.range_constexpr(setup.problem.sums):
                partials[row, j * Int32(x.shape[2]) + channel] = totals[j]


@cute.jit
def _differentiate(
    run: Run,
    parameters: tuple[list[Any], Any],
    dy: cute.Tensor,
    dfinal: cute.Tensor | None,
    dx: cute.Tensor,
    token: Int32,
    sums: cute.Tensor,
    whole: cutlass.Constexpr[bool],
) -> None:
    """Treat the vectors that start at ``token`` and at every ``lanes * vector``-th after it, ``whole``: all exist."""
    setup, (taps, shift) = run.setup, parameters
    firsts = [token + n * setup.launch.lanes * setup.launch.vector for n in range(setup.launch.unroll)]
    loaded = [(load_run(run, run.x, t, whole, True, True), load_run(run, dy, t, whole, False, True)) for t in firsts]
    for first, (x, g) in zip(firsts, loaded, strict=True):
        exists = [None if whole else first + v < run.tokens for v in range(len(g))]
        h = [setup.wide(value) for value in x]
        dz = [keep(exists[v], _dz(setup, setup.wide(g[v]), h[v : v + len(taps)], taps, shift)) for v in range(len(g))]
        _add_to_sums(setup, sums, h, dz, exists)
        results = [convolved(dz[v : v + len(taps)], taps[::-1], None) for v in range(setup.launch.vector)]
        if cutlass.const_expr(not whole and dfinal is not None):
            results = [_with_state(run, value, dfinal, first + v) for v, value in enumerate(results)]
        store_run(run, results, dx, first, whole)


def _dz(setup: Setup, dz: Any, h: list[Any], taps: list[Any], shift: Any) -> Any:
    return dz if setup.problem.activation == "identity" else dz * derivative(convolved(h, taps, shift))


def _add_to_sums(setup: Setup, sums: cute.Tensor, h: list[Any], dz: list[Any], exists: list[Any]) -> None:
    for v in range(setup.launch.vector):
        for j in range(setup.problem.width):
            # An infinite value times the 0 of a token that does not exist would be NaN.
            sums[j] = cute.math.fma(dz[v], keep(exists[v], h[v + j]), sums[j])
        if setup.problem.has_bias:
            sums[setup.problem.width] = sums[setup.problem.width] + dz[v]


@cute.jit
def _with_state(run: Run, value: Any, dfinal: cute.Tensor, token: Int32) -> Any:
    """Add the gradient of the final state to that of a token, if it is one of the last W-1."""
    place = token - run.tokens + (run.setup.problem.width - 1)
    if (place >= 0) & (token < run.tokens):
        value = value + run.setup.wide(dfinal[run.batch, place, run.channel])
    return value


backward_runs_kernel.set_name_prefix("fe_conv_backward_runs", remove_cutlass_symbol=True, keep_mangled_name=False)
