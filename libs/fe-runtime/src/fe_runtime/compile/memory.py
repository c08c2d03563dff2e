"""The compiled kernels of one operation that this process holds: bounded, thread-safe, one maker per key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from fe_runtime import env

__all__ = ["CacheInfo", "Table"]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What happened in one operation's table since the process started or the table was cleared.

    ``misses`` counts searches that memory could not answer. Each ended in a disk hit, a compile or an error.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    disk_hits: int = 0
    size: int = 0


class Table:
    """Least-recently-used table, at most ``env.cache_size()`` entries, whose missing values are made by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._pending: dict[Hashable, threading.Event] = {}
        self._counts = dict.fromkeys(("hits", "misses", "compiles", "disk_hits"), 0)

    def get(self, key: Hashable) -> Any | None:
        """Return the value, now the most recently used one, or ``None``."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                self._counts["hits"] += 1
            return value

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value, calling ``make`` in exactly one thread if it is not there.

        The other threads wait. When ``make`` raises, the error belongs to the thread that called it: nothing is
        stored, and each waiting thread tries for itself, since what failed may depend on the thread (a stream being
        captured, an interrupt).
        """
        while (value := self.get(key)) is None:
            with self._lock:
                if key in self._entries:
                    continue
                event = self._pending.get(key)
                if event is None:
                    mine = self._pending[key] = threading.Event()
                    self._counts["misses"] += 1
            if event is None:
                return self._make(key, make, mine)
            event.wait()
        return value

    def count(self, what: str) -> None:
        """Add one to ``"compiles"`` or ``"disk_hits"``."""
        with self._lock:
            self._counts[what] += 1

    def info(self) -> CacheInfo:
        """Return the counts."""
        with self._lock:
            return CacheInfo(size=len(self._entries), **self._counts)

    def _make(self, key: Hashable, make: Callable[[], Any], mine: threading.Event) -> Any:
        try:
            value = make()
            self._insert(key, value)
            return value
        finally:
            with self._lock:
                del self._pending[key]
            mine.set()

    def _insert(self, key: Hashable, value: Any) -> None:
        bound = env.cache_size()
        with self._lock:
            self._entries[key] = value
            while len(self._entries) > bound:
                self._entries.popitem(last=False)
