"""The final states: the last W-1 values of each sequence, or of its initial state before them, copied as they are.

A thread copies one value. It moves ``2 * size`` bytes per value of the states.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .sequences import bounds_of
from .setup import Setup

__all__ = ["launch_states", "states_kernel"]

THREADS = 128


@cute.kernel
def states_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    final: cute.Tensor,
) -> None:
    """Copy one value of ``final`` (N, W-1, D), channels side by side."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pieces, history = cute.ceil_div(x.shape[2], THREADS), setup.problem.width - 1
    channel, number, place = (block % pieces) * THREADS + thread, block // pieces // history, block // pieces % history
    if channel < x.shape[2]:
        final[number, place, channel] = _value(setup, x, offsets, initial, number, place, channel)


@cute.jit
def _value(
    setup: Setup,
    x: cute.Tensor,
    offsets: cute.Tensor | None,
    initial: cute.Tensor | None,
    number: Int32,
    place: Int32,
    channel: Int32,
) -> Any:
    batch, start, stop = number, Int32(0), Int32(x.shape[1])
    if cutlass.const_expr(offsets is not None):
        batch = Int32(0)
        start, stop = bounds_of(offsets, number, Int32(x.shape[1]))
    history = setup.problem.width - 1
    token = stop - history + place
    value = setup.dtype(0.0)
    if token >= start:
        value = x[batch, token, channel]
    else:
        if cutlass.const_expr(initial is not None):
            value = initial[number, channel, token - start + history]
    return value


def launch_states(setup: Setup, operands: dict[str, Any]) -> None:
    """Launch the copy of the final states."""
    x, final = operands["x"], operands["final"]
    blocks = Int32(final.shape[0]) * Int32(final.shape[1]) * Int32(cute.ceil_div(x.shape[2], THREADS))
    states_kernel(setup, x, operands["offsets"], operands["initial"], final).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=operands["stream"], preferred_smem_carveout=-1
    )


states_kernel.set_name_prefix("fe_conv_final_states", remove_cutlass_symbol=True, keep_mangled_name=False)
