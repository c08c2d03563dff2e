"""Where an array lives: a small value that compares and prints alike for every framework."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Device", "as_device"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``str(Device("cuda", 0))`` is ``"cuda:0"``, ``str(Device("cpu"))`` is ``"cpu"``.

    ``type`` is ``"cuda"`` for every NVIDIA GPU whatever the framework calls it, ``"unknown"`` where it cannot be told
    (jax tracers, foreign arrays that say nothing). ``index`` is the CUDA ordinal of this process.
    """

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def as_device(device: object) -> Device:
    """Return the :class:`Device` for a name, a torch or jax device, or anything with ``type`` and ``index``.

    Parameters
    ----------
    device
        A ``Device``, a string such as ``"cuda:1"``, a ``torch.device`` or a jax device.

    Raises
    ------
    TypeError
        ``device`` names no device.
    """
    if isinstance(device, Device):
        return device
    try:
        return _converted[device]
    except KeyError:
        return _converted.setdefault(device, _convert(device))
    except TypeError:  # not hashable
        return _convert(device)


# Devices are few and live as long as the process; torch.device and strings are hashable values.
_converted: dict[object, Device] = {}


def _convert(device: object) -> Device:
    if isinstance(device, str):
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?", device)
        if match:
            return _device(match[1], match[2] and int(match[2]))
    elif isinstance(platform := getattr(device, "platform", None), str):  # jax
        # ``id`` counts over all processes of a multi-host run; the ordinal in this process is what CUDA understands.
        on_gpu = platform in ("gpu", "cuda")
        ordinal = getattr(device, "local_hardware_id", None) if on_gpu else None
        return _device(platform, getattr(device, "id", None) if ordinal is None else ordinal)
    elif isinstance(kind := getattr(device, "type", None), str):  # torch, tvm-ffi
        return _device(kind, None if kind == "cpu" else getattr(device, "index", None))
    raise TypeError(f"device must be a device or a name such as 'cuda:0'; got {device!r} ({type(device).__name__})")


def _device(kind: str, index: object) -> Device:
    return Device("cuda" if kind == "gpu" else kind, index if isinstance(index, int) else None)
