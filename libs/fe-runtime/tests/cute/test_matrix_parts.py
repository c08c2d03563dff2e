"""What the building blocks of matrix products compute with plain integers: rings, swizzled places, fragments."""

from __future__ import annotations

import pytest

cutlass = pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_runtime.cute.pipeline import Position  # noqa: E402
from fe_runtime.cute.tma import SWIZZLE_BYTES, swizzled_offset  # noqa: E402
from fe_runtime.cute.wgmma import ROWS, WARP_GROUP, fragment_column, fragment_row  # noqa: E402


def place(position: Position) -> tuple[int, int]:
    return tuple(int(getattr(x, "value", x)) for x in (position.slot, position.parity))  # type: ignore[return-value]


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize("start", [Position.of_producer, Position.of_reader])
def test_a_position_goes_round_the_ring_and_flips_its_parity(start: object, slots: int) -> None:
    """The n-th use of a slot waits for phase n (a reader) or n - 1 (a producer)."""
    position = start(slots)  # type: ignore[operator]
    behind = 1 if start == Position.of_producer else 0
    for step in range(4 * slots + 1):
        assert place(position) == (step % slots, (step // slots - behind) & 1)
        position = position.next()


@pytest.mark.parametrize("slots", [1, 3, 4])
@pytest.mark.parametrize("steps", [0, 1, 5, 12, 35])
def test_going_ahead_is_going_step_by_step(slots: int, steps: int) -> None:
    start = Position.of_reader(slots).next()
    walked = start
    for _ in range(steps):
        walked = walked.next()
    assert place(start.ahead(cutlass.Int32(steps))) == place(walked)


def test_swizzled_pieces_fill_the_rows() -> None:
    offsets = [swizzled_offset(row, piece) for row in range(16) for piece in range(8)]
    assert sorted(offsets) == list(range(0, 16 * SWIZZLE_BYTES, 16))
    assert all(swizzled_offset(row, piece) // SWIZZLE_BYTES == row for row in range(16) for piece in range(8))


@pytest.mark.parametrize("piece", range(8))
def test_eight_rows_at_one_piece_touch_all_banks(piece: int) -> None:
    assert {swizzled_offset(row, piece) % 128 for row in range(8)} == set(range(0, 128, 16))


def test_each_accumulator_has_one_owner() -> None:
    owned = [
        (fragment_row(thread) + 8 * half, fragment_column(thread) + side)
        for thread in range(WARP_GROUP)
        for half in range(2)
        for side in range(2)
    ]
    assert sorted(owned) == [(row, column) for row in range(ROWS) for column in range(8)]
