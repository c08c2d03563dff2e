"""Entries on disk: what is read back, what counts as missing, and folders that cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fe_runtime.compile import KernelSpec
from fe_runtime.compile.store import LIBRARY, META, OBJECT, Entry, Slot, Store, make_entry
from fe_runtime.compile.toolchain import Toolchain

SPEC = KernelSpec.of("fe_x.op", "fe_x.kernels.op:build", "sm_90a", tile=128)
HERE = Toolchain((("nvidia-cutlass-dsl", "4.8.1"),), "0.1.15", 13, None, "linux-x86_64", (), None)
SLOT = Slot(SPEC, "source-hash", HERE)
FILES = {OBJECT: b"object" * 100, LIBRARY: b"library" * 100}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def entry(slot: Slot = SLOT, files: dict[str, bytes] = FILES) -> Entry:
    return make_entry(slot, files, {"symbol": {"registers": 10}}, {"compile": 0.1})


def put(store: Store, slot: Slot = SLOT) -> Path:
    """Store an entry and return its folder."""
    with store.locked(slot) as locked:
        assert locked
        assert store.write(slot, entry(slot))
    return store._folder(slot) / slot.toolchain.label


def test_round_trip(store: Store) -> None:
    assert store.read(SLOT) is None
    put(store)
    assert store.read(SLOT) == entry()


def test_entry_without_library(store: Store) -> None:
    with store.locked(SLOT):
        store.write(SLOT, entry(files={OBJECT: b"object"}))
    found = store.read(SLOT)
    assert found is not None
    assert set(found.files) == {OBJECT}


@pytest.mark.parametrize(
    "other",
    [
        replace(SLOT, sources="other"),
        replace(SLOT, spec=KernelSpec.of("fe_x.op", "fe_x.kernels.op:build", "sm_90a", tile=64)),
        replace(SLOT, spec=KernelSpec.of("fe_x.op", "fe_x.kernels.op:other", "sm_90a", tile=128)),
        replace(SLOT, spec=KernelSpec.of("fe_x.op", "fe_x.kernels.op:build", "sm_100a", tile=128)),
        replace(SLOT, toolchain=replace(HERE, dsl=(("nvidia-cutlass-dsl", "4.8.2"),))),
        replace(SLOT, toolchain=replace(HERE, tvm_ffi="0.1.16")),
        replace(SLOT, toolchain=replace(HERE, cuda=12)),
    ],
    ids=["sources", "config", "builder", "arch", "compiler", "ffi", "cuda"],
)
def test_everything_in_the_key_counts(store: Store, other: Slot) -> None:
    put(store)
    assert store.read(other) is None


@pytest.mark.parametrize("file", [OBJECT, LIBRARY, META])
@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "flipped", "longer", "folder"])
def test_damaged_file_is_a_miss_and_is_replaced(store: Store, file: str, damage: str) -> None:
    path = put(store) / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        path.write_bytes({"truncated": data[:-1], "empty": b"", "flipped": flipped, "longer": data + b"\0"}[damage])
    assert store.read(SLOT) is None
    put(store)
    assert store.read(SLOT) == entry()


def test_every_flipped_bit_of_the_metadata_is_noticed(store: Store) -> None:
    path = put(store) / META
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        assert store.read(SLOT) is None, (position, good[position : position + 10])


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", '{"digest": 1, "entry": 2}', '{"entry": [], "digest": []}', "[" * 100_000, "\0", "\xff"],
    ids=lambda text: repr(text[:12]),
)
def test_metadata_of_another_shape_is_a_miss(store: Store, text: str) -> None:
    (put(store) / META).write_bytes(text.encode("latin-1"))
    assert store.read(SLOT) is None


def test_entry_of_another_kernel_is_a_miss(store: Store) -> None:
    """A whole entry, but in the wrong place."""
    other = replace(SLOT, spec=KernelSpec.of("fe_x.op", "fe_x.kernels.op:build", "sm_90a", tile=64))
    place = put(store)
    shutil.rmtree(place)
    shutil.copytree(put(store, other), place)
    assert store.read(SLOT) is None


def test_names_that_lead_outside_are_refused(store: Store) -> None:
    foreign = entry()
    foreign.meta["files"]["../../secret"] = "0" * 64
    place = put(store)
    from fe_runtime.compile.store import _meta_text

    (place / META).write_text(_meta_text(foreign.meta))
    assert store.read(SLOT) is None


@pytest.mark.parametrize("kind", ["empty folder", "file", "broken link"])
def test_something_else_in_its_place_is_replaced(store: Store, kind: str) -> None:
    place = put(store)
    shutil.rmtree(place)
    if kind == "empty folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nowhere")
    assert store.read(SLOT) is None
    put(store)
    assert store.read(SLOT) == entry()
    assert not list(store.scratch.iterdir())


def test_without_a_compiler_the_newest_entry_is_read(store: Store) -> None:
    for version in ("4.8.1", "4.10.0", "4.9.3"):
        put(store, replace(SLOT, toolchain=replace(HERE, dsl=(("nvidia-cutlass-dsl", version),))))
    put(store, replace(SLOT, toolchain=replace(HERE, dsl=(("nvidia-cutlass-dsl", "5.0.0"),), tvm_ffi="0.2")))
    slim = replace(SLOT, toolchain=replace(HERE, dsl=(), problem="no compiler"))
    found = store.read(slim)
    assert found is not None
    assert found.meta["toolchain"]["dsl"] == {"nvidia-cutlass-dsl": "4.10.0"}


def test_without_a_compiler_a_damaged_newest_entry_gives_way(store: Store) -> None:
    put(store)
    newest = put(store, replace(SLOT, toolchain=replace(HERE, dsl=(("nvidia-cutlass-dsl", "4.9.0"),))))
    (newest / LIBRARY).write_bytes(b"")
    found = store.read(replace(SLOT, toolchain=replace(HERE, dsl=(), problem="no compiler")))
    assert found is not None
    assert found.meta["toolchain"]["dsl"] == {"nvidia-cutlass-dsl": "4.8.1"}


def test_folder_below_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither readable nor writable, also for the superuser; said once."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    assert store.read(SLOT) is None
    for _ in range(2):
        with store.locked(SLOT) as locked:
            assert not locked
        assert not store.write(SLOT, entry())
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "FE_CACHE_DIR" in warnings[0].getMessage()


def test_full_disk_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_bytes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch, store.locked(SLOT):
        patch.setattr(Path, "write_bytes", full)
        assert not store.write(SLOT, entry())
    assert store.read(SLOT) is None
    assert not list(store.scratch.iterdir())
    assert "No space left" in caplog.text
    put(store)
    assert store.read(SLOT) is not None


def test_entries_follow_the_umask(store: Store) -> None:
    """A cache that is built into an image as root is read by other users."""
    before = os.umask(0o022)
    try:
        place = put(store)
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o755
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in place.iterdir())


def test_metadata_can_be_read_by_people(store: Store) -> None:
    meta = json.loads((put(store) / META).read_text())["entry"]
    assert meta["spec"] == {
        "operation": "fe_x.op",
        "builder": "fe_x.kernels.op:build",
        "config": {"tile": 128},
        "arch": "sm_90a",
    }
    assert meta["toolchain"]["dsl"] == {"nvidia-cutlass-dsl": "4.8.1"}
    assert meta["resources"] == {"symbol": {"registers": 10}}
