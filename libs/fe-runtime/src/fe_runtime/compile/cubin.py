"""Registers, stack and shared memory of each kernel, read from the GPU code (an ELF file)."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

__all__ = ["ResourceUsage", "kernel_resources"]


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What one GPU symbol occupies.

    Parameters
    ----------
    registers
        Per thread. Where launch bounds are given this is the allocation, not the need.
    frame_bytes
        Local memory of the kernel's own frame per thread: spilled registers and indexed local arrays.
    stack_bytes
        Local memory per thread including the functions it calls.
    shared_bytes
        Statically declared shared memory per block, what the architecture reserves included. Shared memory that is
        sized at the launch is not recorded in the GPU code.
    """

    registers: int
    frame_bytes: int
    stack_bytes: int
    shared_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields, for JSON."""
        return asdict(self)


def kernel_resources(cubin: bytes) -> dict[str, ResourceUsage]:
    """Return the resources of every kernel in a cubin, by GPU symbol.

    Raises
    ------
    ValueError
        Not a 64-bit little-endian ELF file, or one without the expected tables.
    """
    try:
        return _kernel_resources(cubin)
    except (struct.error, IndexError, OverflowError, StopIteration) as error:
        raise ValueError(f"not a readable cubin: {error}") from error


_SYMBOL_TABLE = 2
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12  # attributes of the .nv.info section
_SIZED = 4  # the only attribute format with a payload of its own; the others fit in their header


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _kernel_resources(cubin: bytes) -> dict[str, ResourceUsage]:
    sections = _sections(cubin)
    symbols = next(section for section in sections if section.kind == _SYMBOL_TABLE)
    values: dict[int, dict[int, int]] = defaultdict(dict)
    for section in sections:
        if section.name == ".nv.info":
            for attribute, symbol, value in _attributes(cubin[section.offset : section.offset + section.size]):
                values[symbol][attribute] = value
    shared = {s.name.removeprefix(".nv.shared."): s.size for s in sections if s.name.startswith(".nv.shared.")}
    found = {}
    for index, numbers in values.items():
        if _REGISTERS in numbers:
            name = _symbol_name(cubin, symbols, sections[symbols.link], index)
            found[name] = ResourceUsage(
                numbers[_REGISTERS], numbers.get(_FRAME, 0), numbers.get(_STACK, 0), shared.get(name, 0)
            )
    return found


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQI", elf, table + i * entry_size) for i in range(count)]
    names = rows[names_index][4]
    return [_Section(_text(elf, names + row[0]), row[1], row[4], row[5], row[6]) for row in rows]


def _attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (attribute, symbol index, value) of the attributes that speak of one symbol."""
    position = 0
    while position < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _SIZED:
            continue
        if size == 8:
            yield attribute, *struct.unpack_from("<II", data, position)
        position += size


def _symbol_name(elf: bytes, symbols: _Section, names: _Section, index: int) -> str:
    (name,) = struct.unpack_from("<I", elf, symbols.offset + 24 * index)
    return _text(elf, names.offset + name)


def _text(elf: bytes, start: int) -> str:
    return elf[start : elf.index(b"\0", start)].decode()
