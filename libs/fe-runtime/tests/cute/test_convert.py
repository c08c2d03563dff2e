"""Conversions that are integer arithmetic and byte permutations, run on the CPU over all codes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_runtime.cute import convert

RNG = np.random.default_rng(0)


def prmt(low: int, high: int, selection: int) -> int:
    """Each nibble of the selection chooses a byte of eight; its top bit asks for the byte's sign, eight times."""
    eight = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    word = 0
    for place in range(4):
        nibble = selection >> 4 * place & 15
        byte = eight >> 8 * (nibble & 7) & 0xFF
        word |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * place
    return word


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "Int32", lambda word: (word + 2**31) % 2**32 - 2**31)
    monkeypatch.setattr(convert, "cute", SimpleNamespace(arch=SimpleNamespace(prmt=prmt)))


def bf16(words: Any) -> np.ndarray[Any, Any]:
    return np.array([word & 0xFFFFFFFF for word in words], np.uint32).view(ml_dtypes.bfloat16).astype(np.float32)


def test_e2m1_in_every_place() -> None:
    for _ in range(200):
        codes = RNG.integers(0, 16, 8).astype(np.uint8)
        word = sum(int(code) << 4 * place for place, code in enumerate(codes))
        want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        got = bf16(convert.e2m1_to_bf16(word))
        assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist(), codes


def test_unordered_e2m1_in_every_place() -> None:
    for _ in range(200):
        codes = RNG.integers(0, 16, 8).astype(np.uint8)
        word = sum(int(code) << 4 * place for place, code in enumerate(codes))
        want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.float32(2.0**-126)
        got = bf16(convert.e2m1_unordered(word)).reshape(4, 2).T.reshape(8)
        assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist(), codes


@pytest.mark.parametrize("place", range(4))
def test_e8m0_in_every_place(place: int) -> None:
    for code in range(256):
        codes = RNG.integers(0, 256, 4).astype(np.uint8)
        codes[place] = code
        (word,) = codes.view(np.int32).tolist()
        np.testing.assert_array_equal(
            bf16(convert.e8m0_to_bf16(word)), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        )


def test_byte_of_each() -> None:
    words = [0x03020100, 0x13121110, 0x23222120, -0x0C0D0E10]
    assert convert.byte_of_each(words, 2) == (0xF2221202 + 2**31) % 2**32 - 2**31


def test_e2m1_as_e4m3() -> None:
    """Eight codes in a word, in every place: 2^-6 of their values, those with even numbers first."""
    for first in range(16):
        codes = [(first + i) % 16 for i in range(8)]
        word = sum(code << 4 * i for i, code in enumerate(codes))
        even, odd = convert.e2m1_as_e4m3(word)
        found = np.array([even & 0xFFFFFFFF, odd & 0xFFFFFFFF], np.uint32).view(ml_dtypes.float8_e4m3fn)
        want = np.array([*codes[0::2], *codes[1::2]], np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        assert (found.astype(np.float32) * 64 == want).all()
        assert (np.signbit(found.astype(np.float32)) == np.signbit(want)).all()
