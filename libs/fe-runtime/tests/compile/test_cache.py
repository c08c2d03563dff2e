"""Memory, disk, compile: which of them answers, and what a miss may do. The compiler is a stand-in here."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fe_runtime import compile as kernels
from fe_runtime.compile import KernelSpec, build, cache, link, loader, sources, toolchain
from fe_runtime.compile.build import Built
from fe_runtime.compile.cubin import ResourceUsage
from fe_runtime.errors import NotCompiledError, NotSupportedError

OPERATION = "fe_test.op"


def spec(number: int = 0, arch: str = "sm_90a") -> KernelSpec:
    return KernelSpec.of(OPERATION, "kernels_for_tests:scale", arch, number=number)


@pytest.fixture(autouse=True)
def compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A compiler that takes 20 ms, and a loader that returns a function which tells its object file."""
    state = SimpleNamespace(compiled=[], at_once=0, most_at_once=0, fail=None, unloadable=set())
    one = threading.RLock()

    def compile_one(wanted: KernelSpec) -> Built:
        with one:
            if state.fail is not None:
                raise state.fail
            time.sleep(0.02)
            state.compiled.append(wanted)
            text = f"{wanted.identity} {len(state.compiled)}"
            return Built(text.encode(), {"symbol": ResourceUsage(32, 8, 8, 1024)}, {"compile": 0.02})

    def load_entry(entry: Any, scratch: Any) -> Callable[[], bytes]:
        data = entry.files["kernel.o"]
        if data in state.unloadable:
            raise RuntimeError("undefined symbol")
        return lambda: data

    monkeypatch.setattr(build, "build", compile_one)
    monkeypatch.setattr(link, "link", lambda data: b"linked " + data)
    monkeypatch.setattr(loader, "load_entry", load_entry)
    return state


def info() -> tuple[int, int, int, int]:
    """Return hits, misses, compiles, disk hits."""
    found = kernels.cache_info()[OPERATION]
    return found.hits, found.misses, found.compiles, found.disk_hits


def test_compile_then_memory_then_disk(compiler: SimpleNamespace) -> None:
    first = kernels.load(spec())
    assert kernels.load(spec()) is first
    assert info() == (1, 1, 1, 0)
    kernels.cache_clear()
    assert kernels.load(spec())() == first()
    assert info() == (0, 1, 0, 1)
    assert len(compiler.compiled) == 1


def test_config_and_arch_are_separate_kernels(compiler: SimpleNamespace) -> None:
    wanted = [spec(0), spec(1), spec(0, "sm_80")]
    results = {kernels.load(each)() for each in wanted * 2}
    assert len(results) == 3
    assert compiler.compiled == wanted


def test_bound_is_per_operation(compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_CACHE_SIZE", "2")
    for number in range(3):
        kernels.load(spec(number))
    other = KernelSpec.of("fe_test.other", "kernels_for_tests:scale", "sm_90a")
    kernels.load(other)
    assert kernels.cache_info()[OPERATION].size == 2
    kernels.load(spec(2))
    assert info() == (1, 3, 3, 0)
    kernels.load(spec(0))  # was dropped from memory, comes back from disk
    assert info() == (1, 4, 3, 1)
    kernels.load(other)
    assert kernels.cache_info()["fe_test.other"].hits == 1


def test_clear_one_operation() -> None:
    kernels.load(spec())
    kernels.load(KernelSpec.of("fe_test.other", "kernels_for_tests:scale", "sm_90a"))
    kernels.cache_clear(OPERATION)
    assert set(kernels.cache_info()) == {"fe_test.other"}


def test_sixteen_threads_compile_once(compiler: SimpleNamespace) -> None:
    barrier = threading.Barrier(16)
    results: list[object] = []

    def ask(number: int) -> None:
        barrier.wait()
        results.append(kernels.load(spec(number % 2)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 16
    assert len(compiler.compiled) == 2
    assert len(set(map(id, results))) == 2


def test_failure_is_not_remembered(compiler: SimpleNamespace) -> None:
    compiler.fail = RuntimeError("no such tile")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such tile"):
            kernels.load(spec())
    compiler.fail = None
    kernels.load(spec())
    assert info() == (0, 3, 1, 0)


def test_no_jit(compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load(spec(1))
    kernels.cache_clear()
    monkeypatch.setenv("FE_NO_JIT", "1")
    kernels.load(spec(1))  # from disk
    with pytest.raises(NotCompiledError, match="number=2") as caught:
        kernels.load(spec(2))
    command = shlex.split(str(caught.value).partition("Build it ahead: ")[2])
    assert command[:3] == ["fe", "compile", "--spec"]
    assert kernels.KernelSpec.from_identity(command[3]) == spec(2)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize("initialized", [True, False])
def test_capture(compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, initialized: bool) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: initialized, is_current_stream_capturing=lambda: True)
    kernels.load(spec(1))
    monkeypatch.setitem(cache.sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    kernels.load(spec(1))
    if initialized:
        with pytest.raises(NotCompiledError, match="Warm up"):
            kernels.load(spec(2))
    else:
        kernels.load(spec(2))


def test_stored_kernel_needs_no_compiler_and_a_new_one_does(
    compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.load(spec(1))
    kernels.cache_clear()
    installed = toolchain._installed
    monkeypatch.setattr(toolchain, "_installed", lambda prefix: installed(prefix) if "tvm" in prefix else {})
    toolchain.current.cache_clear()
    kernels.load(spec(1))
    with pytest.raises(NotSupportedError, match="nvidia-cutlass-dsl is not installed"):
        kernels.load(spec(2))
    with pytest.raises(ImportError):
        kernels.load(spec(2))


def test_unwritable_folder(compiler: SimpleNamespace, cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_folder.parent.mkdir(exist_ok=True)
    cache_folder.write_text("a file where the folder should be")
    first = kernels.load(spec())
    assert kernels.load(spec()) is first
    kernels.load(spec(1))
    assert len(compiler.compiled) == 2
    assert caplog.text.count("cannot be written") == 1
    assert kernels.resource_usage(spec())["symbol"].registers == 32


def test_stored_kernel_that_does_not_load_is_rebuilt(compiler: SimpleNamespace) -> None:
    bad = kernels.load(spec())()
    kernels.cache_clear()
    compiler.unloadable.add(bad)
    good = kernels.load(spec())()
    assert good != bad
    kernels.cache_clear()
    assert kernels.load(spec())() == good
    assert len(compiler.compiled) == 2


def test_fresh_kernel_that_does_not_load_raises(compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entry: Any, scratch: Any) -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(loader, "load_entry", fail)
    with pytest.raises(RuntimeError, match="undefined symbol"):
        kernels.load(spec())


@pytest.mark.parametrize("file", ["kernel.o", "kernel.so", "meta.json"])
def test_damaged_entry_is_compiled_again(compiler: SimpleNamespace, cache_folder: Path, file: str) -> None:
    kernels.load(spec())
    kernels.cache_clear()
    (path,) = cache_folder.rglob(file)
    path.write_bytes(path.read_bytes()[:-5])
    assert not kernels.is_stored(spec())
    kernels.load(spec())
    assert info() == (0, 1, 1, 0)
    assert kernels.is_stored(spec())


def test_changed_source_is_another_key(
    compiler: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "changing_builder.py"
    wanted = KernelSpec.of(OPERATION, "changing_builder:build", "sm_90a")
    for text in ("width = 1\n", "width = 22\n", "width = 1\n"):
        source.write_text(text)
        kernels.cache_clear()
        kernels.load(wanted)
    assert len(compiler.compiled) == 2  # the third time the first entry fits again


def test_code_from_an_edited_file_is_not_stored(
    compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources.Closure, "edited_since_import", lambda self: ["kernels_for_tests"])
    kernels.load(spec())
    assert not kernels.is_stored(spec())
    assert "kernels_for_tests changed after this process imported it" in caplog.text


def test_another_process_was_faster(compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first look and the lock the entry appears: it is used, not compiled again."""
    kernels.load(spec())
    kernels.cache_clear()
    read = cache.Store.read
    answers = iter([lambda *_: None])
    monkeypatch.setattr(cache.Store, "read", lambda self, slot: next(answers, read)(self, slot))
    kernels.load(spec())
    assert len(compiler.compiled) == 1
    assert info() == (0, 1, 0, 1)


def test_resource_usage_comes_from_the_entry(compiler: SimpleNamespace) -> None:
    assert kernels.resource_usage(spec()) == {"symbol": ResourceUsage(32, 8, 8, 1024)}
    assert kernels.resource_usage(spec()) == {"symbol": ResourceUsage(32, 8, 8, 1024)}
    assert len(compiler.compiled) == 1


def test_memory_hit_is_cheap() -> None:
    """A hit costs a look-up, a lock and a move in the order: some tenths of a microsecond."""
    wanted = spec()
    kernels.load(wanted)
    load = kernels.load

    def microseconds() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            load(wanted)
        return (time.perf_counter() - start) / 2000 * 1e6

    assert min(microseconds() for _ in range(20)) < 2.0
