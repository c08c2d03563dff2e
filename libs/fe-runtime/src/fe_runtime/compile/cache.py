"""Get a compiled kernel: from memory, from disk, or by compiling it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from fe_runtime import env
from fe_runtime.errors import NotCompiledError

from . import link, loader, sources, store
from .memory import CacheInfo, Table
from .spec import KernelSpec
from .store import Entry, Slot, Store
from .toolchain import ToolchainError, check_toolchain, current

if TYPE_CHECKING:
    from .cubin import ResourceUsage

__all__ = ["Origin", "cache_clear", "cache_info", "is_stored", "load", "obtain", "resource_usage"]

logger = logging.getLogger(__name__)


def load(spec: KernelSpec) -> Callable[..., Any]:
    """Return the compiled kernel: from memory, from disk, or by compiling it now.

    The function takes the present inputs, the present outputs and the runtime scalars, positionally in the order of
    the builder's arguments, and launches on the stream of the caller's environment. It may be called from any thread.

    Parameters
    ----------
    spec
        What to load. Threads and processes that ask for the same kernel at the same time compile it once.

    Raises
    ------
    NotCompiledError
        The kernel has to be compiled, and ``FE_NO_JIT=1`` forbids it or a CUDA graph is being captured.
    ToolchainError
        The kernel has to be compiled, and no usable compiler is installed; or the FFI is missing.
    Exception
        Whatever the builder or the compiler raises. Failures are not remembered.
    """
    table = _tables.get(spec.operation)
    if table is None:
        table = _tables.setdefault(spec.operation, Table())
    function: Callable[..., Any] | None = table.get(spec)
    if function is not None:
        return function
    made: Callable[..., Any] = table.get_or_make(spec, lambda: _load(spec, table))
    return made


def cache_info() -> dict[str, CacheInfo]:
    """Return the counts of the memory cache, by operation."""
    return {operation: table.info() for operation, table in sorted(_tables.items())}


def cache_clear(operation: str | None = None) -> None:
    """Forget the kernels and counts of one operation, or of all, and the prepared calls that hold them.

    What is on disk stays, and a library that was loaded stays loaded: launches of it may be in flight.
    """
    if operation is None:
        _tables.clear()
    else:
        _tables.pop(operation, None)
    for forget in on_clear:
        forget(operation)


on_clear: list[Callable[[str | None], None]] = []
"""Called by :func:`cache_clear` with its argument, by those who keep loaded kernels."""


def resource_usage(spec: KernelSpec) -> dict[str, ResourceUsage]:
    """Return registers, stack and shared memory of each GPU kernel of a spec, by symbol; compiles it if need be.

    Raises
    ------
    NotCompiledError, ToolchainError
        As for :func:`load`.
    """
    from .cubin import ResourceUsage

    entry, _ = obtain(spec)
    return {symbol: ResourceUsage(**numbers) for symbol, numbers in entry.meta["resources"].items()}


def is_stored(spec: KernelSpec) -> bool:
    """Whether a good entry for the kernel is on disk."""
    return Store(env.cache_dir()).read(_slot(spec)) is not None


class Origin(Enum):
    """Where an entry came from."""

    DISK = "disk"
    BUILT = "built"
    UNSTORED = "built, but could not be stored"


def obtain(spec: KernelSpec, *, jit: bool | None = None) -> tuple[Entry, Origin]:
    """Return the entry of a kernel from disk, or compile and store it.

    Parameters
    ----------
    spec
        What to get.
    jit
        Whether compiling is allowed; by default what ``FE_NO_JIT`` says.
    """
    slot, place = _slot(spec), Store(env.cache_dir())
    entry = place.read(slot)
    if entry is not None:
        return entry, Origin.DISK
    _refuse_to_compile(spec, env.no_jit() if jit is None else not jit)
    return _compile(slot, place, replace=False)


_tables: dict[str, Table] = {}


def _load(spec: KernelSpec, table: Table) -> Callable[..., Any]:
    entry, origin = obtain(spec)
    table.count("disk_hits" if origin is Origin.DISK else "compiles")
    place = Store(env.cache_dir())
    try:
        return loader.load_entry(entry, [place.scratch])
    except ToolchainError:
        raise
    except Exception as error:
        if origin is not Origin.DISK:
            raise
        logger.warning("The stored kernel of %s does not load (%s); it is compiled again", spec.operation, error)
        _refuse_to_compile(spec, env.no_jit())
        entry, _ = _compile(_slot(spec), place, replace=True)
    table.count("compiles")
    return loader.load_entry(entry, [place.scratch])


def _slot(spec: KernelSpec) -> Slot:
    closure = sources.source_closure(spec.builder.partition(":")[0])
    return Slot(spec, closure.digest, current())


def _compile(slot: Slot, place: Store, *, replace: bool) -> tuple[Entry, Origin]:
    """Compile under the lock of the slot, unless another process did so while this one waited."""
    check_toolchain()
    with place.locked(slot) as locked:
        if locked and not replace and (entry := place.read(slot)) is not None:
            return entry, Origin.DISK
        entry = _build(slot)
        if locked and _made_from_its_sources(slot) and place.write(slot, entry):
            return entry, Origin.BUILT
        return entry, Origin.UNSTORED


def _build(slot: Slot) -> Entry:
    from . import build  # a process that finds its kernels on disk never compiles

    built = build.build(slot.spec)
    library = link.link(built.object_file)
    files = {store.OBJECT: built.object_file} | ({store.LIBRARY: library} if library is not None else {})
    resources = {symbol: usage.as_dict() for symbol, usage in built.resources.items()}
    logger.info("compiled %s for %s in %.2f s", slot.spec.operation, slot.spec.arch, sum(built.seconds.values()))
    return store.make_entry(slot, files, resources, built.seconds)


def _made_from_its_sources(slot: Slot) -> bool:
    """Whether the code that was just compiled is that of the files whose hash is in the key."""
    closure = sources.source_closure(slot.spec.builder.partition(":")[0])
    edited = closure.edited_since_import()
    if edited:
        logger.warning(
            "%s changed after this process imported it: the kernel of %s is compiled from the old code and not "
            "stored. Start a new process to use the new code.",
            ", ".join(edited),
            slot.spec.operation,
        )
    return not edited and closure.digest == slot.sources


def _refuse_to_compile(spec: KernelSpec, no_jit: bool) -> None:
    if no_jit:
        config = ", ".join(f"{name}={value!r}" for name, value in spec.config)
        raise NotCompiledError(
            f"{spec.operation}: no compiled kernel for {spec.arch} with {config or 'its only configuration'} in "
            f"{env.cache_dir()}, and FE_NO_JIT=1 forbids compiling it now. "
            f"Build it ahead: fe compile --spec '{spec.identity}'"
        )
    if _capturing():
        raise NotCompiledError(
            f"{spec.operation}: the kernel is not compiled yet, and a CUDA graph is being captured. "
            "Warm up: make the same call once before the capture."
        )


def _capturing() -> bool:
    """Whether torch is capturing a CUDA graph on the current stream."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized()) and bool(cuda.is_current_stream_capturing())
