"""Lazy public names: cached, listed, never hidden by a submodule, and clear when a dependency is missing or too old."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILES = {
    "__init__.py": """
        from fe_runtime._lazy import lazy_exports
        __getattr__, __dir__, __all__ = lazy_exports(__name__, {
            "rms_norm": "fe_sample.rms_norm:rms_norm",        # shares its name with the submodule it comes from
            "softmax": "fe_sample.functions:softmax",         # shares its name with another submodule
            "functions": "fe_sample.functions",               # is a submodule
            "LIMIT": "fe_sample.functions:LIMIT",
            "on_torch": "fe_sample.bridge:on_torch",
            "on_dsl": "fe_sample.kernels:on_dsl",
            "on_other": "fe_sample.other:on_other",
            "gone": "fe_sample.functions:gone",
        })
    """,
    "rms_norm.py": "def rms_norm(): return 'norm'",
    "functions.py": "LIMIT = 3\ndef softmax(): return 'softmax'",
    "softmax.py": "HELPER = 1",
    "user.py": "from fe_sample import rms_norm, softmax",
    "bridge.py": "import torch\ndef on_torch(): pass",
    "kernels.py": "import cutlass.not_there_yet",
    "other.py": "import surely_not_installed",
}


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Import a fresh copy of a small library at each call."""
    folder = tmp_path / "fe_sample"
    folder.mkdir()
    for name, text in FILES.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (folder / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fresh() -> ModuleType:
        forget()
        return importlib.import_module("fe_sample")

    yield fresh
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fe_sample"]:
        del sys.modules[name]


class TestNames:
    def test_nothing_loads_before_it_is_used(self, sample: Callable[[], ModuleType]) -> None:
        module = sample()
        assert [name for name in sys.modules if name.startswith("fe_sample.")] == []
        assert module.LIMIT == 3
        assert "fe_sample.rms_norm" not in sys.modules

    def test_a_loaded_name_is_kept(self, sample: Callable[[], ModuleType]) -> None:
        module = sample()
        assert "LIMIT" not in vars(module)
        assert module.softmax is module.softmax
        assert vars(module)["softmax"] is module.softmax

    def test_listed(self, sample: Callable[[], ModuleType]) -> None:
        module = sample()
        names = {"rms_norm", "softmax", "functions", "LIMIT", "on_torch", "on_dsl", "on_other", "gone"}
        assert set(module.__all__) == names
        assert names <= set(dir(module))
        assert "__name__" in dir(module)

    def test_a_submodule_can_be_exported(self, sample: Callable[[], ModuleType]) -> None:
        assert sample().functions.LIMIT == 3

    def test_unknown_names(self, sample: Callable[[], ModuleType]) -> None:
        module = sample()
        assert not hasattr(module, "nothing")
        with pytest.raises(AttributeError, match="module 'fe_sample' has no attribute 'nothing'"):
            module.nothing  # noqa: B018
        with pytest.raises(AttributeError, match="gone"):
            module.gone  # noqa: B018

    def test_other_attributes_can_be_set(self, sample: Callable[[], ModuleType]) -> None:
        module = sample()
        module.rms_norm = len
        assert module.rms_norm is len


# Every way in which the names can come into being; each permutation must leave the callables reachable.
STEPS: dict[str, Callable[[], Any]] = {
    "import the submodule": lambda: importlib.import_module("fe_sample.rms_norm"),
    "import the unrelated submodule": lambda: importlib.import_module("fe_sample.softmax"),
    "read the names": lambda: [getattr(sys.modules["fe_sample"], name) for name in ("rms_norm", "softmax")],
    "from-import": lambda: importlib.import_module("fe_sample.user"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids=lambda order: " > ".join(order))
def test_a_callable_is_never_hidden_by_a_submodule(sample: Callable[[], ModuleType], order: tuple[str, ...]) -> None:
    module = sample()
    for step in order:
        STEPS[step]()
        assert module.rms_norm() == "norm"
        assert module.softmax() == "softmax"
    user = importlib.import_module("fe_sample.user")
    assert (user.rms_norm, user.softmax) == (module.rms_norm, module.softmax)
    assert sys.modules["fe_sample.softmax"].HELPER == 1  # the submodule itself is untouched


def test_submodules_imported_before_the_exports_are_declared(sample: Callable[[], ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "fe_sample" / "__init__.py"
    path.write_text("import fe_sample.rms_norm, fe_sample.softmax\n" + path.read_text())
    module = sample()
    assert module.rms_norm() == "norm"
    assert module.softmax() == "softmax"


class TestDependencies:
    def test_missing(self, sample: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        text = r"fe_sample\.on_torch needs torch, which is not installed\. Run: pip install 'fe-sample\[torch\]'"
        with pytest.raises(ImportError, match=text) as caught:
            sample().on_torch  # noqa: B018
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)
        assert caught.value.name == "torch"

    def test_missing_hard_dependency(self, sample: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cutlass", None)
        with pytest.raises(ImportError, match=r"nvidia-cutlass-dsl, which is not installed\. Run: pip install"):
            sample().on_dsl  # noqa: B018

    def test_too_old(self, sample: Callable[[], ModuleType]) -> None:
        text = (
            r"needs nvidia-cutlass-dsl\[cu13\]\S+; nvidia-cutlass-dsl [\d.]+ is installed and does not fit .*--upgrade"
        )
        with pytest.raises(ImportError, match=text) as caught:
            sample().on_dsl  # noqa: B018
        assert "not_there_yet" in str(caught.value)

    def test_unrelated_failures_are_left_alone(self, sample: Callable[[], ModuleType]) -> None:
        with pytest.raises(ModuleNotFoundError, match=r"^No module named 'surely_not_installed'$"):
            sample().on_other  # noqa: B018
