"""Which framework an array belongs to, found without importing any.

An array of a framework can only exist once that framework is in ``sys.modules``, so nobody needs to import it to ask.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from fe_runtime.dtypes import Framework

__all__ = [
    "detect_framework",
    "is_fake",
    "is_jax_array",
    "is_numpy_array",
    "is_plain_torch_tensor",
    "is_torch_tensor",
    "is_tracer",
]


def detect_framework(x: object) -> Framework:
    """Return ``"torch"``, ``"jax"`` (tracers too), ``"numpy"``, or ``"unknown"`` for anything else.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, recognising arrays.
    """
    if is_torch_tensor(x):
        return "torch"
    if is_jax_array(x):
        return "jax"
    if is_numpy_array(x):
        return "numpy"
    return "unknown"


def is_torch_tensor(x: object) -> bool:
    """Return whether ``x`` is a torch tensor of any kind (subclasses, fake and meta tensors too)."""
    return _is_instance(x, "torch", "Tensor")


def is_numpy_array(x: object) -> bool:
    """Return whether ``x`` is a numpy array (scalars are not arrays)."""
    return _is_instance(x, "numpy", "ndarray")


def is_jax_array(x: object) -> bool:
    """Return whether ``x`` is a jax array, a tracer, or another object of jax that stands for an array."""
    if type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return True
    return _is_instance(x, "jax", "Array")


def is_tracer(x: object) -> bool:
    """Return whether ``x`` is a jax tracer: shape and dtype are known, values and device are not."""
    core = getattr(sys.modules.get("jax"), "core", None)
    tracer = getattr(core, "Tracer", None)
    return isinstance(tracer, type) and isinstance(x, tracer)


def is_fake(x: object) -> bool:
    """Return whether ``x`` is a torch tensor without data: a FakeTensor or one on the meta device."""
    if not is_torch_tensor(x):
        return False
    return bool(cast("Any", x).is_meta) or _is_instance(x, "torch._subclasses.fake_tensor", "FakeTensor")


def is_plain_torch_tensor(x: object) -> bool:
    """Return whether a kernel may read the memory of torch tensor ``x`` directly.

    True for ``Tensor`` and ``Parameter`` themselves. False for other subclasses, meta tensors, the wrappers that
    torch.func transforms make, and lazily negated views: these have to pass through torch's dispatcher.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return False
    tensor = cast("Any", x)
    if tensor.is_meta or tensor.is_neg():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_instance(x: object, module: str, name: str) -> bool:
    # The module may be half imported in another thread, or a stand-in; then it has made no arrays.
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(x, cls)
