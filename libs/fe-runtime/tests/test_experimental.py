"""The experimental note: once per name and process, through logging."""

import logging
import threading
import warnings
from collections.abc import Iterator

import pytest

from fe_runtime import env, experimental
from fe_runtime.experimental import class_logger, warn_experimental


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FE_SILENCE_EXPERIMENTAL", raising=False)
    experimental._reset_experimental_api_warning_registry()
    yield
    experimental._reset_experimental_api_warning_registry()


def test_once_per_name(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it must not come through the warnings module
        for _ in range(3):
            warn_experimental("OpA")
            warn_experimental("OpB")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("OpA", "WARNING", "OpA is an experimental API"),
        ("OpB", "WARNING", "OpB is an experimental API"),
    ]


def test_reset(caplog: pytest.LogCaptureFixture) -> None:
    warn_experimental("OpA")
    experimental._reset_experimental_api_warning_registry()
    warn_experimental("OpA")
    assert len(caplog.records) == 2


def test_muted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_SILENCE_EXPERIMENTAL", "1")
    warn_experimental("OpA")
    monkeypatch.delenv("FE_SILENCE_EXPERIMENTAL")
    env.configure(silence_experimental=True)
    try:
        warn_experimental("OpA")
    finally:
        env.configure(silence_experimental=None)
    assert not caplog.records
    warn_experimental("OpA")
    assert len(caplog.records) == 1


def test_once_among_threads(caplog: pytest.LogCaptureFixture) -> None:
    barrier = threading.Barrier(16)

    def work() -> None:
        barrier.wait()
        warn_experimental("OpA")

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


def test_no_handlers_are_installed() -> None:
    logger = class_logger("OpA")
    assert logger is logging.getLogger("OpA")
    assert logger.handlers == []
