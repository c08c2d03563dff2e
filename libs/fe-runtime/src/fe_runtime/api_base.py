"""The class form of an operation: describe samples, check, compile, then execute into the caller's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .aliasing import Meetings, check_overlap, may_overlap, meetings
from .arrays import detect_framework, get_device, is_torch_tensor, on_default_stream, on_stream, resolve_stream
from .contract import Bound, Contract, Sample, check_outputs
from .errors import InvalidArgumentError, NotCompiledError, explain, renamed
from .experimental import class_logger
from .launch import direct_launch, is_empty, kernel_launch
from .operation import Operation, load_kernel, reject_descriptors, signature
from .plan import HOPPER, Kernel, Plan, fall_back
from .reference import reference_launch
from .strides import has_order
from .tensor_desc import TensorDesc
from .tuple_dict import TupleDict
from .values import with_value_check

__all__ = ["APIBase", "TensorDesc", "TupleDict"]

MAX_LAUNCHES = 1024
"""Signatures of live operands remembered per object; the table is emptied when full."""


class APIBase:
    """Base of every operation class.

    The constructor keeps metadata only: no sample is held, no GPU is touched. ``check_support`` validates everything
    and returns True or raises. ``compile`` builds the kernel (no GPU needed). ``execute`` of the subclass hands its
    operands to :meth:`_execute`, which checks them and launches: it allocates nothing, waits for nothing and can be
    captured in a CUDA graph. (The reference, where it serves the call, may allocate.)
    """

    def __init__(
        self,
        operation: Operation,
        inputs: Sequence[object],
        outputs: Sequence[object],
        options: Mapping[str, object],
        backend: str = "auto",
    ) -> None:
        contract = operation.contract
        self._operation = operation
        self._options = dict(options)
        self._backend = backend
        self._inputs = _samples(contract.operation, contract.input_names, inputs, [i.pairs for i in contract.inputs])
        self._outputs = _samples(contract.operation, contract.output_names, outputs)
        self._checked: tuple[Bound, Plan] | None = None
        self._compiled: Callable[..., object] | None = None
        # The quick launch and the options that it is for, in one place: other threads see both or neither.
        self._direct: tuple[Callable[[Sequence[Any], Sequence[Any]], bool] | None, Mapping[str, object]] = (None, {})
        self._launches: dict[object, tuple[Callable[..., None], Meetings | None]] = {}

    def check_support(self) -> bool:
        """Validate the samples and options completely.

        Returns
        -------
        bool
            Always True.

        Raises
        ------
        TypeError, InvalidArgumentError
            The samples break the contract.
        NotSupportedError
            No kernel serves them, and one was demanded by name or by ``FE_STRICT=1``.
        """
        self._check()
        return True

    def compile(self) -> None:
        """Build the kernel, once; later calls do nothing."""
        if self._compiled is not None:
            return
        logger = class_logger(type(self).__name__)
        if self._checked is None:
            logger.info("compile: check_support was not called before, so it runs now")
        bound, plan = self._check()
        plan, run = load_kernel(plan, self._backend)
        self._checked = bound, plan
        self._compiled = _reference if run is None else run
        logger.debug("compile: backend %s", plan.backend)

    def explain(self) -> str:
        """Return the plan in words: backend, configuration, and the reason for a fallback."""
        return self._check()[1].explain()

    def scratch_workspace_bytes(self) -> int:
        """Return the bytes of scratch that ``execute`` needs from the caller."""
        return 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Compile if needed, then execute."""
        self.compile()
        return self.execute(*arguments, **keywords)

    def execute(self, *arguments: Any, **keywords: Any) -> Any:
        """Run on live operands; each operation's class writes out its signature."""
        raise NotImplementedError

    def _resolved(self, bound: Bound, plan: Plan) -> None:
        """Set the resolved options that the operation's contract promises as attributes."""

    def _execute(
        self,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        stream: object = None,
        runtime: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Check the live operands against the compiled signature and launch.

        ``runtime``: values of runtime options for this execution, in place of the constructor's.

        Raises
        ------
        NotCompiledError
            ``compile`` was not called.
        InvalidArgumentError
            An operand differs from the compiled signature, or an output overlaps another operand.
        """
        if self._compiled is None:
            raise NotCompiledError(f"{type(self).__name__}: execute needs a compiled object. Call compile() first.")
        direct, options = self._direct
        if stream is None and direct is not None and runtime.items() <= options.items() and direct(arrays, outputs):
            return
        operands = (*arrays, *outputs)
        key = signature(operands, runtime, "" if stream is None else "ordered by the caller")
        try:
            known = self._launches.get(key)
        except TypeError:  # an unhashable option: binding will say what is wrong with it
            key = known = None
        if known is not None:
            launch, pairs = known
            meet = pairs is None or may_overlap(pairs, operands)
        else:
            launch, meet = self._admit(arrays, outputs, self._compiled, stream, runtime), True
            if key is not None:
                if len(self._launches) >= MAX_LAUNCHES:
                    self._launches.clear()
                quick = is_torch_tensor(next(array for array in arrays if array is not None))
                self._launches[key] = launch, meetings(self._operation.contract, operands) if quick else None
        if meet:
            check_overlap(self._operation.contract, arrays, outputs)
        if stream is None:
            launch(arrays, outputs)
            return
        with on_stream(self._stream(stream, arrays), operands):
            launch(arrays, outputs)

    def _stream(self, stream: object, arrays: Sequence[Any]) -> Any:
        first = next(array for array in arrays if array is not None)
        try:
            return resolve_stream(stream, detect_framework(first), get_device(first), "current_stream")
        except (TypeError, InvalidArgumentError) as error:
            raise renamed(error, self._operation.name) from error

    def _check(self) -> tuple[Bound, Plan]:
        if self._checked is None:
            bound = self._operation.bind(self._inputs, self._options)
            check_outputs(self._operation.contract, bound, self._outputs)
            plan = self._operation.plan(bound, self._backend)
            self._reject_copies(bound)
            fall_back(plan)
            self._resolved(bound, plan)
            self._checked = bound, plan
        return self._checked

    def _admit(
        self,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        run: Callable[..., object],
        stream: object,
        runtime: Mapping[str, object] = MappingProxyType({}),
    ) -> Callable[..., None]:
        """Check operands of a new signature and return the launch for them."""
        compiled, plan = self._check()
        contract = self._operation.contract
        _reject_negated(contract, (*arrays, *outputs))
        live = self._operation.bind(arrays, {**self._options, **runtime})
        reject_descriptors(contract.operation, contract.input_names, arrays)
        _check_same(contract, compiled, live)
        if live.options != compiled.options:  # what the samples resolved stays
            live = self._operation.bind(arrays, {**compiled.options, **runtime})
        check_outputs(contract, live, outputs)
        self._reject_copies(live)
        reject_descriptors(contract.operation, contract.output_names, outputs)
        kernel = None if plan.kernel is None else self._kernel_for(live, compiled, plan)
        launch = self._launch(live, kernel, run, stream)
        check = self._operation.check_values
        if check is None:
            return launch
        return with_value_check(check, live, contract.input_names, launch, self._operation.check_variable)

    def _launch(
        self, live: Bound, kernel: Kernel | None, run: Callable[..., object], stream: object
    ) -> Callable[..., None]:
        if kernel is not None and stream is None and live.framework != "torch":
            run = on_default_stream(run, live.device)
        if live.framework == "jax":
            from .jax.in_place import in_place_launch

            return in_place_launch(self._operation, live, kernel, run, wait=stream is None)
        if kernel is None:
            return reference_launch(self._operation, live)
        direct, options = self._direct
        if self._operation.check_values is None and (direct is None or options != live.options):
            self._direct = direct_launch(self._operation, live, kernel, run), live.options
        return kernel_launch(self._operation, live, kernel, run)

    def _reject_copies(self, bound: Bound) -> None:
        """Refuse operands that a kernel would need copies of, also where the reference runs: what passes here passes
        on a GPU."""
        kernel = self._operation.find_kernel(bound, HOPPER)
        for name in kernel.copies if isinstance(kernel, Kernel) else ():
            rule = "have leading dimensions that merge into rows of one stride"
            given = f"shape {bound.given[name]} with strides {tuple(bound.arrays[name].stride)}"
            fix = "Pass a contiguous copy: execute allocates nothing."
            raise InvalidArgumentError(explain(bound.operation, name, rule, given, fix))

    def _kernel_for(self, live: Bound, compiled: Bound, plan: Plan) -> Kernel | None:
        """Return the live operands' kernel, which must be the compiled one, unless there is nothing to launch."""
        if is_empty(live):  # the strides of an empty array say nothing about its layout
            return plan.kernel
        given = dict(live.alignments)
        for name, alignment in given.items():  # better aligned operands run the compiled kernel too
            live.alignments[name] = min(alignment, compiled.alignments[name])
        kernel = self._operation.plan(live, self._backend).kernel
        if kernel is not None and plan.kernel is not None and kernel.spec == plan.kernel.spec:
            return kernel
        worse = next((name for name, alignment in given.items() if alignment < compiled.alignments[name]), None)
        if worse is None:
            rule, found = "be as the compiled signature", f"arrays on {live.device} that need another kernel"
        else:
            rule = f"be as the compiled signature: rows aligned to {compiled.alignments[worse]} bytes"
            found = f"{given[worse]} bytes"
        fix = "Pass an array like the sample, or build an object from samples like it."
        raise InvalidArgumentError(explain(live.operation, worse or next(iter(given)), rule, found, fix))


def _reject_negated(contract: Contract, operands: Sequence[Any]) -> None:
    """Raise for a torch tensor whose values are those in memory, negated: a kernel would not know."""
    for name, operand in zip((*contract.input_names, *contract.output_names), operands, strict=True):
        if is_torch_tensor(operand) and operand.is_neg():
            rule, fix = "not be lazily negated", "Pass tensor.resolve_neg()."
            raise InvalidArgumentError(explain(contract.operation, name, rule, "a tensor with the negative bit", fix))


def _reference(*_operands: object) -> None:
    """Stand for the compiled kernel of an object that runs the reference."""


def _samples(
    operation: str, names: Sequence[str], arrays: Sequence[object], pairs: Sequence[int | None] | None = None
) -> tuple[Sample | None, ...]:
    return tuple(
        None if array is None else Sample.of(operation, name, array, packed)
        for name, array, packed in zip(names, arrays, pairs or [None] * len(names), strict=True)
    )


def _check_same(contract: Contract, compiled: Bound, live: Bound) -> None:
    """Raise unless presence, dtypes, static extents and device are those of the compiled samples."""
    for declared in contract.inputs:
        was, now = compiled.dtype(declared.name), live.dtype(declared.name)
        if was == now:
            continue
        if was is None or now is None:
            rule = f"be {'absent' if was is None else 'an array'} as in the compiled signature"
        else:
            rule = f"have the compiled dtype {was}"
        raise _differs(contract, declared.name, rule, now)
    for letter, extent in compiled.dims.items():
        if letter not in contract.dynamic and live.dims.get(letter) != extent:
            name = next(i.name for i in contract.inputs if live.has(i.name) and letter in i.shape.split())
            rule = f"have the compiled extent {letter} = {extent}"
            raise _differs(contract, name, rule, f"{letter} = {live.dims.get(letter)}")
    _check_orders(contract, compiled, live)
    if compiled.device.type != live.device.type:
        rule = f"be on a device of the compiled kind ({compiled.device.type})"
        raise _differs(contract, next(iter(live.arrays)), rule, live.device)


def _check_orders(contract: Contract, compiled: Bound, live: Bound) -> None:
    """Raise unless the dimensions of operands with gaps lie in memory as those of the samples do."""
    for declared in contract.inputs:
        was, now = compiled.arrays.get(declared.name), live.arrays.get(declared.name)
        if was is None or now is None or 0 in now.shape:
            continue
        order = declared.layout.order(was.shape, was.stride)
        if order and not has_order(now.shape, now.stride, order):
            rule = f"have its dimensions in memory in the compiled order {order}, outermost first"
            raise _differs(contract, declared.name, rule, f"strides {tuple(now.stride)}")


def _differs(contract: Contract, name: str, rule: str, given: object) -> InvalidArgumentError:
    fix = "Build another object from samples like it."
    return InvalidArgumentError(explain(contract.operation, name, rule, given, fix))
