"""Several processes: reuse without the compiler, races, a killed compile, and compiling ahead of time.

The processes block torch, which the FFI would otherwise import, because that takes seconds and changes nothing here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fe_runtime import compile as kernels
from fe_runtime.compile import KernelSpec, cache, toolchain
from fe_runtime.errors import NotCompiledError

SCALE = KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", "sm_90a")

LOAD = """
import sys
sys.modules["torch"] = None
from fe_runtime.compile import KernelSpec, cache_info, load
spec = KernelSpec.from_identity(sys.argv[1])
function = load(spec)
try:
    function(1)
except TypeError as error:
    assert "test_scale(x: Tensor" in str(error), error
else:
    raise AssertionError("the function accepted a number")
info = cache_info()[spec.operation]
modules = [name for name in ("cutlass", "jax", "triton", "kernels_for_tests") if name in sys.modules]
print(info.compiles, info.disk_hits, *modules)
"""


def start(spec: KernelSpec, outside: dict[str, str], **changed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, spec.identity],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **outside, **changed},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.strip()


def test_second_process_does_not_import_the_compiler(cache_folder: Path, outside: dict[str, str]) -> None:
    assert finish(start(SCALE, outside)) == "1 0 cutlass kernels_for_tests"
    assert finish(start(SCALE, outside)) == "0 1"
    assert finish(start(SCALE, outside, FE_NO_JIT="1")) == "0 1"


def test_slim_machine(cache_folder: Path, outside: dict[str, str], tmp_path: Path) -> None:
    """Only the runtime library, the FFI and fe-runtime's own needs are installed: stored kernels load."""
    cache.obtain(SCALE)
    found = toolchain.check_toolchain()
    assert found.runtime_library is not None
    slim = tmp_path / "slim"
    library = slim / f"nvidia_cutlass_dsl/cu{found.cuda}/lib/libcute_dsl_runtime.so"
    library.parent.mkdir(parents=True)
    library.symlink_to(found.runtime_library)
    installed = found.runtime_library.parents[3]
    for pattern in ("tvm_ffi", "apache_tvm_ffi-*", "platformdirs", "typing_extensions.py", "numpy", "numpy.libs"):
        for path in installed.glob(pattern):
            (slim / path.name).symlink_to(path)
    (slim / "fe_runtime").symlink_to(Path(kernels.__file__).parents[1])
    search = os.pathsep.join([str(slim), outside["PYTHONPATH"]])
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p and not p.endswith('/src')]\n"
    check = "import importlib.util; assert importlib.util.find_spec('cutlass') is None\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code + check + LOAD, SCALE.identity],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0 1"
    other = KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", "sm_90a", threads=32)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code + LOAD, other.identity],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        timeout=120,
    )
    assert "ToolchainError: the kernel compiler nvidia-cutlass-dsl is not installed" in done.stderr


def test_eight_processes_race_and_one_is_killed(cache_folder: Path, outside: dict[str, str], tmp_path: Path) -> None:
    """The one that compiles is killed in the middle; another one takes over, and six find its entry."""
    spec = KernelSpec.of("fe_test.hangs", "kernels_for_tests:first_hangs", "sm_90a", folder=str(tmp_path))
    processes = [start(spec, outside) for _ in range(8)]
    mark = tmp_path / "hanging"
    deadline = time.monotonic() + 120
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)  # the others are at the lock
    victim = int(mark.read_text())
    os.kill(victim, signal.SIGKILL)
    answers = []
    for process in processes:
        if process.pid == victim:
            process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL
        else:
            answers.append(finish(process).split()[:2])
    assert sorted(answers) == [["0", "1"]] * 6 + [["1", "0"]]
    assert not list((cache_folder / "v1/tmp").iterdir())


def test_entry_damaged_by_the_world_is_rebuilt(cache_folder: Path, outside: dict[str, str]) -> None:
    """A truncated library would end the process in the dynamic loader, were it not found before."""
    cache.obtain(SCALE)
    (library,) = cache_folder.rglob("kernel.so")
    library.write_bytes(library.read_bytes()[:3000])
    assert finish(start(SCALE, outside)).startswith("1 0")
    assert finish(start(SCALE, outside)) == "0 1"


def test_cache_moved_to_another_place(cache_folder: Path, outside: dict[str, str], tmp_path: Path) -> None:
    cache.obtain(SCALE)
    shutil.move(cache_folder, tmp_path / "image")
    assert finish(start(SCALE, outside, FE_CACHE_DIR=str(tmp_path / "image"))) == "0 1"


@pytest.mark.parametrize("options", ["size=8k", "ro"], ids=["full", "read-only"])
def test_file_system_that_takes_nothing(
    cache_folder: Path, outside: dict[str, str], tmp_path: Path, options: str
) -> None:
    """A disk that is really full or read-only, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a tmpfs")
    try:
        assert finish(start(SCALE, outside, FE_CACHE_DIR=str(disk))).startswith("1 0")
        assert not list(disk.rglob("kernel.*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_compile_many(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good, broken, crashing and repeated kernels together, forbidden or not to compile on demand."""
    monkeypatch.setenv("FE_NO_JIT", "1")
    broken = KernelSpec.of("fe_test.broken", "kernels_for_tests:broken", "sm_90a")
    crashing = KernelSpec.of("fe_test.crashing", "kernels_for_tests:crashing", "sm_90a")
    other = KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", "sm_100a")
    wanted = [crashing, SCALE, broken, other, SCALE]
    seen = []
    results = kernels.compile_many(wanted, jobs=2, progress=lambda *state: seen.append(state))
    assert [spec for spec, _ in results] == wanted
    outcomes = dict(results)
    assert "status 42" in str(outcomes[crashing])
    assert "this kernel has no such tile" in str(outcomes[broken])
    for spec in (SCALE, other):
        assert isinstance(outcomes[spec], float), outcomes[spec]
        assert kernels.is_stored(spec)
    assert [(done, total) for done, total, _, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert kernels.compile_many([SCALE, other]) == [(SCALE, 0.0), (other, 0.0)]


def test_compile_many_into_an_unwritable_folder(cache_folder: Path) -> None:
    cache_folder.parent.mkdir(exist_ok=True)
    cache_folder.write_text("a file where the folder should be")
    ((_, outcome),) = kernels.compile_many([SCALE])
    assert "could not be stored" in str(outcome)


def test_warmup(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", "sm_90a", threads=64)
    loaded = kernels.warmup([SCALE, other])
    assert [spec for spec, _ in loaded] == [SCALE, other]
    info = kernels.cache_info()["fe_test.scale"]
    assert (info.size, info.compiles, info.disk_hits) == (2, 0, 2)
    monkeypatch.setenv("FE_NO_JIT", "1")
    with pytest.raises(NotCompiledError):
        kernels.warmup([SCALE, KernelSpec.of("fe_test.scale", "kernels_for_tests:scale", "sm_80")])


def test_import_loads_nothing(outside: dict[str, str]) -> None:
    code = (
        "import sys, fe_runtime.compile as c; c.KernelSpec, c.load, c.compile_many, c.check_toolchain()\n"
        "print([n for n in ('torch', 'jax', 'cutlass', 'cuda', 'triton', 'tvm_ffi', 'filelock') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **outside})
    assert done.stdout.strip() == "[]", done.stderr
