"""The environment report: complete, guarded, and harmless."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fe_runtime import collect_env
from fe_runtime.collect_env import collect_env_info, format_report, main

SECTIONS = [
    "library versions",
    "Python and platform",
    "GPU and driver",
    "CUDA toolkit",
    "torch",
    "GPU libraries",
    "packages",
    "environment variables",
    "GPU topology",
]


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, str]]:
    return collect_env_info()


def test_sections_in_order(report: dict[str, dict[str, str]]) -> None:
    assert list(report) == SECTIONS
    for section in report.values():
        assert all(type(key) is str and type(value) is str for key, value in section.items())


def test_contents(report: dict[str, dict[str, str]]) -> None:
    import numpy
    import torch

    assert report["packages"]["numpy"] == numpy.__version__
    assert report["torch"]["torch"] == torch.__version__
    assert report["Python and platform"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "fe-runtime" in report["library versions"]
    assert report["environment variables"]["PATH"] == os.environ["PATH"]


def test_text_has_every_section_and_value(report: dict[str, dict[str, str]]) -> None:
    text = format_report(report)
    positions = [text.index(f"{title}\n{'-' * len(title)}\n") for title in SECTIONS]
    assert positions == sorted(positions)
    assert format_report({"a": {"x": "1\n2"}, "b": {}}) == "a\n-\nx: 1\n    2\n\nb\n-\n(nothing found)"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == SECTIONS


class TestGuards:
    def test_a_failing_section_becomes_a_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> dict[str, str]:
            raise ZeroDivisionError("probe")

        monkeypatch.setattr(collect_env, "_SECTIONS", {"bad": broken, "good": lambda: {"a": "1"}})
        assert collect_env_info() == {"bad": {"error": "unavailable (ZeroDivisionError: probe)"}, "good": {"a": "1"}}

    def test_missing_and_hanging_tools_become_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert collect_env._topology() == {"nvidia-smi topo -m": "no NVIDIA driver"}
        assert collect_env._gpus() == {"driver": "no NVIDIA driver"}
        assert collect_env._cuda_toolkit()["nvcc"] == "not found"

        def hang(*_: object, **__: object) -> None:
            raise subprocess.TimeoutExpired("nvidia-smi", 10)

        monkeypatch.setattr(collect_env.subprocess, "run", hang)
        assert "TimeoutExpired" in collect_env._gpus()["driver"]

    def test_without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert collect_env._torch() == {"torch": "not installed"}
        monkeypatch.setattr(collect_env, "_smi", lambda fields: f"{fields} of 0")
        assert collect_env._gpus()["gpus (nvidia-smi order)"] == "index,name,compute_cap,memory.total of 0"

    def test_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(_name: str) -> None:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(collect_env.ctypes, "CDLL", absent)
        assert collect_env._cuda_toolkit()["driver supports CUDA"] == "no NVIDIA driver"


class TestGpuLibraries:
    def test_duplicates_are_flagged(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "libnccl.so.2").touch()
            (tmp_path / folder / "libunrelated.so").touch()
        (tmp_path / "one" / "libnccl.so").symlink_to(tmp_path / "one" / "libnccl.so.2")
        (tmp_path / "two" / "libcudnn.so.9").touch()
        monkeypatch.setattr(collect_env, "_SYSTEM_FOLDERS", ())
        monkeypatch.setattr(sys, "path", [])
        folders = [str(tmp_path / name) for name in ("one", "two", "absent")]
        monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(folders))
        monkeypatch.setattr(collect_env, "_loaded_libraries", lambda: {"cudnn": ["/elsewhere/libcudnn.so.9"]})
        section = collect_env._gpu_libraries()
        first, second = (os.path.realpath(tmp_path / name / "libnccl.so.2") for name in ("one", "two"))
        assert section["nccl"] == f"DUPLICATE (on disk)\non disk: {first}\non disk: {second}"
        cudnn = os.path.realpath(tmp_path / "two" / "libcudnn.so.9")
        assert section["cudnn"] == f"loaded:  /elsewhere/libcudnn.so.9\non disk: {cudnn}"
        assert list(section) == ["cudnn", "nccl"]

    def test_the_compilers_two_flavours_are_no_duplicate(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for flavour in ("cu12", "cu13"):
            folder = tmp_path / "site-packages/nvidia_cutlass_dsl" / flavour / "lib"
            folder.mkdir(parents=True)
            (folder / "libcute_dsl_runtime.so").touch()
        monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
        monkeypatch.setattr(collect_env, "_SYSTEM_FOLDERS", ())
        monkeypatch.setattr(collect_env, "_loaded_libraries", dict)
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        lines = collect_env._gpu_libraries()["cute_dsl_runtime"].splitlines()
        assert len(lines) == 2
        assert all(line.startswith("on disk: ") for line in lines)

    def test_loaded_libraries_are_those_of_this_process(self) -> None:
        tvm_ffi = pytest.importorskip("tvm_ffi")  # only on Linux
        (path,) = collect_env._loaded_libraries()["tvm_ffi"]
        assert Path(path).is_relative_to(Path(tvm_ffi.__file__).resolve().parent)


def test_only_known_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_STRICT", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("NVIDIA_API_KEY", "hidden")
    section = collect_env._environment()
    assert section["FE_STRICT"] == "1"
    assert section["NVIDIA_API_KEY"] == "(set)"
    assert "hidden" not in str(section)
    assert "AWS_SECRET_ACCESS_KEY" not in section


def test_duplicate_distributions_are_flagged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        folder = tmp_path / version / f"nvidia_sample-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia_sample\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "1.0"), str(tmp_path / "2.0")])
    assert collect_env._packages() == {"nvidia-sample": "DUPLICATE: 1.0, 2.0"}


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fe_runtime.collect_env", "--json"], capture_output=True, text=True, check=True
    )
    assert list(json.loads(done.stdout)) == SECTIONS


def test_as_a_file_of_its_own(tmp_path: Path) -> None:
    """Without the package, and beside modules that have a framework's name, as in the package itself."""
    shutil.copy(collect_env.__file__, tmp_path / "collect_env.py")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    program = tmp_path / "collect_env.py"
    done = subprocess.run([sys.executable, program, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == SECTIONS
    assert "wrong" not in str(report)


def test_importing_it_needs_the_standard_library_only(tmp_path: Path) -> None:
    shutil.copy(collect_env.__file__, tmp_path / "collect_env.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import collect_env"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
