"""Kernels of ``causal_conv1d_update``.

The fast kernel: a thread has a few neighbouring channels of several rows; it loads their slots and tokens with all
loads in flight, filters them with taps it loads once, and stores the slots one place on. Bytes moved per row and
channel, the floor of its time: ``2*L + 2`` values (slot read and written, token, output).

The general kernel: a thread has one channel of one row, whatever the strides. It walks the tokens with the last W of
them in registers, then moves the slot, or writes the tokens into the ring.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.cute.nvgpu import CopyG2ROp

from fe_conv.launch_update import Launch, Problem, split_config
from fe_runtime.cute.activation import silu
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.memory import access_bits, load_atom, store_atom
from fe_runtime.cute.types import numeric

__all__ = ["build"]

MAX_GRID_Y = 32768
"""Groups of rows along a grid's second dimension, which cannot hold as many as the first; more go along the third."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: x, conv_state, weight, bias?, cache_seqlens?, conv_state_indices?,
    out, new_state, stream.

    ``config`` is what :func:`fe_conv.launch_update.config` returns. ``new_state`` is the memory of ``conv_state``: both
    are read and written through it, so that nothing has to be assumed about two names of one memory.
    """
    setup = Setup(arch, *split_config(config))

    @cute.jit
    def causal_conv1d_update(*arguments: Any) -> None:
        _launch(setup, arguments)

    return causal_conv1d_update, tuple(_fake_arguments(setup).values())


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation."""

    arch: str
    problem: Problem
    launch: Launch

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that are present, in order."""
        problem = self.problem
        optional = {
            "bias": problem.bias_dtype is not None,
            "lengths": problem.ring,
            "indices": problem.indexed,
        }
        names = ("x", "conv_state", "weight", "bias", "lengths", "indices", "out", "new_state", "stream")
        return tuple(name for name in names if optional.get(name, True))

    def activate(self, z: Float32) -> Float32:
        """Apply the activation."""
        return silu(z) if self.problem.activation == "silu" else z


def _launch(setup: Setup, arguments: tuple[Any, ...]) -> None:
    """Launch one block per run of channels and group of rows."""
    how = setup.launch
    operands = dict(zip(setup.operands, arguments, strict=True))
    x, state = operands["x"], operands["new_state"]
    weight, bias, lengths, indices, out = (
        operands.get(name) for name in ("weight", "bias", "lengths", "indices", "out")
    )
    if setup.problem.is_fast:
        kernel = step_kernel(setup, x, weight, bias, indices, out, state)
    else:
        kernel = walk_kernel(setup, x, weight, bias, lengths, indices, out, state)
    tiles = Int32(cute.ceil_div(x.shape[1], how.threads * how.vector))
    groups = cute.ceil_div(x.shape[0], how.rows)
    kernel.launch(
        grid=(tiles, Int32(cutlass.min(groups, MAX_GRID_Y)), Int32(cute.ceil_div(groups, MAX_GRID_Y))),
        block=(how.threads, 1, 1),
        min_blocks_per_mp=how.blocks_per_sm,
        stream=operands["stream"],
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


# ---- the fast kernel


@cute.kernel
def step_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    indices: cute.Tensor | None,
    out: cute.Tensor,
    state: cute.Tensor,
) -> None:
    """One token per row; the state of a thread's channels stays in registers."""
    how = setup.launch
    unit, group = _place(setup)
    if unit * how.vector < x.shape[1]:
        first = group * how.rows
        places = [Place.of(first + i, indices, x.shape[0], state.shape[0]) for i in range(how.rows)]
        histories = [_load_slot(setup, state, place.slot, unit) for place in places]
        tokens = [_load_run(setup, x[place.present, None], setup.problem.x_alignment, unit) for place in places]
        taps = _load_taps(setup, weight, unit)
        shift = None if bias is None else _load_run(setup, bias, setup.problem.bias_alignment, unit)
        for i in cutlass.range_constexpr(how.rows):
            _finish(setup, places[i], histories[i], tokens[i], taps, shift, out, state, unit)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's state is.

    ``present`` and ``slot`` always exist, so that loads need no branch; what was loaded counts only if the row
    ``exists``, and its state only if it ``has_state``.
    """

    row: Int64
    present: Int64
    slot: Int64
    exists: Boolean
    has_state: Boolean

    @staticmethod
    def of(row: Int64, indices: cute.Tensor | None, rows: Int64, slots: Int64) -> Place:
        """Look a row up."""
        present = cutlass.min(row, Int64(rows) - 1)
        exists = row < rows
        if indices is None:
            return Place(row, present, present, exists, exists)
        slot = Int64(indices[present])
        inside = (slot >= 0) & (slot < slots)
        return Place(row, present, cutlass.min(cutlass.max(slot, Int64(0)), Int64(slots) - 1), exists, exists & inside)


@cute.jit
def _finish(
    setup: cutlass.Constexpr[Setup],
    place: Place,
    history: cute.Tensor,
    token: cute.Tensor,
    taps: cute.Tensor,
    shift: cute.Tensor | None,
    out: cute.Tensor,
    state: cute.Tensor,
    unit: Int32,
) -> None:
    """Filter one row's token, and store it and the moved slot; a padding row gets zeros."""
    if place.has_state:
        _store_run(setup, _filtered(setup, history, token, taps, shift), out[place.row, None], unit)
        _store_slot(setup, _moved(setup, history, token), state, place.slot, unit)
    else:
        if place.exists:
            nothing = cute.make_rmem_tensor((setup.launch.vector,), numeric(setup.problem.dtype))
            nothing.fill(0.0)
            _store_run(setup, nothing, out[place.row, None], unit)


def _filtered(
    setup: Setup, history: cute.Tensor, token: cute.Tensor, taps: cute.Tensor, shift: cute.Tensor | None
) -> cute.Tensor:
    """Return ``act(sum_j taps[j] * h[j] + shift)`` of each channel, rounded once: oldest tap first, shift last."""
    problem = setup.problem
    width, length = problem.width, problem.length
    wide, newest = _wide(history), token.load().to(Float32)
    offset = None if shift is None else shift.load().to(Float32)
    results = cute.make_rmem_tensor((setup.launch.vector,), Float32)
    for c in range(setup.launch.vector):
        z = taps[c, 0] * wide[c, length + 1 - width]
        for j in range(1, width - 1):
            z = z + taps[c, j] * wide[c, length + 1 - width + j]
        z = z + taps[c, width - 1] * newest[c]
        results[c] = setup.activate(z if offset is None else z + offset[c])
    rounded = cute.make_rmem_tensor((setup.launch.vector,), numeric(problem.dtype))
    rounded.store(results.load().to(numeric(problem.dtype)))
    return rounded


def _moved(setup: Setup, history: cute.Tensor, token: cute.Tensor) -> cute.Tensor:
    """Return a slot one place on, with the token at its end: the bits, whatever they mean."""
    problem = setup.problem
    moved = cute.make_rmem_tensor(history.layout, history.element_type)
    source, newest, target = (_bits(values) for values in (history, token, moved))
    for c in range(setup.launch.vector):
        for i in range(problem.length - 1):
            target[c, i] = source[c, i + 1]
        target[c, problem.length - 1] = newest[c]
    return moved


def _bits(values: cute.Tensor) -> cute.Tensor:
    return cute.recast_tensor(values, Uint16 if values.element_type.width == 16 else Uint32)


def _wide(values: cute.Tensor) -> cute.Tensor:
    """Return the values in float32."""
    wide = cute.make_rmem_tensor(values.layout, Float32)
    wide.store(values.load().to(Float32))
    return wide


def _load_taps(setup: Setup, weight: cute.Tensor, unit: Int32) -> cute.Tensor:
    """Return the filters of a thread's channels in float32, ``(vector, W)``."""
    problem, vector = setup.problem, setup.launch.vector
    dtype, run = weight.element_type, vector * problem.width
    taps = cute.make_rmem_tensor(cute.make_layout((vector, problem.width), stride=(problem.width, 1)), dtype)
    flat = cute.make_tensor(weight.iterator, cute.make_layout((weight.shape[0] * problem.width,)))
    alignment = _common(problem.weight_alignment, run * dtype.width // 8)
    atom = load_atom(dtype, access_bits(dtype, run, alignment))
    cute.copy(atom, cute.local_tile(flat, (run,), (unit,)), _flat(taps))
    return _wide(taps)


def _load_run(setup: Setup, values: cute.Tensor, alignment: int, unit: Int32) -> cute.Tensor:
    """Load a thread's channels of a vector that nobody writes meanwhile."""
    vector, dtype = setup.launch.vector, values.element_type
    loaded = cute.make_rmem_tensor((vector,), dtype)
    bits = access_bits(dtype, vector, _common(alignment, vector * dtype.width // 8))
    cute.copy(load_atom(dtype, bits), cute.local_tile(values, (vector,), (unit,)), loaded)
    return loaded


def _store_run(setup: Setup, values: cute.Tensor, target: cute.Tensor, unit: Int32) -> None:
    vector, dtype = setup.launch.vector, values.element_type
    bits = access_bits(dtype, vector, _common(setup.problem.out_alignment, vector * dtype.width // 8))
    cute.copy(store_atom(dtype, bits), values, cute.local_tile(target, (vector,), (unit,)))


def _load_slot(setup: Setup, state: cute.Tensor, slot: Int64, unit: Int32) -> cute.Tensor:
    """Load the state of a thread's channels, ``(vector, L)``."""
    problem, vector = setup.problem, setup.launch.vector
    strides = (problem.length, 1) if problem.layout == "row" else (1, vector)
    layout = cute.make_layout((vector, problem.length), stride=strides)
    history = cute.make_rmem_tensor(layout, state.element_type)
    for run, kept in _runs(setup, state, slot, unit, history):
        # No load_atom: the state is written meanwhile, by the very thread that reads it.
        cute.copy(
            cute.make_copy_atom(CopyG2ROp(), kept.element_type, num_bits_per_copy=_slot_bits(setup, kept)), run, kept
        )
    return history


def _store_slot(setup: Setup, history: cute.Tensor, state: cute.Tensor, slot: Int64, unit: Int32) -> None:
    for run, kept in _runs(setup, state, slot, unit, history):
        cute.copy(store_atom(state.element_type, _slot_bits(setup, kept)), kept, run)


def _runs(
    setup: Setup, state: cute.Tensor, slot: Int64, unit: Int32, history: cute.Tensor
) -> list[tuple[cute.Tensor, cute.Tensor]]:
    """Return the runs of neighbours that hold the state of a thread's channels, in memory and in registers."""
    problem, vector = setup.problem, setup.launch.vector
    if problem.layout == "plane":
        return [
            (cute.local_tile(state[slot, None, i], (vector,), (unit,)), history[None, i]) for i in range(problem.length)
        ]
    shape = (state.shape[0], state.shape[1] * problem.length)
    flat = cute.make_tensor(state.iterator, cute.make_layout(shape, stride=(state.stride[0], 1)))
    return [(cute.local_tile(flat[slot, None], (vector * problem.length,), (unit,)), _flat(history))]


def _slot_bits(setup: Setup, run: cute.Tensor) -> int:
    count, dtype = cute.size(run.shape), run.element_type
    return access_bits(dtype, count, _common(setup.problem.state_alignment, count * dtype.width // 8))


def _flat(values: cute.Tensor) -> cute.Tensor:
    """Return registers in the order of their memory."""
    return cute.make_tensor(values.iterator, cute.make_layout((cute.size(values.shape),)))


def _common(alignment: int, step: int) -> int:
    """Return the alignment of every multiple of ``step`` bytes from an aligned start."""
    return min(alignment, step & -step)


# ---- the general kernel


@cute.kernel
def walk_kernel(
    setup: cutlass.Constexpr[Setup],
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    lengths: cute.Tensor | None,
    indices: cute.Tensor | None,
    out: cute.Tensor,
    state: cute.Tensor,
) -> None:
    """Any strides, any number of tokens and places, shifted or as a ring."""
    channel, row = _place(setup)
    if (channel < x.shape[1]) & (row < x.shape[0]):
        place = Place.of(row, indices, x.shape[0], state.shape[0])
        token, result = _line(setup, x, row, channel), _line(setup, out, row, channel)
        if place.has_state:
            slot = state[place.slot, channel, None]
            first = Int32(0)
            if cutlass.const_expr(lengths is not None):
                first = _wrapped(lengths[row], Int32(slot.shape[0]))
            _walk(setup, token, slot, weight[channel, None], bias, channel, result, first)
            if cutlass.const_expr(setup.problem.ring):
                _write_ring(token, slot, first)
            else:
                _shift(token, slot)
        else:
            for k in range(Int32(result.shape[0])):
                result[k] = result.element_type(0.0)


def _line(setup: Setup, values: cute.Tensor, row: Int64, channel: Int32) -> cute.Tensor:
    """Return the tokens of a row and channel."""
    if setup.problem.tokens:
        return values[row, channel, None]
    return cute.local_tile(values[row, None], (1,), (channel,))


@cute.jit
def _walk(
    setup: cutlass.Constexpr[Setup],
    token: cute.Tensor,
    slot: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor | None,
    channel: Int32,
    result: cute.Tensor,
    first: Int32,
) -> None:
    """Filter the tokens of a row and channel, the last W of them in registers."""
    width, length = setup.problem.width, Int32(slot.shape[0])
    taps = [weight[j].to(Float32) for j in range(width)]
    window = cute.make_rmem_tensor((width,), Float32)
    for i in cutlass.range_constexpr(width - 1):
        at = length - (width - 1) + i
        window[i] = slot[_wrapped(first + at, length) if setup.problem.ring else at].to(Float32)
    for k in range(Int32(token.shape[0])):
        window[width - 1] = token[k].to(Float32)
        z = taps[0] * window[0]
        for j in cutlass.range_constexpr(1, width):
            z = z + taps[j] * window[j]
        if cutlass.const_expr(bias is not None):
            z = z + bias[channel].to(Float32)
        result[k] = setup.activate(z).to(result.element_type)
        for j in cutlass.range_constexpr(width - 1):
            window[j] = window[j + 1]


@cute.jit
def _shift(token: cute.Tensor, slot: cute.Tensor) -> None:
    """Move a slot on by as many places as there are tokens, and put these at its end."""
    count, length = Int32(token.shape[0]), Int32(slot.shape[0])
    kept = cutlass.max(length - count, Int32(0))
    for i in range(kept):
        slot[i] = slot[i + count]
    for i in range(kept, length):
        slot[i] = token[i + count - length]


@cute.jit
def _write_ring(token: cute.Tensor, slot: cute.Tensor, first: Int32) -> None:
    """Write the tokens from place ``first`` on; those that would be overwritten are left out."""
    count, length = Int32(token.shape[0]), Int32(slot.shape[0])
    for k in range(cutlass.max(count - length, Int32(0)), count):
        slot[_wrapped(first + k, length)] = token[k]


def _wrapped(place: Int32, length: Int32) -> Int32:
    """Return ``place mod length``, not negative."""
    return ((place % length) + length) % length


# ---- both


def _place(setup: Setup) -> tuple[Int32, Int64]:
    """Return a thread's vector of channels, and its group of rows."""
    thread, _, _ = cute.arch.thread_idx()
    tile, low, high = cute.arch.block_idx()
    return tile * setup.launch.threads + thread, Int64(high) * MAX_GRID_Y + low


def _fake_arguments(setup: Setup) -> dict[str, Any]:
    problem = setup.problem
    rows, slots, tokens = (cute.sym_int64() for _ in range(3))
    channels = cute.sym_int64(divisibility=setup.launch.vector)
    length = problem.length if problem.is_fast else cute.sym_int64()
    dtype, weight = numeric(problem.dtype), numeric(problem.weight_dtype)
    bias = numeric(problem.bias_dtype or problem.dtype)
    shape = (rows, channels, tokens) if problem.tokens else (rows, channels)
    inner: tuple[int | None, ...] = (1,) if problem.is_fast else ((None, None) if problem.tokens else (None,))
    state = {"row": (problem.length, 1), "plane": (1, None), "any": (None, None)}[problem.layout]
    taps = (problem.width, 1) if problem.is_fast else (None, None)
    arguments = {
        "x": _fake(dtype, shape, (None, *inner), problem.x_alignment),
        "conv_state": _fake(dtype, (slots, channels, length), (None, *state), problem.state_alignment),
        "weight": _fake(weight, (channels, problem.width), taps, problem.weight_alignment),
        "bias": _fake(bias, (channels,), (1 if problem.is_fast else None,), problem.bias_alignment),
        "lengths": _fake(Int32, (rows,), (None,), 4),
        "indices": _fake(Int32, (rows,), (None,), 4),
        "out": _fake(dtype, shape, (None, *inner), problem.out_alignment),
        "new_state": _fake(dtype, (slots, channels, length), (None, *state), problem.state_alignment),
        "stream": fake_stream(),
    }
    return {name: arguments[name] for name in setup.operands}


def _fake(dtype: type[cutlass.Numeric], shape: tuple[Any, ...], strides: tuple[int | None, ...], alignment: int) -> Any:
    """Return a stand-in for an array; ``None`` stands for a stride that a call may change."""
    divisibility = max(1, 8 * alignment // dtype.width)
    known = tuple(cute.sym_int64(divisibility=divisibility) if step is None else step for step in strides)
    return cute.runtime.make_fake_tensor(dtype, shape, known, assumed_align=alignment)


step_kernel.set_name_prefix("fe_conv_update_step", remove_cutlass_symbol=True, keep_mangled_name=False)
walk_kernel.set_name_prefix("fe_conv_update_walk", remove_cutlass_symbol=True, keep_mangled_name=False)
