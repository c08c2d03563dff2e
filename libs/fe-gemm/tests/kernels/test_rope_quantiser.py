"""What a warp group does with its accumulators, run with arrays of 128 threads in place of registers.

The code of the kernel is executed as it is; only what it calls of the kernel language stands for the same operation on
arrays. So the trades between threads, the places in shared and global memory and the arithmetic are those of the GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import naive_proj_rope as naive
import numpy as np
import pytest
from naive_gemm import E4M3, encode

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_gemm.kernels.sm90 import rope_quantiser, rope_values
from fe_gemm.kernels.sm90.parts import Tile
from fe_gemm.kernels.sm90.rope_quantiser import RopeQuantiser

THREADS = np.arange(128)
BITS = {"Int32": np.int32, "Float32": np.float32, "Int64": np.int64, "Uint16": np.uint16}


class Lanes:
    """A register of every thread of a warp group; a number for each, of the dtype of the kernel's type."""

    def __init__(self, values: Any, dtype: Any = np.int32) -> None:
        self.values = np.broadcast_to(np.asarray(values), THREADS.shape).astype(dtype)

    def bitcast(self, kind: Any) -> Lanes:
        return kind(self.values.view(kind.dtype))

    def __neg__(self) -> Lanes:
        return type(self)(-self.values)

    def _with(self, other: Any, operation: Any) -> Lanes:
        other = other.values if isinstance(other, Lanes) else np.asarray(other, self.values.dtype)
        return type(self)(operation(self.values, other))

    def _compared(self, other: Any, operation: Any) -> Truth:
        return Truth(operation(self.values, other.values if isinstance(other, Lanes) else other))


class Truth:
    def __init__(self, values: Any) -> None:
        self.values = np.broadcast_to(np.asarray(values, bool), THREADS.shape)

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.values & other.values)


def kind(dtype: Any) -> Any:
    def create(self: Any, value: Any) -> None:
        Lanes.__init__(self, value.values if isinstance(value, Lanes) else value, dtype)

    return type(
        np.dtype(dtype).name, (Lanes,), {"__init__": create, "dtype": dtype, "width": 8 * np.dtype(dtype).itemsize}
    )


OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
}
for name, operation in OPERATORS.items():
    setattr(Lanes, f"__{name}__", lambda a, b, do=operation: a._with(b, do))
    setattr(Lanes, f"__r{name}__", lambda a, b, do=operation: a._with(b, lambda x, y, do=do: do(y, x)))
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}.get(
        name, np.greater_equal
    )
    setattr(Lanes, f"__{name}__", lambda a, b, do=compare: a._compared(b, do))
KINDS = {name: kind(dtype) for name, dtype in BITS.items()}
INT, FLOAT, SHORT = KINDS["Int32"], KINDS["Float32"], KINDS["Uint16"]


class Memory:
    """Bytes, counted from the address 0."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xEE, np.uint8)

    def write(self, addresses: Any, values: Any) -> None:
        size = values.dtype.itemsize
        for i in range(size):
            self.bytes[addresses + i] = values.view(np.uint8).reshape(-1, size)[:, i]

    def read(self, addresses: Any, dtype: Any) -> Any:
        size = np.dtype(dtype).itemsize
        found = np.stack([self.bytes[addresses + i] for i in range(size)], axis=-1)
        return np.ascontiguousarray(found).view(dtype)[:, 0]


class Region:
    """A tensor in memory, of which the kernel asks the address and the extents only."""

    def __init__(self, start: int, shape: tuple[int, ...], steps: tuple[int, ...] = ()) -> None:
        self.shape, self._steps, self._start = shape, steps, start
        self.iterator = SimpleNamespace(toint=lambda: INT(start))

    def __getitem__(self, at: Any) -> Region:
        indices = [INT(0) if i is None else i for i in at]
        start = sum((INT(i) * step for i, step in zip(indices, self._steps, strict=True)), INT(self._start))
        found = Region(0, self.shape)
        found.iterator = SimpleNamespace(toint=lambda: start)
        return found


class Entries(dict[Any, Any]):
    """Registers (words, pieces, tokens), of which a token's can be taken out."""

    def __getitem__(self, at: Any) -> Any:
        if at[0] is not None:
            return super().__getitem__(at)
        parts = self

        class Part:
            def __setitem__(self, place: tuple[int, int], value: Any) -> None:
                parts[(*place, at[2])] = value

        return Part()


class Emulation:
    """One warp group of a block, its shared memory, and the arrays in global memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int, cos: Any, sin: Any) -> None:
        features = 192 * heads
        self.shared, self.row_scales, self.column_scales = (
            Memory(2 * 2 * 64 * 192 + 2 * 8 * 768),
            np.full((tokens, 6 * heads), 0xEE, np.uint8),
            np.full((tokens // 32, features), 0xEE, np.uint8),
        )
        codes = Region(0, (64, 192, 2, 2), (192, 1, 64 * 192, 2 * 64 * 192))
        numbers = [Region(4 * 64 * 192 + i * 8 * 768, (192, 8)) for i in range(2)]
        sheets = SimpleNamespace(row_scales=self.row_scales, column_scales=self.column_scales)
        self._view = lambda group: RopeQuantiser(
            sheets,
            SimpleNamespace(load=lambda entries, token, quarter: self._load(cos, sin, entries, token, quarter)),
            SimpleNamespace(codes=codes, maxima=numbers[0], factors=numbers[1]),
            (),
            (),
            Entries(),
            INT(group),
            INT(THREADS),
        )
        self._patch(monkeypatch)

    def finish(self, y: Any, row: int, column: int, group: int) -> tuple[Any, Any]:
        """Finish accumulators (64, 192); return the staged codes of both directions."""
        first = THREADS // 32 * 16 + THREADS % 32 // 4

        class Accumulator:
            def __getitem__(self, at: Any) -> Any:
                (side, half, block), _, _ = at
                return FLOAT(y[first + 8 * half, 8 * block + THREADS % 4 * 2 + side])

        view = self._view(group)
        tile = Tile(INT(64 * row), INT(column), INT(0), None, None)
        view.begin(tile)
        view.finish(Accumulator(), tile)
        staged = self.shared.bytes[: 4 * 64 * 192].reshape(2, 2, 64, 192)[group]
        return staged[0].copy(), staged[1].copy()

    def _load(self, cos: Any, sin: Any, entries: Any, token: Lanes, quarter: Lanes) -> None:
        rows = np.minimum(token.values, cos.shape[0] - 1)
        for piece, table in enumerate((cos, sin, cos, sin)):
            for word in range(4):
                start = 32 * (piece // 2) + 8 * quarter.values + 2 * word
                pair = np.ascontiguousarray(table[rows[:, None], start[:, None] + [0, 1]])
                entries[word, piece] = INT(pair.view(np.int32)[:, 0])

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unite(a: Any, b: Any, order: int) -> Any:
            both = np.stack([a.values, b.values], axis=-1).view(np.uint8).reshape(-1, 8)
            picked = both[:, [order >> 4 * i & 7 for i in range(4)]]
            return INT(np.ascontiguousarray(picked).view(np.int32)[:, 0])

        def reduce(value: Any, join: Any, threads_in_group: int) -> Any:
            for distance in [d for d in (1, 2, 4, 8, 16) if d < threads_in_group]:
                value = join(value, swap(value, distance))
            return value

        def swap(value: Any, distance: int) -> Any:
            return type(value)(value.values[THREADS ^ distance])

        arch = SimpleNamespace(
            shuffle_sync_bfly=swap,
            fmax=lambda a, b: FLOAT(np.fmax(a.values, b.values)),
            prmt=unite,
            warp_reduction=reduce,
            sync_warp=lambda: None,
        )
        math = SimpleNamespace(absf=lambda a: FLOAT(np.abs(a.values)))
        replaced: dict[str, Any] = {
            **KINDS,
            "cute": SimpleNamespace(arch=arch, math=math),
            "cutlass": SimpleNamespace(min=lambda a, b: a._with(b, np.minimum)),
            "mul_rn": lambda a, b: a._with(b, np.multiply),
            "fma_rn": lambda a, b, c: FLOAT(
                a.values.astype(np.float64) * b.values.astype(np.float64) + c.values.astype(np.float64)
            ),
            "bf16_word": lambda a, b: INT(
                np.stack([a.values, b.values], axis=-1).astype(naive.BF16).view(np.int32)[:, 0]
            ),
            "bf16_values": lambda word: (
                INT(word.values << 16).bitcast(FLOAT),
                INT(word.values & -0x10000).bitcast(FLOAT),
            ),
            "e4m3_pair": lambda a, b, _: SHORT(encode(a.values, E4M3) | encode(b.values, E4M3).astype(np.uint16) << 8),
            "chosen": lambda condition, a, b: type(a)(np.where(condition.values, a.values, b.values)),
            "larger_pair": self._larger_pair,
            "_store_shared": self._store_shared,
            "_read_run": self._read_run,
            "_store_bytes": self._store_bytes,
        }
        for module in (rope_quantiser, rope_values):
            for name in replaced.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, replaced[name])
        for name in ("_wait_for_buffers", "_hand_over"):
            monkeypatch.setattr(RopeQuantiser, name, lambda *_: None)

    @staticmethod
    def _larger_pair(a: Lanes, b: Lanes) -> Lanes:
        halves = [x.values.view(np.int16).view(naive.BF16).astype(np.float32) for x in (a, b)]
        return INT(np.fmax(*halves).astype(naive.BF16).view(np.int32))

    def _store_shared(self, address: Lanes, words: list[Lanes]) -> None:
        assert not (address.values % (4 * len(words))).any(), "a vector must start at a multiple of its size"
        for i, word in enumerate(words):
            self.shared.write(address.values + 4 * i, word.values)

    def _read_run(self, array: Region, warp: Lanes, feature: Lanes, count: int) -> list[Lanes]:
        start = array.iterator.toint().values + 4 * (192 * warp.values + feature.values)
        assert not (start % (4 * min(count, 4))).any()
        return [FLOAT(self.shared.read(start + 4 * i, np.float32)) for i in range(count)]

    @staticmethod
    def _store_bytes(array: Any, exists: Truth, row: Lanes, column: Lanes, value: Lanes) -> None:
        size = value.values.dtype.itemsize
        for t in np.flatnonzero(exists.values):
            assert column.values[t] % size == 0
            assert (array[row.values[t], column.values[t] : column.values[t] + size] == 0xEE).all(), "written twice"
            array[row.values[t], column.values[t] : column.values[t] + size] = value.values[t : t + 1].view(np.uint8)


def case(tokens: int, heads: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Accumulators (tokens, 192 heads) and tables."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-6, 7, (tokens, 192 * heads)))
    y = (rng.standard_normal((tokens, 192 * heads)) * size).astype(np.float32)
    return y, *(rng.standard_normal((tokens, 64)).astype(naive.BF16) for _ in range(2))


def expected(y: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """What plain loops make of the accumulators: they are the product with one, in float64."""
    return naive.finished(y, cos.astype(np.float64), sin.astype(np.float64))


@pytest.mark.parametrize("group", [0, 1])
def test_a_warp_group_does_what_plain_loops_do(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    y, cos, sin = case(128, 2)
    y[70, 192 + 3], y[5, 192 + 150] = np.nan, np.nan
    y[:32, 192 + 40], y[64 * group + 9, 192 + 64 : 192 + 128] = 0, 0
    want = expected(y, cos, sin)
    emulation = Emulation(monkeypatch, 128, 2, cos, sin)
    tokens = slice(64 * group, 64 * group + 64)
    row, column = emulation.finish(y[tokens, 192:], group, 3, group)
    np.testing.assert_array_equal(row, want[0][tokens, 1])
    np.testing.assert_array_equal(column, want[2][tokens, 1])
    np.testing.assert_array_equal(emulation.row_scales[tokens, 6:], want[1][tokens, 1])
    np.testing.assert_array_equal(emulation.column_scales[2 * group : 2 * group + 2, 192:], want[3][2 * group :, 1][:2])
    assert (emulation.row_scales[:, :6] == 0xEE).all()
    assert (emulation.column_scales[:, :192] == 0xEE).all()


@pytest.mark.parametrize(("tokens", "row"), [(32, 0), (96, 1), (96, 0), (64, 1)])
def test_scales_beyond_the_last_token_are_not_written(tokens: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    y, cos, sin = case(128, 1, seed=tokens)
    want = expected(y, np.concatenate([cos[:tokens], cos])[:128], np.concatenate([sin[:tokens], sin])[:128])
    emulation = Emulation(monkeypatch, tokens, 1, cos[:tokens], sin[:tokens])
    emulation.finish(y[64 * row : 64 * row + 64], row, 0, 0)
    inside = slice(64 * row, min(64 * row + 64, tokens))
    np.testing.assert_array_equal(emulation.row_scales[inside], want[1][inside, 0])
    assert (np.delete(emulation.row_scales, np.arange(tokens)[inside], axis=0) == 0xEE).all()
    written = (emulation.column_scales != 0xEE).any(axis=1)
    assert written.sum() == len(range(tokens)[inside]) // 32


def test_a_head_beyond_the_last_one_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    y, cos, sin = case(64, 1)
    emulation = Emulation(monkeypatch, 64, 1, cos, sin)
    emulation.finish(y, 0, 3, 0)
    assert (emulation.row_scales == 0xEE).all()
    assert (emulation.column_scales == 0xEE).all()


def test_scales_of_every_kind_of_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least power of two from the 448th of the maximum on; at zero, where a power ends, and for subnormal ones."""
    Emulation(monkeypatch, 32, 1, *case(32, 1)[1:])
    powers = np.exp2(np.arange(-149.0, 128))
    numbers = np.concatenate([[0], powers, 448 * powers[powers < 2.0**118], [np.inf]]).astype(np.float32)
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(0))])
    for start in range(0, len(numbers), 128):
        some = np.resize(numbers[start : start + 128], 128)
        code, factor = rope_values.scale(FLOAT(some))
        for number, byte, by in zip(some, code.values, factor.values, strict=True):
            want = naive.quantised(np.array([number]))[1] if np.isfinite(number) else 254
            assert byte == want, number
            assert by == (0 if byte == 254 else 2.0 ** (127 - int(byte)))
