"""The convolution, or the gradient ``dz`` of its result before the activation, in every case.

A thread computes ``unroll`` neighbouring tokens of a channel, tap by tap; every load of a value of x serves them all.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .setup import Setup
from .spot import Spot, is_member, is_same, shift, value_of
from .tiling import place_of_thread
from .values import activated, derivative, keep

__all__ = ["any_forward_kernel"]


@cute.kernel
def any_forward_kernel(
    setup: cutlass.Constexpr[Setup],
    dy: cute.Tensor | None,
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    labels: cute.Tensor | None,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    out: cute.Tensor,
) -> None:
    """Compute y, or with dy ``dz``, for a few tokens of a channel."""
    batch, token, channel = place_of_thread(setup, x)
    if (token < x.shape[1]) & (channel < x.shape[2]):
        spot = Spot.of(setup, (x, labels, offsets, initial), batch, channel, token)
        sums = _convolve(spot, weight, token)
        for k in cutlass.range_constexpr(setup.launch.unroll):
            z = sums[k] if bias is None else sums[k] + setup.wide(bias[channel])
            if token + k < x.shape[1]:
                _store(spot, z, token + k, dy, out)


@cute.jit
def _convolve(spot: Spot, weight: cute.Tensor, token: Int32) -> cute.Tensor:
    setup, count, history = spot.setup, spot.setup.launch.unroll, spot.history
    sums, window = cute.make_rmem_tensor((count,), setup.wide), cute.make_rmem_tensor((count,), setup.wide)
    sums.fill(0.0)
    for k in cutlass.range_constexpr(count - 1):
        window[k + 1] = value_of(spot, token + (k - history))
    for j in cutlass.range(history + 1, unroll=1):
        newest = token + j + (count - 1 - history)
        shift(window, keep(is_same(spot, token, newest), value_of(spot, newest)))
        tap = setup.wide(weight[spot.channel, j])
        for k in cutlass.range_constexpr(count):
            sums[k] = cute.math.fma(window[k], tap, sums[k])
    return sums


def _store(spot: Spot, z: Any, token: Int32, dy: cute.Tensor | None, out: cute.Tensor) -> None:
    setup = spot.setup
    if dy is None:
        result = activated(setup, z)
    else:
        result = setup.wide(dy[spot.batch, token, spot.channel])
        result = result if setup.problem.activation == "identity" else result * derivative(z)
    out[spot.batch, token, spot.channel] = out.element_type(keep(is_member(spot, token), result))


any_forward_kernel.set_name_prefix("fe_conv_any_forward", remove_cutlass_symbol=True, keep_mangled_name=False)
