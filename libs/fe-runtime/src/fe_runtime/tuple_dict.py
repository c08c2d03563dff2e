"""TupleDict, the result of every wrapper: reads like a dict, unpacks like a tuple."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["TupleDict", "register_pytrees"]


class TupleDict(dict[str, Any]):
    """A dict whose iteration and integer indices give its values in the order of construction.

    Keys, ``len``, equality, ``get``, ``keys()``, ``items()`` and ``**`` are those of a dict. Positions are fixed when
    the object is made: a key added later is reached by name only, a removed key leaves a gap (iteration skips it,
    its position raises ``KeyError``).

    Examples
    --------
    >>> result = TupleDict(y=1, amax=None)
    >>> y, amax = result
    >>> result["y"], result[1], list(result)
    (1, None, [1, None])

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, TupleDict.
    """

    __slots__ = ("_order",)
    _order: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order = tuple(self.keys())

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            if not 0 <= key < len(self._order):
                raise IndexError(f"TupleDict has positions 0 to {len(self._order) - 1}; got {key}")
            key = self._order[key]
        elif isinstance(key, slice):
            raise TypeError("TupleDict has no slices; unpack it or take tuple(result)[start:stop]")
        return super().__getitem__(key)

    def __missing__(self, key: object) -> Any:
        names = ", ".join(map(str, self.keys()))
        raise KeyError(f"no key {key!r}; the keys are {names}" if names else f"no key {key!r}: the TupleDict is empty")

    def __iter__(self) -> Iterator[Any]:
        return iter([dict.__getitem__(self, key) for key in self._order if key in self])

    @classmethod
    def of(cls, names: tuple[str, ...], values: Iterable[Any]) -> TupleDict:
        """Return the TupleDict that maps each of ``names`` to its value; cheaper than the constructor."""
        result = dict.__new__(cls)
        result.update(zip(names, values))  # noqa: B905  on every warm call, where even strict=False costs
        result._order = names
        return result

    @classmethod
    def fromkeys(cls, keys: Iterable[str], value: Any = None) -> TupleDict:  # type: ignore[override]
        """Return a TupleDict that maps each of ``keys`` to ``value``."""
        return cls(dict.fromkeys(keys, value))

    def __repr__(self) -> str:
        return f"TupleDict({super().__repr__()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self), self._order)


def register_pytrees() -> None:
    """Make TupleDict a pytree node of torch and of jax, whichever of the two is loaded and does not know it yet.

    Call it where a TupleDict of their arrays is made for a caller; after the first time it costs next to nothing. A
    framework that is imported later is registered by the next call. While torch.compile traces it does nothing:
    registering is not traceable, and compiled functions return a TupleDict without it.
    """
    if not _todo or _dynamo_is_tracing():
        return
    for name in tuple(_todo):
        if name in sys.modules:
            with _lock:
                if name in _todo and _REGISTER[name](sys.modules[name]):
                    _todo.discard(name)


def _dynamo_is_tracing() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_dynamo_compiling()


def _rebuild(items: dict[str, Any], order: tuple[str, ...]) -> TupleDict:
    result = TupleDict(items)
    result._order = order
    return result


def _flatten(tree: TupleDict) -> tuple[list[Any], tuple[str, ...]]:
    return list(tree.values()), tuple(tree.keys())


def _unflatten(keys: Iterable[str], values: Iterable[Any]) -> TupleDict:
    return TupleDict(zip(keys, values, strict=True))


def _register_torch(torch: Any) -> bool:
    pytree = getattr(getattr(torch, "utils", None), "_pytree", None)
    if pytree is None:  # torch is still being imported
        return False

    def flatten_with_keys(tree: TupleDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(pytree.MappingKey(key), value) for key, value in tree.items()], tuple(tree.keys())

    pytree.register_pytree_node(
        TupleDict,
        _flatten,
        lambda values, keys: _unflatten(keys, values),
        serialized_type_name="fe_runtime.TupleDict",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )
    return True


def _register_jax(jax: Any) -> bool:
    tree_util = getattr(jax, "tree_util", None)
    if tree_util is None:  # jax is still being imported
        return False

    def flatten_with_keys(tree: TupleDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(tree_util.DictKey(key), value) for key, value in tree.items()], tuple(tree.keys())

    tree_util.register_pytree_with_keys(TupleDict, flatten_with_keys, _unflatten, _flatten)
    return True


_REGISTER = {"torch": _register_torch, "jax": _register_jax}
_todo = set(_REGISTER)
_lock = threading.Lock()
