"""An operation as a ``torch.library`` op: the schema, the kernels and the fake kernel, all from its contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, register_fake, register_vmap

from fe_runtime.dtypes import framework_dtype
from fe_runtime.plan import check_backend

from .autograd import as_tuple, differentiable
from .vmap import vmap_rule

if TYPE_CHECKING:
    from fe_runtime.contract import Contract, Option, OutputSpec
    from fe_runtime.operation import Operation

__all__ = ["register", "schema", "split_arguments"]

_libraries: dict[str, Library] = {}
_lock = threading.Lock()


def register(operation: Operation) -> None:
    """Make ``torch.ops.<library>.<operation>``; a later operation of the same name takes its place."""
    name = f"{operation.library}::{operation.name}"
    with _lock:
        if name in _libraries:
            _libraries.pop(name)._destroy()
        library = _libraries[name] = Library(operation.library, "FRAGMENT")
        library.define(operation.name + schema(operation.contract), tags=_tags(operation.contract))
        operation.torch_op = getattr(getattr(torch.ops, operation.library), operation.name).default
        library.impl(operation.name, _kernel(operation), "CompositeExplicitAutograd")
        register_fake(name, _fake_kernel(operation), lib=library)
        register_vmap(name, vmap_rule(operation, split_arguments), lib=library)
        library.impl(operation.name, _autograd_kernel(operation), "Autograd", with_keyset=True)


def schema(contract: Contract) -> str:
    """Return the op's signature: tensors by position, options and ``backend`` by keyword.

    Examples
    --------
    ``(Tensor x, Tensor? w=None, *, float eps=1e-05, str? dtype=None, str backend="auto") -> (Tensor y, Tensor amax)``
    """
    required = [number for number, declared in enumerate(contract.inputs) if not declared.optional]
    last = max(required, default=-1)
    tensors = [
        f"{_tensor(contract, number)} {declared.name}{'=None' if number > last else ''}"
        for number, declared in enumerate(contract.inputs)
    ]
    options = [*map(_option, contract.options), 'str backend="auto"']
    results = ", ".join(f"Tensor {name}" for name in contract.output_names)
    single = len(contract.outputs) == 1
    return f"({', '.join([*tensors, '*', *options])}) -> {'Tensor' if single else f'({results})'}"


def split_arguments(
    operation: Operation, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, object], str]:
    """Return arrays, options and backend of a call as the dispatcher hands it over: without the defaults."""
    contract = operation.contract
    missing = len(contract.inputs) - len(arguments)
    options = {option.name: keywords.get(option.name, option.default) for option in contract.options}
    return (*arguments, *([None] * missing)), options, keywords.get("backend", "auto")


def _tags(contract: Contract) -> tuple[torch.Tag, ...]:
    """Return the op's tags; strides that mean something must reach it as they are when a program is compiled."""
    exact = getattr(torch.Tag, "needs_exact_strides", None)  # torch >= 2.7
    has_meaning = any(declared.layout.orders or declared.view for declared in contract.inputs)
    return (torch.Tag.pt2_compliant_tag, *([exact] if has_meaning and exact is not None else []))


def _tensor(contract: Contract, number: int) -> str:
    mark = f"({chr(ord('a') + contract.mutated.index(number))}!)" if number in contract.mutated else ""
    return f"Tensor{mark}{'?' if contract.inputs[number].optional else ''}"


def _result(outputs: tuple[Any, ...]) -> Any:
    """Return outputs as the dispatcher wants them: a single one without its tuple, ``None`` for none."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None


def _option(option: Option) -> str:
    kind = "str" if option.kind == "dtype" else getattr(option.kind, "__name__", str(option.kind))
    default = f'"{option.default}"' if isinstance(option.default, str) else repr(option.default)
    return f"{kind}{'?' if option.default is None else ''} {option.name}={default}"


def _kernel(operation: Operation) -> Callable[..., Any]:
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        arrays, options, backend = split_arguments(operation, arguments, keywords)
        outputs = operation.run_eagerly(arrays, options, None, backend)
        return _result(outputs)

    return kernel


def _autograd_kernel(operation: Operation) -> Callable[..., Any]:
    def autograd_kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        def run(arrays: Sequence[Any]) -> tuple[Any, ...]:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = operation.torch_op.redispatch(keyset & torch._C._after_autograd_keyset, *arrays, **keywords)
            return as_tuple(outputs)

        arrays, options, backend = split_arguments(operation, arguments, keywords)
        outputs = differentiable(operation, arrays, options, backend, run)
        return _result(outputs)

    return autograd_kernel


def _fake_kernel(operation: Operation) -> Callable[..., Any]:
    def fake_kernel(*arguments: Any, **keywords: Any) -> Any:
        arrays, options, backend = split_arguments(operation, arguments, keywords)
        check_backend(operation.name, backend)
        device = next(array.device for array in arrays if array is not None)
        outputs = tuple(
            None if spec is None else _fake(spec, device) for spec in operation.bind(arrays, options).outputs
        )
        return _result(outputs)

    return fake_kernel


def _fake(spec: OutputSpec, device: Any) -> Any:
    dtype = framework_dtype(spec.dtype, "torch")
    if not spec.order and not spec.view:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    shape, stride = spec.place("torch")
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
