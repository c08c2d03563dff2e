"""The gradient dX of a product whose SwiGLU and which itself go on, in one pass over memory.

With up and gate of each 64 columns of AB12 and ``s = sigmoid(gate)``: ``dup = dC * (gate * s)``,
``dgate = dC * up * (s * (1 + gate * (1 - s)))``, plus dAB12 where there is one; in float32, rounded once.

Every value is read and written once: of 16 bits, 10 bytes for each column of up with that of gate, 14 with dAB12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from fe_gemm.planning.swiglu_backward import BLOCK, Launch, Problem, split_pass_config
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.convert import e4m3_to_bf16, e5m2_to_bf16
from fe_runtime.cute.memory import access_bits, load_atom, store_atom
from fe_runtime.cute.rounding import bf16_values
from fe_runtime.cute.types import architecture_number, numeric, storage

__all__ = ["Setup", "build", "fake_workspace", "launch_gradient", "workspace_matrices"]

ALIGNMENT = 16
"""Bytes of which the start of every line of a matrix is a multiple."""


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: dc (M, N/2, L), dab12 (M, N, L)?, ab12, workspace, stream.

    ``config`` is what :func:`fe_gemm.planning.swiglu_backward.pass_config` returns.
    """
    setup = Setup.of(arch, *split_pass_config(config))

    @cute.jit
    def swiglu_gradient(*arguments: Any) -> None:
        _launch(setup, *arguments)

    return swiglu_gradient, tuple(_fake_arguments(setup.problem))


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is static in a compilation; ``hardware``: the architecture converts e4m3."""

    problem: Problem
    launch: Launch
    hardware: bool

    @staticmethod
    def of(arch: str, problem: Problem, launch: Launch) -> Setup:
        """Return the setup for an architecture such as ``"sm_90a"``."""
        return Setup(problem, launch, architecture_number(arch) >= 89)


def _launch(setup: Setup, dc: cute.Tensor, *others: Any) -> None:
    *dab12, ab12, workspace, stream = others
    dx = workspace_matrices(setup.problem, ab12.shape, workspace)
    launch_gradient(setup, dc, dab12[0] if dab12 else None, ab12, dx, stream)


def launch_gradient(
    setup: Setup, dc: cute.Tensor, dab12: cute.Tensor | None, ab12: cute.Tensor, dx: cute.Tensor, stream: Any
) -> None:
    """Launch the pass; called by a launcher.

    All arrays are matrices (M, N, L), of dC (M, N / 2, L); lines and matrices start at multiples of 16 bytes, and the
    strides are known to.
    """
    problem, how = setup.problem, setup.launch
    rows, columns, batches = dc.shape
    lines, length = (rows, columns) if problem.major == "n" else (columns, rows)
    vectors = length // how.vector
    divisors = [cute.fast_divmod_create_divisor_v2(number) for number in (vectors, lines)]
    swiglu_gradient_kernel(setup, dc, dab12, ab12, dx, *divisors).launch(
        grid=(cute.ceil_div(vectors * lines * batches, how.threads), 1, 1),
        block=(how.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=how.blocks_per_sm,
        preferred_smem_carveout=-1,  # the driver's choice; without it the compiler would ask a GPU
    )


def workspace_matrices(problem: Problem, shape: tuple[Any, Any, Any], workspace: cute.Tensor) -> cute.Tensor:
    """Return a workspace (:func:`~fe_gemm.planning.swiglu_backward.workspace_shape`) as matrices of ``shape``."""
    rows, columns, _ = shape
    step = 8 * ALIGNMENT // workspace.element_type.width
    lines, length = (rows, columns) if problem.major == "n" else (columns, rows)
    line, matrix = (cute.assume(Int64(length) * count, divby=step) for count in (1, Int64(lines)))
    stride = (line, 1, matrix) if problem.major == "n" else (1, line, matrix)
    return cute.make_tensor(workspace.iterator, cute.make_layout(shape, stride=stride))


@cute.kernel
def swiglu_gradient_kernel(
    setup: cutlass.Constexpr[Setup],
    dc: cute.Tensor,
    dab12: cute.Tensor | None,
    ab12: cute.Tensor,
    dx: cute.Tensor,
    vectors: cute.FastDivmodDivisorV2,
    lines: cute.FastDivmodDivisorV2,
) -> None:
    """Treat a vector of up and one of gate."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rest, vector = divmod(block * setup.launch.threads + thread, vectors)
    batch, line = divmod(rest, lines)
    if batch < dc.shape[2]:
        at = Places.of(setup, line, vector, batch)
        at.treat(setup, dc, dab12, ab12, dx)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a vector lies: in line ``line`` of a matrix of the problem's major, number ``vector`` there."""

    line: Int32
    vector: Int32
    batch: Int32

    def load(self, setup: Setup, array: cute.Tensor, element: str, major: str) -> list[Float32]:
        """Return the values of an array of a dtype and either major in float32."""
        dtype, size = array.element_type, setup.launch.vector
        values, source = cute.make_rmem_tensor((size,), dtype), self._in(setup, array)
        if major == setup.problem.major:
            cute.copy(load_atom(dtype, access_bits(dtype, size, ALIGNMENT)), source, values)
        else:
            for i in range(size):
                values[i] = source[i]
        return _decoded(values, element, setup.hardware)

    def store(self, setup: Setup, values: list[Float32], array: cute.Tensor) -> None:
        """Round the values and store them."""
        dtype, size = array.element_type, setup.launch.vector
        wide = cute.make_rmem_tensor((size,), Float32)
        for i, value in enumerate(values):
            wide[i] = value
        rounded = cute.make_rmem_tensor((size,), dtype)
        rounded.store(wide.load().to(dtype))
        cute.copy(store_atom(dtype, access_bits(dtype, size, ALIGNMENT)), rounded, self._in(setup, array))

    def _in(self, setup: Setup, array: cute.Tensor) -> cute.Tensor:
        at = (self.line, None, self.batch) if setup.problem.major == "n" else (None, self.line, self.batch)
        return cute.local_tile(array[at], (setup.launch.vector,), (self.vector,))


@dataclass(frozen=True, slots=True)
class Places:
    """The places of dC, and of up and gate in matrices with their columns in blocks."""

    c: Place
    up: Place
    gate: Place

    @staticmethod
    def of(setup: Setup, line: Int32, vector: Int32, batch: Int32) -> Places:
        """Return the places that belong to a vector of dC."""
        here = Place(line, vector, batch)
        if setup.problem.major == "n":
            count = BLOCK // setup.launch.vector
            up = vector // count * (2 * count) + vector % count
            return Places(here, *(Place(line, index, batch) for index in (up, up + count)))
        up = line // BLOCK * (2 * BLOCK) + line % BLOCK
        return Places(here, *(Place(column, vector, batch) for column in (up, up + BLOCK)))

    def treat(
        self, setup: Setup, dc: cute.Tensor, dab12: cute.Tensor | None, ab12: cute.Tensor, dx: cute.Tensor
    ) -> None:
        """Load what is given, all of it before the first result is needed; store dX."""
        how = setup.problem
        given = self.c.load(setup, dc, how.dc_dtype, how.major)
        places = (self.up, self.gate)
        up, gate = (place.load(setup, ab12, how.ab12_dtype, how.ab12_major) for place in places)
        more = [] if dab12 is None else [place.load(setup, dab12, how.dab12_dtype, how.dab12_major) for place in places]
        pairs = [_gradients(*values) for values in zip(given, up, gate, strict=True)]
        for number, place in enumerate(places):
            values = [pair[number] for pair in pairs]
            if more:
                values = [x + y for x, y in zip(values, more[number], strict=True)]
            place.store(setup, values, dx)


def _gradients(dc: Float32, up: Float32, gate: Float32) -> tuple[Float32, Float32]:
    """Return dup and dgate; the error of sigmoid and of one minus it is that of two approximate instructions."""
    decay = cute.math.exp2(cute.math.absf(gate) * Float32(_MINUS_LOG2_E), approx=True, ftz=True)
    larger = cute.math.rcp(decay + Float32(1.0), approx=True, ftz=True)
    smaller = decay * larger
    positive = gate >= Float32(0.0)
    s = Float32(cutlass.select_(positive, larger, smaller))
    rest = Float32(cutlass.select_(positive, smaller, larger))  # 1 - s without cancellation
    return dc * (gate * s), dc * up * (s * (Float32(1.0) + gate * rest))


_MINUS_LOG2_E = -1.4426950408889634


def _decoded(values: cute.Tensor, element: str, hardware: bool) -> list[Float32]:
    """Return registers of a dtype in float32; exact."""
    size = cute.size(values.shape)
    if storage(element) is not Uint8:  # the registers may say Int8: views of an array forget the sign
        wide = cute.make_rmem_tensor((size,), Float32)
        wide.store(values.load().to(Float32))
        return [wide[i] for i in range(size)]
    words = cute.recast_tensor(values, Int32)
    found = []
    for i in range(size // 4):
        pairs = e4m3_to_bf16(words[i], hardware) if element == "float8_e4m3fn" else e5m2_to_bf16(words[i])
        found += [value for pair in pairs for value in bf16_values(pair)]
    return found


def _fake_arguments(problem: Problem) -> list[Any]:
    known = [(problem.dc_dtype, problem.major)]
    if problem.dab12_dtype is not None:
        known.append((problem.dab12_dtype, problem.dab12_major))
    known.append((problem.ab12_dtype, problem.ab12_major))
    return [*(fake_matrices(*one) for one in known), fake_workspace(problem), fake_stream()]


def fake_matrices(dtype: str, major: str) -> cute.Tensor:
    """Return a stand-in for matrices of any aligned strides."""
    element = storage(dtype)
    shape = tuple(cute.sym_int() for _ in range(3))
    line, matrix = (cute.sym_int64(divisibility=8 * ALIGNMENT // element.width) for _ in range(2))
    stride = (line, 1, matrix) if major == "n" else (1, line, matrix)
    return cute.runtime.make_fake_tensor(element, shape, stride, assumed_align=ALIGNMENT)


def fake_workspace(problem: Problem) -> cute.Tensor:
    """Return a stand-in for the workspace."""
    dtype = numeric(problem.dtype)
    shape = (cute.sym_int64(), cute.sym_int(divisibility=8 * ALIGNMENT // dtype.width))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=ALIGNMENT)


swiglu_gradient_kernel.set_name_prefix("fe_gemm_swiglu_gradient", remove_cutlass_symbol=True, keep_mangled_name=False)
