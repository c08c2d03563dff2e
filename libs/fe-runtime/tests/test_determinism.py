"""The determinism matrix with a dummy operation: the keyword, torch's switch, and whether there is a path."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from fe_runtime.determinism import resolve
from fe_runtime.errors import DeterminismError, NotSupportedError

Switch = Literal["off", "strict", "warn"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def turn(switch: Switch) -> None:
    torch.use_deterministic_algorithms(switch != "off", warn_only=switch == "warn")


def dummy(deterministic: bool | None, has_path: bool, default: bool | None = None, framework: str = "torch") -> bool:
    return resolve(
        "dummy",
        deterministic,
        has_path=has_path,
        default=default,
        framework=framework,
        output="dbias",
        reason="blocks add into it",
    )


SWITCHES: list[Switch] = ["off", "strict", "warn"]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("default", [None, False])
class TestWhateverTheSwitch:
    def test_true_with_a_path(self, switch: Switch, default: bool | None) -> None:
        turn(switch)
        assert dummy(True, has_path=True, default=default) is True

    def test_true_without_a_path(self, switch: Switch, default: bool | None) -> None:
        turn(switch)
        with pytest.raises(NotSupportedError, match=r"dummy: deterministic must be None or False; got True.*dbias"):
            dummy(True, has_path=False, default=default)

    def test_other_frameworks_have_no_switch(self, switch: Switch, default: bool | None) -> None:
        turn(switch)
        for framework in ("jax", "numpy"):
            assert dummy(None, has_path=False, default=default, framework=framework) is False
            assert dummy(None, has_path=True, default=default, framework=framework) is False
            assert dummy(True, has_path=True, default=default, framework=framework) is True


@pytest.mark.parametrize("has_path", [True, False])
class TestDeclined:
    @pytest.mark.parametrize("switch", SWITCHES)
    def test_false_opts_out_where_none_is_the_default(self, switch: Switch, has_path: bool) -> None:
        turn(switch)
        assert dummy(False, has_path) is False

    def test_false_cannot_be_told_from_a_default_of_false(self, has_path: bool) -> None:
        turn("off")
        assert dummy(False, has_path, default=False) is False
        turn("strict")
        if has_path:
            assert dummy(False, has_path, default=False) is True
        else:
            with pytest.raises(DeterminismError, match="choose another operation"):
                dummy(False, has_path, default=False)


class TestNotGiven:
    @pytest.mark.parametrize("has_path", [True, False])
    def test_switch_off(self, has_path: bool) -> None:
        turn("off")
        assert dummy(None, has_path) is False

    @pytest.mark.parametrize("switch", ["strict", "warn"])
    def test_switch_on_with_a_path(self, switch: Switch) -> None:
        turn(switch)
        assert dummy(None, has_path=True) is True

    def test_strict_without_a_path(self) -> None:
        turn("strict")
        text = r"dummy: dbias is not deterministic \(blocks add into it\).*warn_only=True, or pass deterministic=False"
        with pytest.raises(DeterminismError, match=text) as caught:
            dummy(None, has_path=False)
        assert isinstance(caught.value, RuntimeError)

    def test_warn_only_without_a_path(self) -> None:
        turn("warn")
        with pytest.warns(RuntimeWarning, match="dummy: dbias is not deterministic") as caught:
            assert dummy(None, has_path=False) is False
        assert caught[0].filename == __file__  # the warning points at the user's line, not into the library

    def test_warned_once_per_call_site(self) -> None:
        turn("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                dummy(None, has_path=False)
                dummy(None, has_path=False)
        assert len(caught) == 1  # both lines above meet in the helper's line
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                resolve("first", None, has_path=False)
                resolve("second", None, has_path=False)
        assert len(caught) == 2

    def test_the_switch_is_read_at_each_call(self) -> None:
        for switch, expected in (("off", False), ("strict", True), ("off", False)):
            turn(switch)  # type: ignore[arg-type]
            assert dummy(None, has_path=True) is expected


@pytest.mark.parametrize("wrong", [0, 1, "true", 1.0])
def test_other_kinds_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="dummy: deterministic must be True, False or None"):
        dummy(wrong, has_path=True)  # type: ignore[arg-type]


def test_torch_is_not_imported_to_ask() -> None:
    program = (
        "import sys; from fe_runtime.determinism import resolve; "
        "assert resolve('op', None, has_path=True) is False; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
