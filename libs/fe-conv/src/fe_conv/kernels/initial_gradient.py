"""The gradient of the initial states, from the first W-1 tokens of each sequence.

A block treats 32 channels of a sequence: it computes ``dz`` of those tokens into shared memory, then the gradients. It
reads little: ``3 * size`` bytes per value of the states.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .sequences import bounds_of
from .setup import Setup
from .values import derivative

__all__ = ["initial_gradient_kernel", "launch_initial_gradient"]

CHANNELS = 32
_MOST_ROWS = 8


@cute.kernel
def initial_gradient_kernel(
    setup: cutlass.Constexpr[Setup],
    dy: cute.Tensor,
    dfinal: cute.Tensor | None,
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    offsets: cute.Tensor | None,
    initial: cute.Tensor,
    dinitial: cute.Tensor,
) -> None:
    """Compute ``dinitial`` (N, D, W-1) for the channels of a block, one of its rows of threads every so many places."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    history, rows = setup.problem.width - 1, _rows(setup)
    layout = cute.make_layout((history, CHANNELS), stride=(CHANNELS, 1))
    shared = cutlass.memory.SmemAllocator().allocate_tensor(setup.wide, layout, byte_alignment=16)
    pieces = cute.ceil_div(x.shape[2], CHANNELS)
    lane, row, number = thread % CHANNELS, thread // CHANNELS, block // pieces
    channel = (block % pieces) * CHANNELS + lane
    batch, start, stop = number, Int32(0), Int32(x.shape[1])
    if cutlass.const_expr(offsets is not None):
        batch = Int32(0)
        start, stop = bounds_of(offsets, number, Int32(x.shape[1]))
    length = cutlass.min(stop - start, Int32(history))
    if channel < x.shape[2]:
        for i in cutlass.range(row, length, rows, unroll=1):
            z = setup.wide(0.0) if bias is None else setup.wide(bias[channel])
            z = z + _convolved(setup, x, weight, initial, (batch, number, start + i, i, channel))
            dz = setup.wide(dy[batch, start + i, channel])
            shared[i, lane] = dz if setup.problem.activation == "identity" else dz * derivative(z)
    cute.arch.sync_threads()
    if channel < x.shape[2]:
        for i in cutlass.range(row, history, rows, unroll=1):
            total = setup.wide(0.0)
            for t in cutlass.range(cutlass.min(i + 1, length), unroll=1):
                total = total + shared[t, lane] * setup.wide(weight[channel, i - t])
            if cutlass.const_expr(dfinal is not None):
                if i >= stop - start:
                    total = total + setup.wide(dfinal[number, i - (stop - start), channel])
            dinitial[number, channel, i] = setup.dtype(total)


@cute.jit
def _convolved(setup: Setup, x: cute.Tensor, weight: cute.Tensor, initial: cute.Tensor, place: Any) -> Any:
    """Return ``sum_j weight[j] * h[i + j]`` for token ``i`` of a sequence; ``h`` is the initial state, then x."""
    batch, number, token, i, channel = place
    history = setup.problem.width - 1
    z = setup.wide(0.0)
    for j in cutlass.range(history - i, unroll=1):
        z = z + setup.wide(initial[number, channel, i + j]) * setup.wide(weight[channel, j])
    for j in cutlass.range(history - i, history + 1, unroll=1):
        z = z + setup.wide(x[batch, token - history + j, channel]) * setup.wide(weight[channel, j])
    return z


def _rows(setup: Setup) -> int:
    return min(setup.problem.width - 1, _MOST_ROWS)


def launch_initial_gradient(setup: Setup, operands: dict[str, Any]) -> None:
    """Launch the gradient of the initial states."""
    names = ("dy", "dfinal", "x", "weight", "bias", "offsets", "initial", "dinitial")
    blocks = Int32(operands["dinitial"].shape[0]) * Int32(cute.ceil_div(operands["x"].shape[2], CHANNELS))
    initial_gradient_kernel(setup, *(operands[name] for name in names)).launch(
        grid=(blocks, 1, 1),
        block=(CHANNELS * _rows(setup), 1, 1),
        stream=operands["stream"],
        min_blocks_per_mp=4,  # so that it may use 64 registers
        preferred_smem_carveout=-1,
    )


initial_gradient_kernel.set_name_prefix("fe_conv_initial_gradient", remove_cutlass_symbol=True, keep_mangled_name=False)
