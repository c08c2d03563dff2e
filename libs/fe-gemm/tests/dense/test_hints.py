"""Hints that passed once are not checked again; nothing else passes with them."""

from __future__ import annotations

import pytest

from fe_gemm.dense.hints import Hints
from fe_runtime.errors import InvalidArgumentError

TILE, TALL = (128, 128), (256, 128)


def hints() -> Hints:
    return Hints("an_operation", tile_n=(64, 128), default_cluster=lambda rows: (rows // 128, 1))


@pytest.mark.parametrize("wrong", [(TALL, (1, 1)), (TILE, (3, 1)), ((64, 64), None), (TILE, None, False, 0)], ids=str)
def test_a_call_that_passed_lets_no_other_pass(wrong: tuple[object, ...]) -> None:
    known = hints()
    for right in ((TILE, None), (TALL, (2, 1)), (TILE, (1, 1))):
        known.check(*right)
        known.check(*right)
        with pytest.raises(InvalidArgumentError):
            known.check(*wrong)


def test_lists_are_checked_again_because_they_change() -> None:
    known, tile = hints(), [128, 128]
    known.check(tile, None)
    tile[0] = 64
    with pytest.raises(InvalidArgumentError):
        known.check(tile, None)


@pytest.mark.parametrize("wrong", [((128.0, 128.0), None), (TILE, None, 0), (TILE, None, False, True)], ids=str)
def test_equal_values_of_other_types_do_not_pass(wrong: tuple[object, ...]) -> None:
    known = hints()
    known.check(TILE, None, False, 1)
    with pytest.raises(TypeError):
        known.check(*wrong)
