"""The real compiler: every architecture in one process, threads, resources, loading with and without a linker."""

from __future__ import annotations

import itertools
import struct
import sys
import threading
from pathlib import Path

import pytest

from fe_runtime import compile as kernels
from fe_runtime.compile import KernelSpec, build, cache, cubin, link, loader
from fe_runtime.compile.store import LIBRARY, OBJECT

pytestmark = pytest.mark.usefixtures("cache_folder")

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def scale(arch: str = "sm_90a", **config: int) -> KernelSpec:
    return KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", arch, **config)


def check_signature(function: object) -> None:
    """The function is the compiled one: it names its parameters, has no stream, and rejects arrays off the GPU."""
    import numpy as np

    with pytest.raises(TypeError, match=r"Expects 3 parameters.*test_scale\(x: Tensor\(\[n0\], float32\)"):
        function(1)  # type: ignore[operator]
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, x, 1.0)  # type: ignore[operator]


def test_every_architecture_compiles_and_loads_in_one_process() -> None:
    for arch in ARCHITECTURES:
        check_signature(kernels.load(scale(arch)))
    info = kernels.cache_info()["fe_test.scale"]
    assert (info.compiles, info.size) == (5, 5)


def test_object_does_not_depend_on_what_was_compiled_before() -> None:
    first = build.build(scale(threads=64)).object_file
    build.build(scale(threads=32))
    assert build.build(scale(threads=64)).object_file == first


def test_threads_compile_different_kernels() -> None:
    """The compiler is not thread-safe; without the process-wide lock this ends the interpreter."""
    threads = [threading.Thread(target=kernels.load, args=(scale(threads=32 * n),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert kernels.cache_info()["fe_test.scale"].compiles == 4


def test_builder_error_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match="this kernel has no such tile"):
        kernels.load(KernelSpec.of("fe_test.broken", "kernels_for_tests:broken", "sm_90a"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_resource_usage(arch: str) -> None:
    usage = kernels.resource_usage(KernelSpec.of("fe_test.indexed", "kernels_for_tests:indexed", arch))
    frames = {symbol.split("_tensor")[0]: found.frame_bytes for symbol, found in usage.items()}
    assert len(usage) == 2
    assert frames["kernel_cutlass_scale_kernel"] == 0
    assert frames["kernel_cutlass_indexed_kernel"] >= 64 * 4  # the array of 64 floats
    assert all(0 < found.registers <= 255 for found in usage.values())
    assert all(found.stack_bytes >= found.frame_bytes for found in usage.values())


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 90, b"\x7fELF\x02\x01" + bytes(90), b"P\xedU\xba" * 50],
    ids=["empty", "short", "ones", "zeros", "another kind"],
)
def test_something_else_is_no_cubin(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cubin|ELF"):
        cubin.kernel_resources(data)


def test_attributes_of_other_formats_are_skipped() -> None:
    data = (
        struct.pack("<BBH", 3, 0x19, 32) + struct.pack("<BBHII", 4, 0x2F, 8, 7, 168) + struct.pack("<BBHI", 4, 1, 4, 9)
    )
    assert list(cubin._attributes(data)) == [(0x2F, 7, 168)]


def test_link_options_are_honoured() -> None:
    """A missing symbol is found when the library is loaded, not in the middle of a call."""
    library = link.link(build.build(scale()).object_file)
    assert library is not None
    dynamic_flags = {(24, 0), (0x6FFFFFFB, 1)}  # DT_BIND_NOW; DT_FLAGS_1 with DF_1_NOW
    words = struct.unpack(f"<{len(library) // 8}Q", library[: len(library) // 8 * 8])
    assert dynamic_flags & set(itertools.pairwise(words))


def test_second_linker_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "ld"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    real = link._commands()[0]
    monkeypatch.setattr(link, "_commands", lambda: [[str(tmp_path / "gone")], [str(broken)], real])
    assert link.link(build.build(scale()).object_file) is not None


def test_no_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is stored alone and loaded by the compiler's own loader."""
    monkeypatch.setattr(link, "_commands", list)
    monkeypatch.setattr(loader, "_functions", {})
    spec = scale(threads=96)
    check_signature(kernels.load(spec))
    entry, origin = cache.obtain(spec)
    assert origin is cache.Origin.DISK
    assert set(entry.files) == {OBJECT}


def test_linker_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that was made without a linker is linked by the machine that has one, without the compiler."""
    spec = scale(threads=160)
    with monkeypatch.context() as patch:
        patch.setattr(link, "_commands", list)
        cache.obtain(spec)
    monkeypatch.setattr(build, "load_object", lambda path: pytest.fail("used the compiler"))
    check_signature(kernels.load(spec))


def test_same_bytes_are_loaded_once() -> None:
    first = kernels.load(scale())
    kernels.cache_clear()
    assert kernels.load(scale()) is first


def test_load_uses_another_folder_where_the_first_forbids_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine whose temporary folder is mounted without permission to execute."""
    entry, _ = cache.obtain(scale(threads=192))
    assert LIBRARY in entry.files
    (tmp_path / "file").touch()
    monkeypatch.setattr(loader.tempfile, "gettempdir", lambda: str(tmp_path / "file" / "folder"))
    check_signature(loader.load_entry(entry, [tmp_path / "made"]))
    assert not list((tmp_path / "made").iterdir())


def test_broken_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(ImportError, match=r"nvidia-cutlass-dsl does not import.*pip install"):
        kernels.load(scale(threads=224))
