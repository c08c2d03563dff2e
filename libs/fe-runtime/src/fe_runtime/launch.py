"""Prepared calls: everything about one signature that can be decided once, so that a warm call only allocates and
launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import is_torch_tensor, permuted
from .contract import Bound, Contract, OutputSpec
from .dtypes import framework_dtype
from .errors import InvalidArgumentError, explain
from .plan import Form, Kernel
from .reference import reference_launch
from .strides import contiguous_stride, inverse_order

if TYPE_CHECKING:
    from .operation import Operation

__all__ = [
    "START",
    "allocator",
    "direct_launch",
    "is_empty",
    "kernel_call",
    "kernel_launch",
    "present",
]

Presenter = Callable[[Any], Any] | None

START = {"add": 0.0, "max": float("-inf")}
"""What a fresh output holds before a kernel accumulates into it."""

BYTES = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "float4_e2m1fn_x2"})
"""Dtypes that kernels see as bytes: DLPack exporters differ in their support for them."""


def kernel_call(
    operation: Operation, bound: Bound, kernel: Kernel, run: Callable[..., object] | None
) -> Callable[..., tuple[Any, ...]]:
    """Return ``call(arrays) -> outputs`` that allocates the outputs and launches on torch's current stream.

    Without elements there is no launch and ``run`` is not needed: see :func:`is_empty`.
    """
    contract, form = operation.contract, kernel.form
    allocators = [allocator(bound, spec) for spec in bound.outputs]
    launch = kernel_launch(operation, bound, kernel, run)
    there = [name in bound.arrays for name in contract.input_names]
    first = there.index(True)

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        like = arrays[first]
        outputs = tuple([allocate and allocate(like) for allocate in allocators])
        launch(arrays, outputs)
        return outputs

    if run is None or is_empty(bound) or contract.mutated or form.scratch:
        return call
    if any(_accumulating(bound)) or any(_presenters(contract, bound, form)):
        return call
    pick, scalars = _picker(there), _scalars(bound, form)
    makers, absent = [allocate for allocate in allocators if allocate], (None,) * allocators.count(None)
    if allocators != [*makers, *absent] or len(makers) not in (1, 2):
        return call
    make_first, make_second = makers[0], makers[-1]

    def call_for_one(arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The same for one output and operands that need no preparation, without the steps in between."""
        output = make_first(arrays[first])
        run(*pick(arrays), output, *scalars)
        return (output, *absent)

    def call_for_two(arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The same for two outputs, without a loop over them."""
        like = arrays[first]
        one, two = make_first(like), make_second(like)
        run(*pick(arrays), one, two, *scalars)
        return (one, two, *absent)

    return call_for_one if len(makers) == 1 else call_for_two


def direct_launch(
    operation: Operation, bound: Bound, kernel: Kernel, run: Callable[..., object]
) -> Callable[[Sequence[Any], Sequence[Any]], bool] | None:
    """Return ``launch(arrays, outputs) -> bool`` for operands that go to the kernel as they are, else ``None``.

    The compiled signature checks dtypes, shapes, alignment and devices itself, faster than Python can. What it does not
    check is checked here, for plain contiguous torch tensors: presence, emptiness, overlap. The launch returns False,
    having done nothing, for anything else and whenever the signature rejects the call: then the checks of the contract
    say what is wrong.
    """
    contract, form = operation.contract, kernel.form
    if bound.framework != "torch" or not form.related or form.scratch or any(_presenters(contract, bound, form)):
        return None
    if any(_accumulating(bound)):
        return None
    torch: Any = sys.modules["torch"]
    plain = (torch.Tensor, torch.nn.Parameter)
    there = [name in bound.arrays for name in contract.input_names]
    inputs, mutated = sum(there), [sum(there[:number]) for number in contract.mutated if there[number]]
    there += [spec is not None for spec in bound.outputs]
    absent = [number for number, is_there in enumerate(there) if not is_there]
    pick, scalars = _picker(there), _scalars(bound, form)
    written = [*mutated, *range(inputs, sum(there))]
    increment_version = torch.autograd.graph.increment_version
    device = bound.device.index

    def launch(arrays: Sequence[Any], results: Sequence[Any]) -> bool:
        everything = (*arrays, *results)
        for number in absent:
            if everything[number] is not None:
                return False
        operands = pick(everything)
        if type(operands[0]) not in plain or operands[0].get_device() != device:
            return False
        spans = []
        for x in operands:
            if type(x) not in plain or not x.is_contiguous() or x.is_neg() or not (size := x.nbytes):
                return False
            spans.append((start := x.data_ptr(), start + size))
        for number in written:
            start, stop = spans[number]
            for other in range(max(number, inputs)):
                low, high = spans[other]
                if start < high and low < stop and other != number:
                    return False
        again = [operands[number] for number in mutated]
        try:
            run(*operands, *again, *scalars)
        except (TypeError, ValueError):
            return False
        for operand in again:
            increment_version(operand)
        return True

    return launch


def kernel_launch(
    operation: Operation, bound: Bound, kernel: Kernel, run: Callable[..., object] | None
) -> Callable[..., None]:
    """Return ``launch(arrays, outputs)`` that presents the operands as the kernel wants them and runs it.

    The arguments are those of :class:`fe_runtime.plan.Form`; absent operands are left out.
    """
    if run is None or is_empty(bound):
        return _empty_launch(operation, bound)
    contract, form = operation.contract, kernel.form
    presenters, scalars = _presenters(contract, bound, form), _scalars(bound, form)
    there = [name in bound.arrays for name in contract.input_names]
    present_inputs = _picker(there)
    present_outputs = _picker([spec is not None for spec in bound.outputs])
    accumulating = _picker(_accumulating(bound))
    mutated = _picker([is_there and number in contract.mutated for number, is_there in enumerate(there)])
    workspaces = [_workspace(bound, *known) for known in form.scratch]

    def launch(arrays: Sequence[Any], results: Sequence[Any]) -> None:
        operands = (*present_inputs(arrays), *accumulating(results), *present_outputs(results), *mutated(arrays))
        presented = [x if p is None else p(x) for x, p in zip(operands, presenters, strict=True)]
        run(*presented, *[allocate() for allocate in workspaces], *scalars)

    def launch_as_given(arrays: Sequence[Any], results: Sequence[Any]) -> None:
        run(*present_inputs(arrays), *present_outputs(results), *scalars)

    if contract.mutated:
        return _counted(bound, launch, mutated)
    return launch if any(presenters) or workspaces or any(_accumulating(bound)) else launch_as_given


def present(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """View an array in a kernel's shape, fp8 and fp4 as bytes; copies only where no view exists."""
    if dtype in BYTES:
        array = array.view(sys.modules["torch"].uint8 if is_torch_tensor(array) else np.uint8)
    return array if tuple(array.shape) == shape else array.reshape(shape)


def _counted(bound: Bound, launch: Callable[..., None], mutated: Callable[..., Any]) -> Callable[..., None]:
    """Return the launch that tells torch's autograd about the operands it has written."""
    if bound.framework != "torch":
        return launch
    increment_version = sys.modules["torch"].autograd.graph.increment_version

    def counted(arrays: Sequence[Any], results: Sequence[Any]) -> None:
        launch(arrays, results)
        for array in mutated(arrays):
            increment_version(array)

    return counted


def is_empty(bound: Bound) -> bool:
    """Whether an operand of the call has no elements. Then no kernel is launched."""
    shapes = [desc.shape for desc in bound.arrays.values()] + [spec.shape for spec in bound.outputs if spec is not None]
    return any(0 in shape for shape in shapes)


def allocator(bound: Bound, spec: OutputSpec | None) -> Callable[[Any], Any] | None:
    """Return ``allocate(first_input)`` for a torch output, or ``None`` for one that is absent."""
    if spec is None:
        return None
    torch: Any = sys.modules["torch"]
    name, first = next(iter(bound.arrays.items()))
    shape, stride = spec.place("torch")
    known = {"dtype": framework_dtype(spec.dtype, "torch"), "device": torch.device(str(bound.device))}
    if spec.accumulate:
        start = START[spec.accumulate]
        return lambda _first: torch.empty_strided(shape, stride, **known).fill_(start)
    is_alike = spec.dtype == first.dtype and shape == bound.given[name] and name not in bound.transposed
    if is_alike and first.is_contiguous() and stride == contiguous_stride(shape):
        like: Callable[[Any], Any] = torch.empty_like  # half the cost of spelling it out
        return like
    empty, dtype, device = torch.empty_strided, known["dtype"], known["device"]  # cheaper than torch.empty
    return lambda _first: empty(shape, stride, dtype=dtype, device=device)


def _accumulating(bound: Bound) -> list[bool]:
    """Return for each output whether a kernel adds to what it holds."""
    return [spec is not None and bool(spec.accumulate) for spec in bound.outputs]


def _picker(present: Sequence[bool]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks the present operands; which they are is part of a prepared call."""
    numbers = [number for number, there in enumerate(present) if there]
    if len(numbers) == 1:
        number = numbers[0]
        return lambda operands: (operands[number],)
    return itemgetter(*numbers) if numbers else lambda _operands: ()


def _empty_launch(operation: Operation, bound: Bound) -> Callable[..., None]:
    # Reductions over nothing still have a value; the reference knows it, and what to write behind addresses.
    specs = [spec for spec in bound.outputs if spec is not None]
    if all(0 in spec.shape for spec in specs) and (specs or operation.contract.mutated):
        return lambda _arrays, _outputs: None
    return reference_launch(operation, bound)


def _scalars(bound: Bound, form: Form) -> tuple[object, ...]:
    return tuple(bound.options[name] for name in form.scalars)


def _workspace(bound: Bound, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
    """Return a function that allocates one scratch array; torch's allocator orders its reuse on the stream."""
    if bound.framework != "torch":
        rule = "be a torch or JAX array: the kernel needs scratch memory, which their allocators provide"
        name = next(iter(bound.arrays))
        raise InvalidArgumentError(explain(bound.operation, name, rule, "another DLPack producer", "Convert it."))
    torch: Any = sys.modules["torch"]
    known = {"dtype": framework_dtype(dtype, "torch"), "device": torch.device(str(bound.device))}
    return lambda: torch.empty(shape, **known)


def _presenters(contract: Contract, bound: Bound, form: Form) -> list[Presenter]:
    """Return for each operand of the kernel how it is brought to the kernel's form, ``None`` for one that has it."""
    inputs = [
        _presenter(bound.framework, shape, desc.dtype, bound.given[name], bound.transposed.get(name))
        for (name, desc), shape in zip(bound.arrays.items(), _present(form.inputs), strict=True)
    ]
    outputs = [
        None
        if spec is None or shape is None
        else _presenter(bound.framework, shape, spec.dtype, *_placed(bound, name, spec))
        for name, spec, shape in zip(contract.output_names, bound.outputs, form.outputs, strict=True)
    ]
    accumulating = [presenter for presenter, there in zip(outputs, _accumulating(bound), strict=True) if there]
    presenters = inputs + accumulating
    presenters += [presenter for presenter, spec in zip(outputs, bound.outputs, strict=True) if spec is not None]
    wanted = _present(form.inputs)
    numbers = {name: number for number, name in enumerate(bound.arrays)}
    for number in contract.mutated:
        if (at := numbers.get(name := contract.input_names[number])) is not None:
            presenters[at] = presenters[at] and _viewer(wanted[at], bound.arrays[name].dtype)
            presenters.append(presenters[at])
    return presenters


def _present(shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if shape is not None]


def _placed(bound: Bound, name: str, spec: OutputSpec) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape of an output, the caller's or a fresh one, and the order that makes it canonical."""
    if name in bound.given:
        return bound.given[name], bound.transposed.get(name)
    shape, _ = spec.place(bound.framework)
    return shape, inverse_order(spec.view) if shape != spec.shape else None


def _viewer(shape: tuple[int, ...], dtype: str) -> Presenter:
    """Return how a mutated operand is presented: never as a copy, which would take what is written with it."""
    return lambda array: (array.view(sys.modules["torch"].uint8) if dtype in BYTES else array).view(shape)


def _presenter(
    framework: str,
    shape: tuple[int, ...],
    dtype: str,
    given: tuple[int, ...],
    order: tuple[int, ...] | None = None,
) -> Presenter:
    if order is not None:
        return lambda array: present(permuted(array, order), shape, dtype)
    if dtype not in BYTES:
        return None if shape == tuple(given) else lambda array: array.reshape(shape)
    if framework == "torch" and shape == tuple(given):
        return methodcaller("view", sys.modules["torch"].uint8)
    return lambda array: present(array, shape, dtype)
