"""Which stream a call runs on, from every form in which callers name one."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from fe_runtime.arrays.recognition import is_torch_tensor
from fe_runtime.device import Device, as_device
from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["StreamGuard", "StreamRequest", "default_stream", "on_default_stream", "on_stream", "resolve_stream"]

_LEGACY_DEFAULT, _PER_THREAD_DEFAULT = 1, 2  # values of cudaStream_t with a fixed meaning; 0 is the first one too


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A stream that the caller asked for explicitly.

    ``handle`` is the raw ``cudaStream_t``, ``torch_stream`` the ``torch.cuda.Stream`` for torch operands.
    """

    handle: int
    device: Device
    torch_stream: object | None = None


def resolve_stream(stream: object, framework: str, device: object, argument: str = "stream") -> StreamRequest | None:
    """Turn the caller's ``stream`` argument into a request.

    Parameters
    ----------
    stream
        ``None``, a ``torch.cuda.Stream``, a raw handle (int or anything with ``__int__``, such as the driver's
        ``CUstream``), or an object with ``__cuda_stream__``.
    framework
        Framework of the operands.
    device
        Device of the operands.
    argument
        Name of the parameter in error texts.

    Returns
    -------
    StreamRequest | None
        ``None``: the framework's own choice (torch: the current stream of the operands' device; others: the legacy
        default stream), or the operands are not on a GPU. Handles 0 and 1 are the legacy default stream and override
        torch's current stream.

    Raises
    ------
    TypeError
        ``stream`` is none of these forms.
    InvalidArgumentError
        A stream of another device, a negative handle, or the per-thread default stream (2) with torch operands.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, streams.
    """
    if stream is None:
        return None
    where = as_device(device)
    handle, owner = _handle_and_device(stream, argument)
    if owner is not None and owner != where:
        rule = f"belong to the operands' device {where}"
        raise InvalidArgumentError(explain("resolve_stream", argument, rule, f"a stream of {owner}"))
    if handle < 0:
        raise InvalidArgumentError(explain("resolve_stream", argument, "be a handle >= 0", handle))
    if framework == "torch" and handle == _PER_THREAD_DEFAULT:
        fix = "torch cannot express the per-thread default stream; pass a torch.cuda.Stream."
        raise InvalidArgumentError(explain("resolve_stream", argument, "not be handle 2", handle, fix))
    if where.type != "cuda":
        return None
    handle = 0 if handle == _LEGACY_DEFAULT else handle
    return StreamRequest(handle, where, _torch_stream(stream, handle, where) if framework == "torch" else None)


class StreamGuard:
    """What :func:`on_stream` hands to its block: tells torch's allocator which arrays the stream uses."""

    def __init__(self, torch_stream: object | None) -> None:
        self._torch_stream = torch_stream

    def record(self, arrays: Iterable[object]) -> None:
        """Keep the memory of these arrays from being reused before the stream's work so far is done."""
        if self._torch_stream is None:
            return
        for array in arrays:
            if is_torch_tensor(array) and cast("Any", array).is_cuda:
                cast("Any", array).record_stream(self._torch_stream)


@contextmanager
def on_stream(request: StreamRequest | None, arrays: Iterable[object] = ()) -> Iterator[StreamGuard]:
    """Run a block on the requested stream; the caller's current stream and device are restored afterwards.

    Parameters
    ----------
    request
        From :func:`resolve_stream`; ``None`` runs the block where it is.
    arrays
        Operands and caller-owned outputs of the launch (``None`` entries are passed over). They are recorded before
        the block enqueues anything, so that a copy made inside it is covered too. What the block allocates belongs
        to the stream already.
    """
    guard = StreamGuard(None if request is None else request.torch_stream)
    guard.record(arrays)
    with nullcontext() if request is None else _current(request):
        yield guard


def on_default_stream(run: Callable[..., object], device: object) -> Callable[..., object]:
    """Return ``run`` for arrays of frameworks without a current stream: always on the legacy default stream.

    Otherwise a kernel would run on whatever stream the last caller of a kernel in this thread left behind.
    """
    where = as_device(device)
    if where.type != "cuda":
        return run
    request = StreamRequest(0, where)

    def on_default(*operands: object) -> None:
        with _current(request):
            run(*operands)

    return on_default


def default_stream(framework: str, device: object) -> int:
    """Return the raw handle of the stream that a call without a ``stream`` argument uses."""
    if framework != "torch" or as_device(device).type != "cuda":
        return 0
    import torch

    return int(torch.cuda.current_stream(str(as_device(device))).cuda_stream)


def _current(request: StreamRequest) -> AbstractContextManager[object]:
    """Return the guard that makes the stream current for the framework, or for kernels on foreign arrays."""
    guard: AbstractContextManager[object]
    if request.torch_stream is not None:
        import torch

        guard = torch.cuda.stream(cast("torch.cuda.Stream", request.torch_stream))
    else:
        import tvm_ffi

        guard = tvm_ffi.use_raw_stream(tvm_ffi.device(str(request.device)), request.handle)
    return guard


def _handle_and_device(stream: object, argument: str) -> tuple[int, Device | None]:
    """Return the raw handle, and the device where the stream object tells it."""
    torch: Any = sys.modules.get("torch")
    generic = getattr(torch, "Stream", None)
    if isinstance(generic, type) and isinstance(stream, generic):
        return _torch_handle(torch, stream), as_device(cast("Any", stream).device)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return operator.index((protocol() if callable(protocol) else protocol)[1]), None
    if _is_handle(stream):
        return int(cast("Any", stream)), None
    rule = "be None, a torch.cuda.Stream, an integer handle, or an object with __cuda_stream__ or __int__"
    raise TypeError(explain("resolve_stream", argument, rule, f"{stream!r} ({type(stream).__name__})"))


def _is_handle(stream: object) -> bool:
    # Many things have __int__ that are no handle: bool, float, Decimal, arrays of one element and numpy scalars.
    if isinstance(stream, numbers.Number):
        return isinstance(stream, numbers.Integral) and not isinstance(stream, bool)
    return hasattr(stream, "__int__") and not hasattr(stream, "dtype")


def _torch_handle(torch: Any, stream: Any) -> int:
    if stream.device.type != "cuda":
        return 0
    if not hasattr(stream, "cuda_stream"):  # the device-neutral torch.Stream
        stream = _as_cuda_stream(torch, stream)
    return int(stream.cuda_stream)


def _as_cuda_stream(torch: Any, stream: Any) -> Any:
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _torch_stream(stream: object, handle: int, device: Device) -> object:
    import torch

    if handle == 0:
        return torch.cuda.default_stream(str(device))
    if isinstance(stream, torch.cuda.Stream):
        return stream
    if isinstance(stream, torch.Stream):
        return _as_cuda_stream(torch, stream)
    current = torch.cuda.current_stream(str(device))
    if current.cuda_stream == handle:
        return current
    external: Any = torch.cuda.ExternalStream  # torch leaves it untyped
    return cast("object", external(handle, device=str(device)))
