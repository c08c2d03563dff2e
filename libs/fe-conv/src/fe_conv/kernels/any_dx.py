"""The gradient of x from ``dz`` in every case: a thread computes ``unroll`` neighbouring tokens of a channel."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .sequences import NUMBER, START, STOP
from .setup import Setup
from .spot import Spot, is_same, later_value, shift
from .tiling import place_of_thread
from .values import keep

__all__ = ["any_dx_kernel"]


@cute.kernel
def any_dx_kernel(
    setup: cutlass.Constexpr[Setup],
    dz: cute.Tensor,
    dfinal: cute.Tensor | None,
    x: cute.Tensor,
    weight: cute.Tensor,
    labels: cute.Tensor | None,
    offsets: cute.Tensor | None,
    dx: cute.Tensor,
) -> None:
    """Compute ``dx[t] = sum_k dz[t + k] * weight[W - 1 - k]``, at a sequence's end with that of the final state."""
    batch, token, channel = place_of_thread(setup, x)
    if (token < x.shape[1]) & (channel < x.shape[2]):
        spot = Spot.of(setup, (x, labels, offsets, None), batch, channel, token)
        sums = _correlate(spot, weight, dz, token)
        for k in cutlass.range_constexpr(setup.launch.unroll):
            if token + k < x.shape[1]:
                total = sums[k]
                if cutlass.const_expr(dfinal is not None):
                    total = total + _of_state(spot, dfinal, token + k)
                dx[batch, token + k, channel] = setup.dtype(total)


@cute.jit
def _correlate(spot: Spot, weight: cute.Tensor, dz: cute.Tensor, token: Int32) -> cute.Tensor:
    setup, count, history = spot.setup, spot.setup.launch.unroll, spot.history
    sums, window = cute.make_rmem_tensor((count,), setup.wide), cute.make_rmem_tensor((count,), setup.wide)
    sums.fill(0.0)
    for k in cutlass.range_constexpr(count - 1):
        window[k + 1] = later_value(spot, dz, token + k)
    for j in cutlass.range(history + 1, unroll=1):
        newest = token + j + (count - 1)
        shift(window, keep(is_same(spot, token, newest), later_value(spot, dz, newest)))
        tap = setup.wide(weight[spot.channel, history - j])
        for k in cutlass.range_constexpr(count):
            sums[k] = cute.math.fma(window[k], tap, sums[k])
    return sums


@cute.jit
def _of_state(spot: Spot, dfinal: cute.Tensor, token: Int32) -> Any:
    """Return what the gradient of the final state gives to a token: 0 but for the last W-1 of a sequence."""
    within = spot.within
    share = spot.setup.wide(0.0)
    place = token - within[STOP] + spot.history
    if (within[START] < within[STOP]) & (place >= 0):
        share = spot.setup.wide(dfinal[within[NUMBER], place, spot.channel])
    return share


any_dx_kernel.set_name_prefix("fe_conv_any_dx", remove_cutlass_symbol=True, keep_mangled_name=False)
