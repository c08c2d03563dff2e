"""What the lanes of ``mhc_projection_backward`` hold and pass to the tensor cores gives both products.

The device's own functions run here on numpy arrays of 32 lanes. The tensor cores' instructions are replaced by what
they are documented to do with the operands of a warp; a word of two bf16 values is a complex number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels import mhc_coefficients, mhc_projection_backward, warp_mma
from fe_gemm.kernels.mhc_coefficients import Coefficients
from fe_gemm.kernels.mhc_projection_backward import Place, Setup
from fe_gemm.planning.mhc import Launch, Problem

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def mma(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    """Multiply matrices and hand out the accumulators: c0, c1 in row g, c2, c3 in row g + 8."""
    full = np.zeros((16, 8))
    places = [(G, 2 * T), (G, 2 * T + 1), (G + 8, 2 * T), (G + 8, 2 * T + 1)]
    for place, part in zip(places, c, strict=True):
        full[place] = part
    full += a @ b
    return tuple(full[place] for place in places)


def mma_tf32(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    first, second = np.zeros((16, 8)), np.zeros((8, 8))
    for number, part in enumerate(a):
        first[G + 8 * (number % 2), T + 4 * (number // 2)] = part.real
    for number, part in enumerate(b):
        second[T + 4 * number, G] = part.real
    return mma(first, second, c)


def mma_bf16(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    first, second = np.zeros((16, 16)), np.zeros((16, 8))
    for number, part in enumerate(a):
        for side, value in enumerate((part.real, part.imag)):
            first[G + 8 * (number % 2), 2 * T + side + 8 * (number // 2)] = value
    for number, part in enumerate(b):
        for side, value in enumerate((part.real, part.imag)):
            second[2 * T + side + 8 * number, G] = value
    return mma(first, second, c)


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = {
        "mma_tf32": mma_tf32,
        "mma_bf16": mma_bf16,
        "tf32": lambda value: value,
        "bf16_values": lambda word: (word.real, word.imag),
        "bf16_word": lambda low, high: low + 1j * high,
        "low_halves": lambda low, high: low.real + 1j * high.real,
        "high_halves": lambda low, high: low.imag + 1j * high.imag,
        "cutlass": SimpleNamespace(min=min, select_=lambda condition, a, b: a if condition else b),
        "cute": SimpleNamespace(
            make_rmem_tensor=lambda shape, _dtype: np.zeros(shape),
            local_tile=lambda row, shape, at: row.reshape(-1)[shape[0] * at[0] :][: shape[0]],
            copy=lambda _atom, source, target: np.copyto(target, source),
        ),
        "load_atom": lambda *_what: None,
        "Float32": float,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(mhc_projection_backward, name, stub)
    monkeypatch.setattr(mhc_coefficients, "tf32", lambda value: value)
    # An uneven split into two terms, so that a lost one shows.
    monkeypatch.setattr(mhc_coefficients, "bf16_terms", lambda a, b: ((a + 1j * b) * 0.75, (a + 1j * b) * 0.25))


class Prepared:
    """The coefficients of a chunk as :class:`Coefficients` stores them, read by all lanes at once."""

    def __init__(self, problem: Problem, how: Launch, p: Any, scale: Any) -> None:
        self.words = np.zeros((4, 32, problem.tiles, 2, how.chunk // 16, 2), complex)
        self.tiles, self.scales = problem.tiles, scale
        for thread in range(how.threads):
            part = Coefficients(problem, how, thread, (), how.chunk, self.words, None)  # type: ignore[arg-type]
            for number in range(part.pairs):
                index, pair, j = part._pair(number)  # type: ignore[arg-type]
                if index < how.chunk // 2 * problem.tiles * 8:
                    values = p[2 * pair : 2 * pair + 2, j] if j < problem.coefficients else (0.0, 0.0)
                    part._store_pair(tuple(values), pair, j, 0)  # type: ignore[arg-type]

    def operands(self, buffer: int, step: int) -> Any:
        return [
            [[self.words[i, LANES, group, product, step, buffer] for i in range(4)] for group in range(self.tiles)]
            for product in range(2)
        ]

    def scale(self, buffer: int, step: int) -> Any:
        del buffer
        return [self.scales[16 * step + 2 * T + (i % 2 + 8 * (i // 2))] for i in range(4)]


@pytest.mark.parametrize("warps", [2, 4])
@pytest.mark.parametrize(("coefficients", "vector"), [(24, 8), (1, 8), (13, 8), (64, 4), (35, 4)])
def test_a_warp_computes_both_products(coefficients: int, vector: int, warps: int) -> None:
    random = np.random.default_rng(coefficients)
    columns = 8 * vector
    problem, how = Problem(coefficients, columns), Launch(vector, warps, 4, 32, 2, 1)
    setup = Setup(problem, how)
    x, w = random.standard_normal((32, columns)), random.standard_normal((coefficients, columns))
    p, scale = random.standard_normal((32, coefficients)), random.standard_normal(32)
    prepared = Prepared(problem, how, p, scale)

    column = G * vector
    shares = [
        mhc_projection_backward._weight(
            setup,
            Place(lane, lane % 4, 0, 0, 32, int(column[lane]), True),  # type: ignore[arg-type]
            w,  # type: ignore[arg-type]
        )
        for lane in range(32)
    ]
    weight = np.stack(shares, axis=-1)  # type: ignore[arg-type]
    sums = np.zeros((4, problem.tiles, setup.tiles, 32))
    place = Place(LANES, T, 0, 0, 32, column, True)  # type: ignore[arg-type]
    dx = np.full((32, columns), np.nan)
    for step in range(2):
        rows = [place.row(step, number) for number in range(4)]
        words = [[x[row, column + 2 * i] + 1j * x[row, column + 2 * i + 1] for i in range(vector // 2)] for row in rows]
        found = mhc_projection_backward._step(setup, prepared, 0, step, words, weight, sums)  # type: ignore[arg-type]
        for row, of_row in zip(rows, found, strict=True):
            for i, word in enumerate(of_row):
                dx[row, column + 2 * i], dx[row, column + 2 * i + 1] = word.real, word.imag  # type: ignore[attr-defined]
    np.testing.assert_allclose(dx, scale[:, None] * x + p @ w, rtol=1e-12, atol=1e-12)

    dweight = np.full((problem.tiles * 8, columns), np.nan)
    for group in range(problem.tiles):
        for side in range(2):
            for i, values in enumerate(mhc_projection_backward._sums_of(sums, group, side, vector)):  # type: ignore[arg-type]
                dweight[8 * group + 2 * T + side, column + i] = values
    np.testing.assert_allclose(dweight[:coefficients], p.T @ x, rtol=1e-12, atol=1e-12)
    assert (dweight[coefficients:] == 0).all()


def test_instructions_are_those_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(warp_mma.cute.arch, "inline_ptx", lambda code, **_operands: calls.append(code))
    warp_mma.mma_bf16([0] * 4, [0] * 2, [0.0] * 4)  # type: ignore[list-item]
    warp_mma.mma_tf32([0] * 4, [0] * 2, [0.0] * 4)  # type: ignore[list-item]
    operands = (
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    assert calls == [
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands}",
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {operands}",
    ]
