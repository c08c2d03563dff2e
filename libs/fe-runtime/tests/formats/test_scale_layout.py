from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fe_runtime import formats
from fe_runtime.errors import InvalidArgumentError
from fe_runtime.tensor_desc import TensorDesc

EXTENTS = list(product((1, 31, 33, 128, 129, 300), (1, 3, 4, 5, 8), (1, 3)))


def plain_scales(rows: int, scales: int, batch: int) -> np.ndarray:
    """Random bytes, none of them the 0 of padding."""
    return np.random.default_rng(rows * scales + batch).integers(1, 256, (batch, rows, scales)).astype(np.uint8)


def blocked_by_hand(plain: np.ndarray) -> np.ndarray:
    """The memory of the layout, one scale at a time by the formula of the specification."""
    batch, rows, scales = plain.shape
    row_tiles, scale_tiles = -(-rows // 128), -(-scales // 4)
    memory = np.zeros(512 * batch * row_tiles * scale_tiles, np.uint8)
    for l, r, j in np.ndindex(batch, rows, scales):  # noqa: E741 - the specification's letters
        offset = ((l * row_tiles + r // 128) * scale_tiles + j // 4) * 512
        offset += (r % 32) * 16 + ((r // 32) % 4) * 4 + j % 4
        memory[offset] = plain[l, r, j]
    return memory


@pytest.mark.parametrize(("rows", "scales", "batch"), EXTENTS)
def test_round_trip(framework: Any, rows: int, scales: int, batch: int) -> None:
    plain = plain_scales(rows, scales, batch)
    blocked = framework.call(formats.to_blocked, plain)
    assert blocked.shape == formats.scale_shape(rows, scales, batch)
    np.testing.assert_array_equal(blocked.reshape(-1), blocked_by_hand(plain))
    back = framework.call(lambda b: formats.from_blocked(b, rows, scales), blocked)
    np.testing.assert_array_equal(back, plain)


@pytest.mark.parametrize(("rows", "scales", "batch"), EXTENTS)
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_logical_view(make: Any, rows: int, scales: int, batch: int) -> None:
    plain = plain_scales(rows, scales, batch)
    physical = formats.to_blocked(make(plain))
    logical = formats.blocked_view(physical, "logical")
    row_tiles, scale_tiles = physical.shape[1:3]
    assert tuple(logical.shape) == (32, 4, row_tiles, 4, scale_tiles, batch)
    strides = logical.strides if isinstance(logical, np.ndarray) else logical.stride()
    assert strides == (16, 4, scale_tiles * 512, 1, 512, row_tiles * scale_tiles * 512)
    assert np.shares_memory(np.asarray(logical), np.asarray(physical))
    for l, r, j in product({0, batch - 1}, {0, rows // 2, rows - 1}, {0, scales // 2, scales - 1}):  # noqa: E741
        assert logical[r % 32, (r // 32) % 4, r // 128, j % 4, j // 4, l] == plain[l, r, j]
        assert physical[l, r // 128, j // 4, r % 32, (r // 32) % 4, j % 4] == plain[l, r, j]
    assert (formats.scale_form(logical), formats.scale_form(physical)) == ("logical", "physical")
    assert (formats.blocked_view(logical, "physical") == physical).all()
    assert formats.blocked_view(logical, "logical") is logical
    np.testing.assert_array_equal(np.asarray(formats.from_blocked(logical, rows, scales)), plain)


def test_check_values() -> None:
    offsets = {(0, 0): 0, (1, 0): 16, (31, 3): 499, (32, 0): 4, (33, 5): 533}
    offsets |= {(127, 7): 1023, (128, 0): 1024, (200, 6): 1674, (299, 4): 2740}
    plain = np.zeros((1, 300, 8), np.uint8)
    for value, ((row, scale), offset) in enumerate(offsets.items(), start=1):
        assert formats.scale_offset(row, scale, rows=300, scales=8) == offset
        plain[0, row, scale] = value
    memory = formats.to_blocked(plain).reshape(-1)
    assert memory[list(offsets.values())].tolist() == list(range(1, 10))
    assert formats.scale_offset(1, 0, 2, rows=300, scales=8) == 2 * 3 * 2 * 512 + 16


def test_two_dimensions_are_one_batch(framework: Any) -> None:
    plain = plain_scales(130, 6, 1)
    blocked = framework.call(formats.to_blocked, plain[0])
    np.testing.assert_array_equal(blocked, formats.to_blocked(plain))


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fn", "int8", "uint8"])
def test_the_dtype_stays(framework: Any, dtype: str) -> None:
    plain = formats.typed_view(framework.array(plain_scales(5, 3, 2)), dtype)
    blocked = formats.to_blocked(plain)
    assert framework.is_array(blocked, dtype)
    assert framework.is_array(formats.from_blocked(blocked, 5, 3), dtype)


def test_padding_is_zero_on_output_and_ignored_on_input(framework: Any) -> None:
    plain = plain_scales(129, 5, 2)
    blocked = formats.to_blocked(plain)
    padding = blocked == 0
    assert padding.sum() == blocked.size - plain.size
    for poison in (0xFF, 0x7F):
        poisoned = np.where(padding, np.uint8(poison), blocked)
        back = framework.call(lambda b: formats.from_blocked(b, 129, 5), poisoned)
        np.testing.assert_array_equal(back, plain)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty(framework: Any, shape: tuple[int, int, int]) -> None:
    batch, rows, scales = shape
    blocked = framework.call(formats.to_blocked, np.zeros(shape, np.uint8))
    assert blocked.shape == formats.scale_shape(rows, scales, batch)
    assert framework.call(lambda b: formats.from_blocked(b, rows, scales), blocked).shape == shape


def test_strided_input_and_contiguous_output() -> None:
    plain = plain_scales(6, 40, 1)[0]
    want = formats.to_blocked(plain.T.copy())
    assert want.flags.c_contiguous
    np.testing.assert_array_equal(formats.to_blocked(plain.T), want)
    tensor = formats.to_blocked(torch.from_numpy(plain).T)
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), want)
    assert formats.from_blocked(want, 40, 6).flags.c_contiguous
    assert formats.from_blocked(tensor, 40, 6).is_contiguous()


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("tiles", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_contiguous_array_of_the_logical_shape_is_rejected(make: Any, tiles: tuple[int, int, int]) -> None:
    row_tiles, scale_tiles, batch = tiles
    copy = make(np.zeros((32, 4, row_tiles, 4, scale_tiles, batch), np.uint8))
    with pytest.raises(InvalidArgumentError, match="x must have strides"):
        formats.scale_form(copy)
    with pytest.raises(InvalidArgumentError, match="blocked must have strides"):
        formats.from_blocked(copy, 128 * row_tiles, 4 * scale_tiles)


def test_one_atom_is_the_same_in_both_orders(framework: Any) -> None:
    assert formats.scale_form(framework.array(np.zeros((32, 4, 1, 4, 1, 1), np.uint8))) == "logical"


def test_wrong_strides_of_the_physical_form() -> None:
    physical = torch.zeros((2, 3, 2, 32, 4, 4), dtype=torch.uint8)
    assert formats.scale_form(physical) == "physical"
    swapped = torch.zeros((2, 3, 2, 4, 32, 4), dtype=torch.uint8).transpose(3, 4)
    with pytest.raises(InvalidArgumentError, match="strides"):
        formats.scale_form(swapped)
    with pytest.raises(InvalidArgumentError, match="strides"):
        formats.from_blocked(swapped.numpy(), 300, 8)


def test_strides_of_single_extents_are_ignored() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8)
    assert formats.scale_form(storage.as_strided((1, 1, 2, 32, 4, 4), (7, 9, 512, 16, 4, 1))) == "physical"
    assert formats.scale_form(storage.as_strided((32, 4, 1, 4, 2, 1), (16, 4, 3, 1, 512, 5))) == "logical"


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 32, 4), (1, 1, 1, 4, 32, 4), (32, 4, 1, 5, 1, 1), (512,), (1, 1, 1, 32, 4, 8)]
)
def test_other_shapes_are_rejected(framework: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="blocked scale shape"):
        formats.scale_form(framework.array(np.zeros(shape, np.uint8)))


def test_the_number_of_tiles_is_checked(framework: Any) -> None:
    blocked = framework.array(np.zeros(formats.scale_shape(129, 5, 2), np.uint8))
    assert formats.scale_form(blocked, rows=256, scales=8, batch=2) == "physical"
    for wrong in ({"rows": 128}, {"scales": 4}, {"scales": 9}, {"batch": 1}):
        with pytest.raises(InvalidArgumentError, match=r"gemm: sfa_tensor must have the blocked scale shape"):
            formats.scale_form(blocked, **wrong, operation="gemm", argument="sfa_tensor")
    with pytest.raises(InvalidArgumentError, match=r"shape \(L, 1, 2, 32, 4, 4\) or .*; got shape \(2, 2, 2,"):
        formats.from_blocked(blocked, 128, 5)


def test_a_descriptor_has_a_form() -> None:
    shape, strides, order = (32, 4, 3, 4, 2, 2), (16, 4, 1024, 1, 512, 3072), (3, 1, 0, 4, 2, 5)
    assert formats.scale_form(TensorDesc("float8_e8m0fnu", shape, strides, order, "cuda:0"), 300, 8, 2) == "logical"
    contiguous, order = (192, 48, 16, 4, 2, 1), (5, 4, 3, 2, 1, 0)
    with pytest.raises(InvalidArgumentError, match="strides"):
        formats.scale_form(TensorDesc("float8_e8m0fnu", shape, contiguous, order, "cuda:0"))


def test_jax_has_no_logical_view() -> None:
    with pytest.raises(InvalidArgumentError, match="JAX arrays are always C-contiguous"):
        formats.blocked_view(jnp.zeros((1, 2, 1, 32, 4, 4), jnp.uint8), "logical")
    with pytest.raises(InvalidArgumentError, match="strides"):
        formats.scale_form(jnp.zeros((32, 4, 2, 4, 1, 1), jnp.uint8))


def test_bad_arguments(framework: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape \(R, S\) or \(L, R, S\); got shape \(4,\)"):
        formats.to_blocked(framework.array(np.zeros(4, np.uint8)))
    with pytest.raises(InvalidArgumentError, match="one-byte items"):
        formats.to_blocked(framework.array(np.zeros((4, 4), np.float32)))
    with pytest.raises(InvalidArgumentError, match="form must be"):
        formats.blocked_view(framework.array(np.zeros((1, 1, 1, 32, 4, 4), np.uint8)), "flat")
    with pytest.raises(InvalidArgumentError, match="be >= 0"):
        formats.scale_shape(-1, 4)
    with pytest.raises(InvalidArgumentError, match="be >= 0 and >= 1"):
        formats.scales_per_row(32, 0)


@pytest.mark.parametrize(("columns", "vec", "scales"), [(0, 32, 0), (1, 32, 1), (32, 32, 1), (33, 32, 2), (48, 16, 3)])
def test_scales_per_row(columns: int, vec: int, scales: int) -> None:
    assert formats.scales_per_row(columns, vec) == scales
