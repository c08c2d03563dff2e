from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fe_runtime import formats


def test_e8m0_up_on_every_exponent(framework: Any, model: Any) -> None:
    exponents = np.arange(255, dtype=np.int64)[:, None]
    patterns = (exponents << 23 | np.array([0, 1, 0x400000, 0x400001, 0x7FFFFF])).astype(np.uint32)
    v = patterns.view(np.float32)
    want = [[model.e8m0_up(Fraction(float(x))) for x in row] for row in v]
    assert framework.call(formats.e8m0_up, v).tolist() == want


def test_e8m0_up_specials(framework: Any) -> None:
    v = np.array([0.0, -0.0, np.inf, np.nan, 2.0**-149, 2.0**-127, 3.4028235e38], np.float32)
    assert framework.call(formats.e8m0_up, v).tolist() == [0, 0, 254, 255, 0, 0, 254]


def test_e8m0_inv(framework: Any) -> None:
    got = framework.call(formats.e8m0_inv, np.arange(256, dtype=np.uint8))
    assert got.dtype == np.float32
    assert got[:254].tolist() == [2.0 ** (127 - byte) for byte in range(254)]
    assert got[254] == 0
    assert np.isnan(got[255])


def test_e8m0_inv_takes_every_form_of_a_byte(framework: Any) -> None:
    byte = np.array([127, 254], np.uint8)
    typed = formats.typed_view(framework.array(byte), "float8_e8m0fnu")
    assert framework.numpy(formats.e8m0_inv(typed)).tolist() == [1.0, 0.0]
    signed = framework.array(byte.view(np.int8))
    assert framework.numpy(formats.e8m0_inv(signed)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 1)])
def test_shapes(framework: Any, shape: tuple[int, ...]) -> None:
    byte = framework.call(formats.e8m0_up, np.ones(shape, np.float32))
    assert (byte.shape, byte.dtype) == (shape, np.uint8)
    assert framework.call(formats.e8m0_inv, byte).shape == shape


@pytest.mark.parametrize("limit", [448.0, 57344.0, 6.0])
def test_reciprocal_and_division_give_the_same_byte(limit: float) -> None:
    # Over all mantissas; and the scaled block maximum never passes the limit.
    a = (np.arange(2**23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    byte = formats.e8m0_up(a * np.float32(1 / np.float32(limit)))
    np.testing.assert_array_equal(byte, formats.e8m0_up(a / np.float32(limit)))
    assert (a * formats.e8m0_inv(byte) <= limit).all()
