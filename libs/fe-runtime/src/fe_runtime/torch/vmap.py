"""The batching rule of an operation: a mapped dimension is one more leading dimension of ``...``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fe_runtime.arrays import describe
from fe_runtime.errors import NotSupportedError
from fe_runtime.tensor_desc import TensorDesc

if TYPE_CHECKING:
    from fe_runtime.contract import Input
    from fe_runtime.operation import Operation

__all__ = ["vmap_rule"]

Split = Callable[..., tuple[tuple[Any, ...], Mapping[str, object], str]]


def vmap_rule(operation: Operation, split_arguments: Split) -> Callable[..., Any]:
    """Return the op's rule for ``torch.vmap``.

    Inputs whose shape begins with ``...`` take the mapped dimension as their first one; the others must be the same
    for every element. Every output must gain the dimension too, so sums over all rows have no rule.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **keywords: Any) -> Any:
        if operation.contract.mutated:
            raise _no_rule(operation, "it writes into its inputs")
        arrays, options, _ = split_arguments(operation, arguments, keywords)
        dims = (*in_dims, *([None] * (len(arrays) - len(in_dims))))
        mapped = [
            _mapped(operation, declared, array, dim, info.batch_size)
            for declared, array, dim in zip(operation.contract.inputs, arrays, dims, strict=True)
        ]
        _check_outputs(operation, mapped, options, info.batch_size)
        outputs = operation.torch_op(*mapped, **keywords)
        return outputs, tuple(None if o is None else 0 for o in outputs) if isinstance(outputs, tuple) else 0

    return rule


def _mapped(operation: Operation, declared: Input, array: Any, dim: int | None, size: int) -> Any:
    if array is None:
        return None
    if not _has_batch(declared):
        if dim is not None:
            raise _no_rule(operation, f"{declared.name} has no leading batch dimensions")
        return array
    array = array.unsqueeze(0).expand(size, *array.shape) if dim is None else array.movedim(dim, 0)
    return array if declared.layout.holds(array.shape, array.stride()) else array.contiguous()


def _check_outputs(operation: Operation, mapped: Sequence[Any], options: Mapping[str, object], size: int) -> None:
    # Under nested transforms the arrays are wrappers without memory: only their metadata can be asked for.
    many = [None if array is None else describe(array) for array in mapped]
    one = [
        TensorDesc.of(desc.dtype, desc.shape[1:], device=desc.device) if desc and _has_batch(declared) else desc
        for declared, desc in zip(operation.contract.inputs, many, strict=True)
    ]
    for name, single, all_ in zip(
        operation.contract.output_names,
        operation.bind(one, options).outputs,
        operation.bind(many, options).outputs,
        strict=True,
    ):
        if single is not None and all_ is not None and tuple(all_.shape) != (size, *single.shape):
            raise _no_rule(operation, f"the output {name} combines all rows")


def _has_batch(declared: Input) -> bool:
    return declared.shape.startswith("...")


def _no_rule(operation: Operation, reason: str) -> NotSupportedError:
    text = f"{operation.name}: torch.vmap cannot map this call: {reason}. Loop over the elements instead."
    return NotSupportedError(text, reason=reason)
