"""The table of one operation: least recently used goes first, one maker per key, failures are not kept."""

from __future__ import annotations

import threading
import time

import pytest

from fe_runtime.compile.memory import Table


@pytest.fixture
def table() -> Table:
    return Table()


def test_bound_and_order(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FE_CACHE_SIZE", "3")
    for key in "abc":
        table.get_or_make(key, lambda key=key: key.upper())
    assert table.get("a") == "A"  # now "b" is the oldest
    table.get_or_make("d", lambda: "D")
    assert [table.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    assert table.info().size == 3


def test_counts(table: Table) -> None:
    table.get_or_make("a", lambda: 1)
    table.get_or_make("a", lambda: pytest.fail("it was there"))
    table.get("a")
    info = table.info()
    assert (info.hits, info.misses, info.size) == (2, 1, 1)


def test_sixteen_threads_make_once(table: Table) -> None:
    made = []
    barrier = threading.Barrier(16)
    got = []

    def make() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    def ask() -> None:
        barrier.wait()
        got.append(table.get_or_make("a", make))

    run([ask] * 16)
    assert len(made) == 1
    assert got == made * 16
    assert table.info().misses == 1


def test_other_keys_do_not_wait(table: Table) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert release.wait(10)
        return "slow"

    thread = threading.Thread(target=lambda: table.get_or_make("a", slow))
    thread.start()
    assert started.wait(10)
    assert table.get_or_make("b", lambda: "fast") == "fast"
    release.set()
    thread.join()
    assert table.get("a") == "slow"


def test_failure_belongs_to_the_thread_that_met_it(table: Table) -> None:
    """The first maker fails; a thread that waited for it makes the value itself."""
    calls = []
    results: list[object] = []
    waiting = threading.Event()

    def make() -> str:
        calls.append(threading.get_ident())
        if len(calls) == 1:
            assert waiting.wait(10)
            time.sleep(0.05)  # the other thread is on its way into the table
            raise KeyboardInterrupt
        return "value"

    def first() -> None:
        try:
            table.get_or_make("a", make)
        except KeyboardInterrupt as error:
            results.append(error)

    def second() -> None:
        while not calls:
            time.sleep(0.001)
        waiting.set()
        results.append(table.get_or_make("a", make))

    run([first, second])
    assert len(calls) == 2
    assert {type(result) for result in results} == {KeyboardInterrupt, str}


def test_failure_is_not_kept(table: Table) -> None:
    with pytest.raises(ZeroDivisionError):
        table.get_or_make("a", lambda: 1 // 0)
    assert table.get_or_make("a", lambda: 7) == 7


def run(targets: list) -> None:  # type: ignore[type-arg]
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
