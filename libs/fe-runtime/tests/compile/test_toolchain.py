"""Recognising missing, old, mixed and incomplete compilers, and choosing the runtime library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fe_runtime.compile import ToolchainError, check_toolchain, toolchain
from fe_runtime.errors import NotSupportedError

PARTS = ("", "_libs_base", "_libs_core", "_libs_cu12")
Site = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Install made-up distributions and flavours of the runtime library, and nothing else."""
    monkeypatch.setattr(toolchain, "_find_spec", _find_spec_in(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(toolchain, "_driver_cuda_major", lambda: None)
    toolchain.current.cache_clear()

    def install(versions: dict[str, str], flavours: tuple[int, ...] = (12,), driver: int | None = None) -> None:
        for name, version in versions.items():
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
        for flavour in flavours:
            library = tmp_path / f"nvidia_cutlass_dsl/cu{flavour}/lib/libcute_dsl_runtime.so"
            library.parent.mkdir(parents=True)
            library.touch()
        if any(name.startswith("nvidia") for name in versions):
            (tmp_path / "cutlass").mkdir()
        monkeypatch.setattr(toolchain, "_driver_cuda_major", lambda: driver)
        toolchain.current.cache_clear()

    return install


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    toolchain.current.cache_clear()


def _find_spec_in(folder: Path) -> Callable[[str], object]:
    class Spec:
        def __init__(self, path: Path) -> None:
            self.submodule_search_locations = [str(path)]

    return lambda name: Spec(folder / name) if (folder / name).is_dir() else None


def dsl(version: str, **changed: str) -> dict[str, str]:
    versions = {f"nvidia_cutlass_dsl{part}": version for part in PARTS} | {"apache_tvm_ffi": "0.1.15"}
    return versions | changed


def test_a_good_installation(site: Site) -> None:
    site(dsl("4.8.1"), flavours=(12, 13))
    found = check_toolchain()
    assert dict(found.dsl)["nvidia-cutlass-dsl-libs-core"] == "4.8.1"
    assert (found.tvm_ffi, found.cuda) == ("0.1.15", 13)


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        pytest.param({"apache_tvm_ffi": "0.1.15"}, ["nvidia-cutlass-dsl is not installed"], id="missing"),
        pytest.param(dsl("4.2.0"), ["4.2.0 is too old", "4.8.1 or newer", "uninstall"], id="too old"),
        pytest.param(
            dsl("4.8.1", nvidia_cutlass_dsl_libs_core="4.8.0"),
            ["differ in version", "libs-core 4.8.0", "uninstall"],
            id="mixed",
        ),
        pytest.param(
            {"nvidia_cutlass_dsl": "4.8.1", "apache_tvm_ffi": "0.1.15"}, ["incomplete", "uninstall"], id="incomplete"
        ),
        pytest.param(
            {name: version for name, version in dsl("4.8.1").items() if name != "apache_tvm_ffi"},
            ["apache-tvm-ffi", "not installed"],
            id="no tvm-ffi",
        ),
    ],
)
def test_a_bad_installation_is_explained(site: Site, versions: dict[str, str], words: list[str]) -> None:
    site(versions)
    with pytest.raises(ToolchainError) as caught:
        check_toolchain()
    text = str(caught.value)
    assert all(word in text for word in [*words, "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1"]), text


def test_the_error_is_both_kinds() -> None:
    error = ToolchainError("why")
    assert isinstance(error, NotSupportedError)
    assert isinstance(error, ImportError)
    assert isinstance(error, RuntimeError)
    assert (str(error), error.reason) == ("why", "why")


@pytest.mark.parametrize(("driver", "chosen"), [(None, 13), (13, 13), (12, 12)])
def test_flavour_follows_the_driver(site: Site, driver: int | None, chosen: int) -> None:
    site(dsl("4.8.1"), flavours=(12, 13), driver=driver)
    found = check_toolchain()
    assert found.cuda == chosen
    assert f"cu{chosen}" in str(found.runtime_library)


def test_driver_too_old_for_every_flavour(site: Site) -> None:
    site(dsl("4.8.1"), flavours=(13,), driver=12)
    with pytest.raises(ToolchainError, match="the driver supports CUDA 12"):
        check_toolchain()


def test_runtime_library_without_any_distribution(site: Site) -> None:
    """A slim image: kernels cannot be compiled, but those of any compiler can be used."""
    site({"apache_tvm_ffi": "0.1.15"}, flavours=(13,))
    found = toolchain.current()
    assert found.problem is not None
    assert found.runtime_library is not None
    facts = {**found.facts, "dsl": {"nvidia-cutlass-dsl": "9.9"}}
    assert found.accepts(facts)
    for name, value in (("tvm_ffi", "0.2"), ("cuda", 12), ("platform", "linux-other"), ("settings", {"A": "1"})):
        assert not found.accepts({**facts, name: value}), name


def test_a_compiler_accepts_only_its_own(site: Site) -> None:
    site(dsl("4.8.1"))
    found = toolchain.current()
    assert found.accepts(dict(found.facts))
    assert not found.accepts({**found.facts, "dsl": {"nvidia-cutlass-dsl": "4.8.2"}})


def test_settings_that_change_the_code_count(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site(dsl("4.8.1"))
    plain = toolchain.current()
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    monkeypatch.setenv("CUTE_DSL_CACHE_DIR", "/anywhere")
    toolchain.current.cache_clear()
    asserting = toolchain.current()
    assert asserting.label != plain.label
    assert dict(asserting.settings) == {"CUTE_DSL_ENABLE_ASSERTIONS": "1"}
    assert not plain.accepts(asserting.facts)


def test_first_on_the_path_wins(site: Site, tmp_path: Path) -> None:
    site(dsl("4.8.1"))
    later = tmp_path / "later"
    (later / "nvidia_cutlass_dsl-4.0.0.dist-info").mkdir(parents=True)
    sys.path.append(str(later))
    toolchain.current.cache_clear()
    assert toolchain.current().problem is None


def test_import_hooks_that_forbid_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbid:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == "cutlass":
                raise ModuleNotFoundError(name)

    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Forbid(), *sys.meta_path])
    toolchain.current.cache_clear()
    assert "incomplete" in str(toolchain.current().problem)


def test_the_real_installation_is_usable() -> None:
    found = check_toolchain()
    assert found.runtime_library is not None
    assert found.runtime_library.exists()
