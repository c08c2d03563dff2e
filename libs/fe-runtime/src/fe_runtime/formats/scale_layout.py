"""The blocked scale layout ``L-128x4``: shapes, its two array forms, and conversions from and to plain scales.

Memory is a row of 512-byte atoms (128 rows x 4 scales), in order (batch, row tile, scale tile). Letters: ``R`` rows,
``S`` scales per row, ``L`` batch, ``RT = ceil(R/128)``, ``CT = ceil(S/4)``.
"""

from __future__ import annotations

from typing import Any, Literal

from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.formats import _backend as backend
from fe_runtime.formats._backend import Array

__all__ = [
    "blocked_view",
    "from_blocked",
    "scale_form",
    "scale_offset",
    "scale_shape",
    "scales_per_row",
    "to_blocked",
]

Form = Literal["physical", "logical"]

_TO_LOGICAL = (3, 4, 1, 5, 2, 0)
_TO_PHYSICAL = (5, 2, 4, 0, 1, 3)
_SWAP = (0, 1, 4, 3, 2, 5)  # (L, RT, 4, 32, CT, 4), the plain order of rows and scales, to the physical shape and back


def to_blocked(scales: Array) -> Array:
    """Arrange plain scales in the blocked layout; padding is ``0x00``.

    Parameters
    ----------
    scales
        ``(R, S)`` or ``(L, R, S)``, a dtype of one byte, any strides.

    Returns
    -------
    Array
        ``(L, RT, CT, 32, 4, 4)`` (``L = 1`` for two dimensions), C-contiguous, fresh, the dtype of ``scales``.

    Raises
    ------
    InvalidArgumentError
        Another rank, or items wider than a byte.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    name, plain = backend.dtype_name(scales), backend.as_bytes(scales)
    xp = backend.namespace(plain)
    if plain.ndim not in (2, 3):
        given = f"shape {tuple(scales.shape)}"
        raise InvalidArgumentError(explain("formats.to_blocked", "scales", "have shape (R, S) or (L, R, S)", given))
    if plain.ndim == 2:
        plain = plain[None]
    batch, rows, columns = plain.shape
    shape = scale_shape(rows, columns, batch)
    plain = backend.pad(backend.pad(plain, 1, 128 * shape[1]), 2, 4 * shape[2])
    tiles = xp.reshape(plain, (batch, shape[1], 4, 32, shape[2], 4))
    return backend.as_type(backend.contiguous(xp.permute_dims(tiles, _SWAP)), name)


def from_blocked(blocked: Array, rows: int, scales: int) -> Array:
    """Return the plain scales of a blocked array; the padding is dropped, whatever it holds.

    Parameters
    ----------
    blocked
        Either form of the layout, a dtype of one byte.
    rows, scales
        ``R`` and ``S``.

    Returns
    -------
    Array
        ``(L, R, S)``, C-contiguous, the dtype of ``blocked``.

    Raises
    ------
    InvalidArgumentError
        ``blocked`` is not the layout for ``R`` rows and ``S`` scales.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    scale_form(blocked, rows, scales, operation="formats.from_blocked", argument="blocked")
    physical = blocked_view(backend.as_bytes(blocked), "physical")
    xp = backend.namespace(physical)
    batch, row_tiles, scale_tiles = physical.shape[:3]
    plain = xp.reshape(xp.permute_dims(physical, _SWAP), (batch, 128 * row_tiles, 4 * scale_tiles))
    return backend.as_type(backend.contiguous(plain[:, :rows, :scales]), backend.dtype_name(blocked))


def blocked_view(blocked: Array, form: Form) -> Array:
    """Return a blocked array in the wanted form, without a copy.

    Parameters
    ----------
    blocked
        Either form of the layout.
    form
        ``"physical"``: ``(L, RT, CT, 32, 4, 4)``. ``"logical"``: ``(32, 4, RT, 4, CT, L)``, the same bytes with
        permuted strides.

    Raises
    ------
    InvalidArgumentError
        ``blocked`` is not the layout; an unknown form; or the logical form of a JAX array, which has no strides.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    if form not in ("physical", "logical"):
        raise InvalidArgumentError(explain("formats.blocked_view", "form", "be 'physical' or 'logical'", repr(form)))
    if scale_form(blocked, operation="formats.blocked_view", argument="blocked") == form:
        return blocked
    framework = backend.framework_of(blocked)
    if framework == "torch":
        return blocked.permute(_TO_LOGICAL if form == "logical" else _TO_PHYSICAL)
    if framework == "jax" and form == "logical":
        fix = "JAX arrays are always C-contiguous: keep the physical form."
        raise InvalidArgumentError(explain("formats.blocked_view", "form", "be 'physical' for JAX", repr(form), fix))
    return blocked.transpose(_TO_LOGICAL if form == "logical" else _TO_PHYSICAL)


def scale_form(
    x: Any,
    rows: int | None = None,
    scales: int | None = None,
    batch: int | None = None,
    *,
    operation: str = "formats.scale_form",
    argument: str = "x",
) -> Form:
    """Return which form of the blocked layout an array has, after checking its shape and strides.

    Parameters
    ----------
    x
        Array or tensor descriptor; only ``shape`` and strides are read.
    rows, scales, batch
        ``R``, ``S`` and ``L`` that the array must be for; None: any.
    operation, argument
        Named in the error.

    Returns
    -------
    str
        ``"logical"`` or ``"physical"``.

    Raises
    ------
    InvalidArgumentError
        Neither form, the wrong number of tiles, or strides of another arrangement (strides of extents of 1 are
        ignored). A C-contiguous array of the logical shape is *not* the layout, unless ``RT = CT = L = 1``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    shape = tuple(x.shape)
    form: Form = "logical" if len(shape) == 6 and (shape[0], shape[1], shape[3]) == (32, 4, 4) else "physical"
    physical = tuple(shape[i] for i in _TO_PHYSICAL) if form == "logical" else shape
    wanted = _wanted_shape(rows, scales, batch)
    if len(physical) != 6 or any(w not in (e, "L", "RT", "CT") for w, e in zip(wanted, physical, strict=True)):
        rule = f"have the blocked scale shape ({', '.join(map(str, wanted))}) or its logical view (32, 4, RT, 4, CT, L)"
        raise InvalidArgumentError(explain(operation, argument, rule, f"shape {shape}"))
    strides = _strides(physical)
    expected = tuple(strides[i] for i in _TO_LOGICAL) if form == "logical" else strides
    given = backend.strides_of(x)
    if 0 not in shape and any(e > 1 and s != w for e, s, w in zip(shape, given, expected, strict=True)):
        fix = "Make it with formats.to_blocked; a copy of the logical view is another layout."
        rule = f"have strides {expected} for shape {shape}"
        raise InvalidArgumentError(explain(operation, argument, rule, f"strides {given}", fix))
    return form


def scale_shape(rows: int, scales: int, batch: int = 1) -> tuple[int, int, int, int, int, int]:
    """Return the physical shape ``(L, RT, CT, 32, 4, 4)`` for ``R`` rows of ``S`` scales; its product is in bytes.

    Raises
    ------
    InvalidArgumentError
        A negative extent.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    if min(rows, scales, batch) < 0:
        given = (rows, scales, batch)
        raise InvalidArgumentError(explain("formats.scale_shape", "rows, scales and batch", "be >= 0", given))
    return batch, -(-rows // 128), -(-scales // 4), 32, 4, 4


def scales_per_row(columns: int, vec: int) -> int:
    """Return ``S = ceil(columns / vec)``: the last block of a row may be partial.

    Raises
    ------
    InvalidArgumentError
        ``columns < 0`` or ``vec < 1``.
    """
    if columns < 0 or vec < 1:
        given = (columns, vec)
        raise InvalidArgumentError(explain("formats.scales_per_row", "columns and vec", "be >= 0 and >= 1", given))
    return -(-columns // vec)


def scale_offset(row: int, scale: int, batch: int = 0, *, rows: int, scales: int) -> int:
    """Return the byte offset of scale ``(row, scale, batch)`` in the layout for ``rows`` rows of ``scales`` scales.

    ``((l*RT + r//128)*CT + j//4)*512 + (r%32)*16 + ((r//32)%4)*4 + j%4``

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: block-scaled formats, 128x4 layout of scales.
    """
    _, row_tiles, scale_tiles, *_ = scale_shape(rows, scales)
    atom = (batch * row_tiles + row // 128) * scale_tiles + scale // 4
    return atom * 512 + row % 32 * 16 + row // 32 % 4 * 4 + scale % 4


def _wanted_shape(rows: int | None, scales: int | None, batch: int | None) -> tuple[int | str, ...]:
    """Return the physical shape, with a letter for each extent that may be anything."""
    shape = scale_shape(rows or 0, scales or 0, batch or 0)
    return (
        "L" if batch is None else shape[0],
        "RT" if rows is None else shape[1],
        "CT" if scales is None else shape[2],
        *shape[3:],
    )


def _strides(physical: tuple[int, ...]) -> tuple[int, ...]:
    _, row_tiles, scale_tiles, *_ = physical
    return row_tiles * scale_tiles * 512, scale_tiles * 512, 512, 16, 4, 1
