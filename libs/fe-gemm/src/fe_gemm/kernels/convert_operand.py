"""Conversion of an operand without scales to bf16 in memory, for a matrix product that follows: FP8 values are exact,
float32 values are split.

The floor is each byte once: that of an FP8 value and two written, or the four of a float32 value and six written, for
the three parts of :mod:`fe_gemm.planning.convert`. No thread needs another one's data.

What holds for float32:

* Head + tail differ from a value by no more than 2^-17 of it, or 2^-134. A head is zero only for zero, and the largest
  finite one for what is beyond it.
* An infinite value or NaN is its head; plain head and tail are zero. So it meets each value of the other operand once,
  as that value's head, which is zero, infinite or NaN where the value is and has its sign. The sum is then infinite or
  NaN where the exact one is: no tail, of the other sign or zero, meets an infinity.
* A product of finite values that is itself beyond 2^128 is infinite or NaN: its parts are, and differ in sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from fe_gemm.planning.convert import Launch, Problem, split_config
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.convert import e4m3_to_bf16, e5m2_to_bf16
from fe_runtime.cute.memory import access_bits, load_atom, store_atom
from fe_runtime.cute.rounding import bf16_values, bf16_word
from fe_runtime.cute.types import architecture_number, storage

from .lines import ALIGNMENT, by_line, divided, workspace_matrices

__all__ = ["Setup", "build", "converted_matrices", "fake_arguments", "launch_convert"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: operand (R, C, L), FP8 as bytes, workspace, stream.

    ``config`` is what :func:`fe_gemm.planning.convert.config` returns.
    """
    setup = Setup.of(arch, *split_config(config))

    @cute.jit
    def convert(operand: cute.Tensor, workspace: cute.Tensor, stream: Any) -> None:
        launch_convert(setup, operand, converted_matrices(setup.problem, operand, workspace), stream)

    return convert, (*fake_arguments(setup.problem), fake_stream())


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation. ``hardware``: the architecture converts e4m3 codes itself."""

    problem: Problem
    launch: Launch
    hardware: bool

    @staticmethod
    def of(arch: str, problem: Problem, launch: Launch) -> Setup:
        """Return the setup for an architecture such as ``"sm_90a"``."""
        return Setup(problem, launch, architecture_number(arch) >= 89)


def launch_convert(setup: Setup, operand: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
    """Launch the conversion of an operand; called by a launcher.

    Parameters
    ----------
    operand
        As for :func:`build`; lines and matrices at multiples of 16 bytes.
    out
        What :func:`converted_matrices` returns.
    """
    how, lined = setup.launch, by_line(operand, setup.problem.major)
    lines, length, batches = lined.shape
    spans, tiles = cute.ceil_div(length, how.span), cute.ceil_div(lines, how.lines)
    divisors = [cute.fast_divmod_create_divisor_v2(number) for number in (spans, tiles)]
    convert_kernel(setup, lined, by_line(out, setup.problem.major), *divisors).launch(
        grid=(spans * tiles * batches, 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


def converted_matrices(problem: Problem, operand: cute.Tensor, workspace: cute.Tensor) -> cute.Tensor:
    """Return a workspace as the bf16 matrices that ``operand``, (R, C, L), becomes: R rows, C columns for each part.

    ``workspace``: bf16, of the shape that :func:`fe_gemm.planning.convert.workspace_shape` returns, contiguous.
    """
    rows, columns, batches = operand.shape
    return workspace_matrices(workspace, (rows, columns * len(problem.parts), batches), problem.major)


@cute.kernel
def convert_kernel(
    setup: cutlass.Constexpr[Setup],
    operand: cute.Tensor,
    out: cute.Tensor,
    spans: cute.FastDivmodDivisorV2,
    tiles: cute.FastDivmodDivisorV2,
) -> None:
    """Load all of a thread's vectors, then convert and store; (lines, length, batches) in and out."""
    share = Share.of(setup.launch, operand.shape, spans, tiles)
    vectors = _load(setup, operand, share)
    for number in cutlass.range_constexpr(setup.launch.repeats):
        for part, values in enumerate(_parts(setup, vectors[number])):
            _store(values, _place(setup, out, share, number, part), share.exists[number])


@dataclass(frozen=True, slots=True)
class Share:
    """Which vectors are a thread's: in each line number ``index`` of ``count``, if it ``exists``."""

    lines: list[Int32]
    exists: list[Boolean]
    index: Int32
    batch: Int32
    of_lines: Int32
    count: Int32

    @staticmethod
    def of(how: Launch, shape: tuple[Any, Any, Any], spans: Any, tiles: Any) -> Share:
        """Return the share of the calling thread in (lines, length, batches)."""
        of_lines, length, _ = shape
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rest, span = divmod(block, spans)
        batch, tile = divmod(rest, tiles)
        group, lane = divided(thread, how.across)
        first = tile * how.lines + group
        lines = [first + repeat * how.groups for repeat in range(how.repeats)]
        index, (count, _) = span * how.across + lane, divided(length, how.vector)
        exists = [(index < count) & (line < of_lines) for line in lines]
        return Share(lines, exists, index, batch, of_lines, count)


@cute.jit
def _load(setup: cutlass.Constexpr[Setup], operand: cute.Tensor, share: Share) -> list[cute.Tensor]:
    """Load a thread's vectors. Those that do not exist are anything."""
    dtype, size = operand.element_type, setup.launch.vector
    atom = load_atom(dtype, access_bits(dtype, size, ALIGNMENT))
    found = []
    for line, exists in zip(share.lines, share.exists, strict=True):
        values = cute.make_rmem_tensor((size,), dtype)
        if exists:
            cute.copy(atom, cute.local_tile(operand[line, None, share.batch], (size,), (share.index,)), values)
        found.append(values)
    return found


def _place(setup: Setup, out: cute.Tensor, share: Share, number: int, part: int) -> cute.Tensor:
    """Return where a part of a vector is stored: the parts follow each other along K."""
    line, index = share.lines[number], share.index
    if setup.problem.major == "k":
        index = index + share.count * part
    else:
        line = line + share.of_lines * part
    return cute.local_tile(out[line, None, share.batch], (setup.launch.vector,), (index,))


@cute.jit
def _store(words: list[Int32], place: cute.Tensor, exists: Boolean) -> None:
    """Store a vector of bf16 if its place exists."""
    values = cute.make_rmem_tensor(place.shape, BFloat16)
    target = cute.recast_tensor(values, Int32)
    for i, word in enumerate(words):
        target[i] = word
    if exists:
        cute.copy(store_atom(BFloat16, access_bits(BFloat16, cute.size(place.shape), ALIGNMENT)), values, place)


def _parts(setup: Setup, vector: cute.Tensor) -> list[list[Int32]]:
    """Return the parts of a vector, each as words of two bf16."""
    if setup.problem.dtype == "float32":
        made = _split([vector[i] for i in range(setup.launch.vector)])
        return [made[part] for part in setup.problem.parts]
    codes = cute.recast_tensor(vector, Int32)
    words = [codes[i] for i in range(setup.launch.vector // 4)]
    if setup.problem.dtype == "float8_e5m2":
        return [[pair for word in words for pair in e5m2_to_bf16(word)]]
    return [[pair for word in words for pair in e4m3_to_bf16(word, setup.hardware)]]


_SIGN, _INFINITY = -0x80000000, 0x7F800000
_LARGEST, _SMALLEST = 0x7F7F0000, 0x00010000
"""Among the bits of a float32: its sign; infinity; the largest finite value of bf16 and the smallest above zero."""


def _split(values: list[Float32]) -> dict[str, list[Int32]]:
    """Return head, plain head and tail of float32 values, each as words of two bf16."""
    bits = [value.bitcast(Int32) for value in values]
    sizes = [word & ~_SIGN for word in bits]
    # All bits for a finite number that is not zero, none for others.
    ordinary = [-Int32((size > 0) & (size < _INFINITY)) for size in sizes]
    near = [cutlass.min(cutlass.max(size, Int32(_SMALLEST)), Int32(_LARGEST)) for size in sizes]
    near = [((n | word & _SIGN) & keep) | (word & ~keep) for n, word, keep in zip(near, bits, ordinary, strict=True)]
    heads = _rounded([word.bitcast(Float32) for word in near])
    rounded = [head for word in heads for head in bf16_values(word)]
    rests = [value - head for value, head in zip(values, rounded, strict=True)]
    rests = [(rest.bitcast(Int32) & keep).bitcast(Float32) for rest, keep in zip(rests, ordinary, strict=True)]
    kept = [Int32(cute.arch.prmt(low, high, 0x5410)) for low, high in zip(ordinary[::2], ordinary[1::2], strict=True)]
    plain = [word & keep for word, keep in zip(heads, kept, strict=True)]
    return {"head": heads, "plain_head": plain, "tail": _rounded(rests)}


def _rounded(values: list[Float32]) -> list[Int32]:
    """Return the nearest bf16 values, two to a word."""
    return [bf16_word(low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def fake_arguments(problem: Problem) -> tuple[Any, ...]:
    """Return stand-ins for operand and workspace."""
    dtype = storage(problem.dtype)
    rows, columns, batches = (cute.sym_int() for _ in range(3))
    line, matrix = (cute.sym_int64(divisibility=8 * ALIGNMENT // dtype.width) for _ in range(2))
    stride = (line, 1, matrix) if problem.major == "k" else (1, line, matrix)
    operand = cute.runtime.make_fake_tensor(dtype, (rows, columns, batches), stride, assumed_align=ALIGNMENT)
    shape = (cute.sym_int64(), cute.sym_int(divisibility=8 * ALIGNMENT // BFloat16.width))
    workspace = cute.runtime.make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=ALIGNMENT)
    return operand, workspace


convert_kernel.set_name_prefix("fe_gemm_convert", remove_cutlass_symbol=True, keep_mangled_name=False)
