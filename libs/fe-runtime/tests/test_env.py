"""Environment variables are read when used, and configure() wins over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
import pytest

from fe_runtime import env

FLAGS = {
    "FE_STRICT": ("strict", env.strict),
    "FE_NO_JIT": ("no_jit", env.no_jit),
    "FE_CHECK_DEVICE_VALUES": ("check_device_values", env.check_device_values),
    "FE_SILENCE_EXPERIMENTAL": ("silence_experimental", env.silence_experimental),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (*FLAGS, "FE_CACHE_DIR", "FE_CACHE_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    yield
    env.configure(**dict.fromkeys((*(option for option, _ in FLAGS.values()), "cache_dir", "cache_size")))


@pytest.mark.parametrize("variable", FLAGS)
class TestFlags:
    @pytest.mark.parametrize(
        ("text", "value"),
        [("", False), ("0", False), ("false", False), (" No ", False), ("OFF", False), ("1", True), ("yes", True)],
    )
    def test_texts(self, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: bool) -> None:
        read = FLAGS[variable][1]
        assert read() is False
        monkeypatch.setenv(variable, text)
        assert read() is value

    def test_configure_wins_until_none(self, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        option, read = FLAGS[variable]
        monkeypatch.setenv(variable, "1")
        env.configure(**{option: False})
        assert read() is False
        env.configure(**{option: None})
        assert read() is True


@pytest.mark.parametrize(("text", "size"), [(None, 256), ("7", 7), ("0", 1), ("-3", 1), ("many", 256), ("", 256)])
def test_cache_size(monkeypatch: pytest.MonkeyPatch, text: str | None, size: int) -> None:
    if text is not None:
        monkeypatch.setenv("FE_CACHE_SIZE", text)
    assert env.cache_size() == size
    env.configure(cache_size=3)
    assert env.cache_size() == 3


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert env.cache_dir() == Path(platformdirs.user_cache_dir("fe", appauthor=False))
    monkeypatch.setenv("FE_CACHE_DIR", "~/cache")
    assert env.cache_dir() == Path.home() / "cache"
    env.configure(cache_dir=tmp_path)
    assert env.cache_dir() == tmp_path


def test_unknown_options_change_nothing() -> None:
    with pytest.raises(TypeError, match="unknown option 'strickt'; the options are cache_dir, "):
        env.configure(strict=True, strickt=True)
    assert env.strict() is False


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("strict", "0", TypeError),
        ("no_jit", 1, TypeError),
        ("cache_size", "3", TypeError),
        ("cache_size", True, TypeError),
        ("cache_size", 0, ValueError),
        ("cache_dir", 3, TypeError),
    ],
)
def test_wrong_values_change_nothing(name: str, value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"configure: {name} must be "):
        env.configure(check_device_values=True, **{name: value})
    assert env.check_device_values() is False


def test_every_variable_is_in_the_table() -> None:
    readers: list[Callable[[], object]] = [read for _, read in FLAGS.values()]
    others = {"cache_dir", "cache_size", "configure", "DEFAULT_CACHE_SIZE", "switch", "text"}
    assert {reader.__name__ for reader in readers} | others == set(env.__all__)
    for variable in (*FLAGS, "FE_CACHE_DIR", "FE_CACHE_SIZE"):
        assert f"``{variable}``" in (env.__doc__ or "")


@pytest.mark.parametrize(("value", "on"), [("1", True), ("yes", True), ("0", False), ("off", False), (" ", False)])
def test_a_switch_of_another_library(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER_SWITCH", value)
    assert env.switch("PEER_SWITCH") is on
    assert env.text("PEER_SWITCH") == value.strip()
    assert (env.switch("PEER_OTHER"), env.text("PEER_OTHER")) == (False, "")
