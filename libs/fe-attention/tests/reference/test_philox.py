"""The random numbers of dropout, against published answers and an independent formula on Python integers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fe_attention.reference.philox import keep, keep_factor, philox, threshold

WORD = 0xFFFFFFFF
FRAMEWORKS = ("numpy", "torch", "jax")


def words_of(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & WORD, p0 >> 32 ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return tuple(c)


def one(value: int, framework: str) -> Any:
    if framework == "torch":
        return torch.tensor([value])
    return (jnp if framework == "jax" else np).asarray([value], dtype=np.uint32)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("counter", "seed", "answer"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((3, 5, 1, 0), 2**40 + 12345, "035341a2 02f0a989 323d65d0 bcca5ba9"),
        ((7, 0, 0, 0), -2, "27f2f13d 92a4fc55 d0b800eb 04020acd"),
    ],
)
def test_known_answers(framework: str, counter: tuple[int, ...], seed: int, answer: str) -> None:
    key = (seed & WORD, seed >> 32 & WORD)
    words = philox(tuple(one(value, framework) for value in counter), key)  # type: ignore[arg-type]
    assert " ".join(f"{int(word[0]):08x}" for word in words) == answer
    assert " ".join(f"{word:08x}" for word in words_of(counter, key)) == answer


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_mask_is_the_words_of_row_and_column(seed: int) -> None:
    rows, columns, plane, p = 9, 24, 2, 0.3
    kept = keep(np.empty((rows, columns)), plane, seed, p)
    for row in range(rows):
        for column in range(columns):
            word = words_of((row, column // 4, plane, 0), (seed & WORD, (seed >> 32) & WORD))[column % 4]
            assert kept[row, column] == (np.float32(np.float32(word) * 2.0**-32) > np.float32(p))


def test_frameworks_agree() -> None:
    makers = {"numpy": np.zeros, "torch": torch.zeros, "jax": jnp.zeros}
    masks = [np.asarray(keep(makers[name]((37, 40)), 1, -987654321, 0.4)) for name in FRAMEWORKS]
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])


@pytest.mark.parametrize(("p", "answer"), [(0.1, 0x199999B0), (0.2, 0x33333360), (0.5, 0x80000081)])
def test_thresholds_of_the_contract(p: float, answer: int) -> None:
    assert threshold(p) == answer


def test_threshold_is_the_first_word_above_p() -> None:
    rng = np.random.default_rng(0)
    edges = [2.0**-k for k in range(1, 40)] + [1e-45, 1e-38, 1 - 2.0**-24, 1 - 2.0**-23, 3 * 2.0**-9, 0.9999999]
    for p in [*edges, *rng.uniform(size=500), *10 ** rng.uniform(-12, 0, size=500)]:
        p32 = np.float32(p)
        first = threshold(float(p))

        def above(word: int, p32: Any = p32) -> bool:
            return bool(np.float32(np.float32(np.uint32(word)) * np.float32(2.0**-32)) > p32)

        assert 0 < first <= WORD
        assert above(first), p
        assert not above(first - 1), p


def test_share_that_is_kept() -> None:
    kept = keep(np.empty((1000, 64)), 0, 42, 0.25)
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / kept.size)


def test_factor_is_rounded_to_float32_at_each_step() -> None:
    assert keep_factor(0.5) == 2.0
    assert keep_factor(0.1) == float(np.float32(1) / np.float32(np.float32(1) - np.float32(0.1)))
    assert keep_factor(1 - 2.0**-24) == 2.0**24
