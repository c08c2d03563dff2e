"""Check one call against a contract and bind its dimensions. Metadata only: nothing here reads or writes an element."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fe_runtime.arrays import Device, alignment, describe, detect_framework, is_torch_tensor
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, explain, renamed
from fe_runtime.strides import inverse_order, stride_order_of
from fe_runtime.tensor_desc import TensorDesc

from .alignment import MAX_ALIGNMENT, check_alignment, row_alignment
from .declare import Contract, Input, OutputSpec
from .options import any_of, check_option_kinds, check_option_values, short
from .shapes import CONTIGUOUS, UNITS, Dims, ShapePattern

__all__ = ["Bound", "Sample", "bind", "check_writable", "is_writable"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What is kept of an array: its descriptor, its framework, and the alignment of its data pointer in bytes."""

    desc: TensorDesc
    framework: str
    alignment: int

    @staticmethod
    def of(operation: str, name: str, array: object, pairs: int | None = None, container: bool = True) -> Sample:
        """Describe an array, a tracer, a :class:`TensorDesc` (taken as aligned) or a sample.

        ``pairs``: the dimension of packed FP4 pairs; a ``uint8`` array is then a ``container`` of pairs.

        Raises
        ------
        TypeError
            Not an array.
        InvalidArgumentError
            An array of an unknown dtype, or one that is not strided.
        """
        if isinstance(array, Sample):
            return array
        reads = pairs is not None and container
        if isinstance(array, TensorDesc):
            try:
                return Sample(describe(array, name, reads, pairs), "descriptor", MAX_ALIGNMENT)
            except InvalidArgumentError as error:
                raise renamed(error, operation) from error
        framework = detect_framework(array)
        if framework == "unknown" and not hasattr(array, "__dlpack__"):
            given = f"{type(array).__name__} {short(array)}"
            raise TypeError(explain(operation, name, "be an array (torch, JAX or numpy)", given, _as_array(array)))
        try:
            sample = Sample(describe(array, name, reads, pairs), framework, alignment(array))
        except (TypeError, InvalidArgumentError) as error:
            raise renamed(error, operation) from error
        if pairs is not None and canonical_dtype(array.dtype) == "float4_e2m1fn":  # type: ignore[attr-defined]
            rule, fix = "hold FP4 codes in pairs, two in a byte", "Pass fe_runtime.formats.pack_fp4 of it, as uint8."
            raise InvalidArgumentError(explain(operation, name, rule, "one code per item", fix))
        return sample


@dataclass(slots=True)
class Bound:
    """One call, checked: what every later step (plan, outputs, fake function, documentation) works from.

    ``arrays`` holds a descriptor for each input that is present, in the contract's canonical shape; ``given`` the
    shape as it was passed. ``dims`` maps the contract's letters to extents, ``options`` the names to normalised
    values. ``alignments`` is the largest power of two up to 16 that divides each data pointer and each stride but the
    unit one, in bytes: every row starts at a multiple of it. ``pointers`` is that of the data pointers alone.
    ``mutated`` names the present inputs that are written. ``transposed`` names the arrays that came as the view that
    their declaration allows, with the order of dimensions that makes them canonical. Shape, dtype and stride of packed
    FP4 pairs are those of the codes.
    """

    operation: str
    framework: str = "unknown"
    device: Device = field(default_factory=lambda: Device("cpu"))
    arrays: dict[str, TensorDesc] = field(default_factory=dict)
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    alignments: dict[str, int] = field(default_factory=dict)
    pointers: dict[str, int] = field(default_factory=dict)
    dims: Dims = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    outputs: tuple[OutputSpec | None, ...] = ()
    mutated: tuple[str, ...] = ()
    transposed: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the optional input was passed."""
        return name in self.arrays

    def dtype(self, name: str) -> str | None:
        """Dtype of an input, or ``None`` when it was not passed."""
        desc = self.arrays.get(name)
        return desc.dtype if desc is not None else None

    def dim(self, letter: str) -> int:
        """Extent of a dimension letter."""
        extent = self.dims[letter]
        if isinstance(extent, tuple):
            raise KeyError(letter)
        return extent

    def same_place(self, device: Device) -> bool:
        """Whether an array on this device can take part in the call. A tracer's device is unknown and fits any."""
        return device == self.device or "unknown" in (device.type, self.device.type)

    @property
    def batch(self) -> tuple[int, ...]:
        """Extents that ``...`` stands for."""
        extents = self.dims.get("...", ())
        return extents if isinstance(extents, tuple) else (extents,)

    @property
    def rows(self) -> int:
        """Product of the batch extents."""
        return math.prod(self.batch)


def bind(contract: Contract, arrays: Sequence[object], options: Mapping[str, object]) -> Bound:
    """Check a call and bind its dimensions.

    Parameters
    ----------
    contract
        The operation's declaration.
    arrays
        One entry per declared input, in order; ``None`` for an optional one that is absent. Arrays of any
        framework, tracers, or :class:`TensorDesc`.
    options
        Values by name; missing names take their defaults.

    Raises
    ------
    TypeError
        An argument of the wrong Python kind.
    InvalidArgumentError
        Anything else the contract forbids.

    Notes
    -----
    The order of the checks: Python kinds, ranks, shapes, strides, dtypes, frameworks and devices, alignments, option
    values, rules, derived extents.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: runtime conventions, errors.
    """
    bound = Bound(contract.operation)
    samples = {
        declared.name: sample
        for declared, array in zip(contract.inputs, arrays, strict=True)
        if (sample := _sample(contract, bound, declared, array)) is not None
    }
    bound.mutated = tuple(name for number in contract.mutated if (name := contract.input_names[number]) in samples)
    bound.options = check_option_kinds(contract, options)
    _check_ranks(contract, bound)
    _bind_shapes(contract, bound)
    _check_layouts(contract, bound)
    _check_dtypes(contract, bound)
    _bind_place(contract, bound, samples)
    _check_alignments(contract, bound)
    bound.options = check_option_values(contract, bound.options)
    _resolve_options(contract, bound)
    _check_rules(contract, bound)
    _check_derived(contract, bound)
    _bind_outputs(contract, bound)
    return bound


def _sample(contract: Contract, bound: Bound, declared: Input, array: object) -> Sample | None:
    if array is None:
        if declared.optional:
            return None
        rule = "be an array (torch, JAX or numpy)"
        raise contract.error("missing")(explain(bound.operation, declared.name, rule, "None", "Pass the array."))
    sample = Sample.of(bound.operation, declared.name, array, declared.pairs)
    if declared.mutated:
        check_writable(bound.operation, declared.name, array)
    desc = sample.desc
    meant = declared.dtype_aliases.get(desc.dtype)
    bound.arrays[declared.name] = desc if meant is None else replace(desc, dtype=meant)
    bound.given[declared.name] = tuple(desc.shape)
    return sample


def _as_array(value: object) -> str:
    """Return the sentence that tells how to make an array of a Python value."""
    if isinstance(value, numbers.Number):
        return "Pass numpy.asarray([value], dtype), of shape (1,), or an array of the other arguments' framework."
    if isinstance(value, (list, tuple)):
        return "Pass numpy.asarray(values, dtype), or an array of the other arguments' framework."
    return "Pass an array."


def _check_ranks(contract: Contract, bound: Bound) -> None:
    for declared in contract.inputs:
        desc = bound.arrays.get(declared.name)
        if desc is None or any(pattern.fits_rank(desc.ndim) for pattern in declared.patterns):
            continue
        rule = "have shape " + " or ".join(str(pattern) for pattern in declared.patterns)
        given = f"shape {tuple(desc.shape)}"
        raise contract.error("rank")(explain(bound.operation, declared.name, rule, given, _reshaped(declared, desc)))


def _reshaped(declared: Input, desc: TensorDesc) -> str:
    """Return the sentence that tells how to reach an accepted rank: by the elements at hand where they fit."""
    letters = [token for token in declared.shape.split() if token != "1"]
    extents = [extent for extent in desc.shape if extent != 1]
    if not all(map(str.isalpha, letters)) or len({*letters}) != len(letters) or len(letters) != len(extents):
        return "Reshape it to " + any_of(declared.patterns) + "."
    shape = ShapePattern(declared.shape).shape(dict(zip(letters, extents, strict=True)))
    return f"Reshape it to {shape}: {declared.name}.reshape({', '.join(map(str, shape))})."


def _bind_shapes(contract: Contract, bound: Bound) -> None:
    for declared in contract.inputs:
        desc = bound.arrays.get(declared.name)
        if desc is None:
            continue
        for number, pattern in enumerate(declared.patterns):
            if not pattern.fits_rank(desc.ndim):
                continue
            dims = dict(bound.dims)
            if pattern.match(desc.shape, dims) is None:
                bound.dims = dims
                if number and declared.view and number == len(declared.also) + 1:
                    bound.transposed[declared.name] = inverse = inverse_order(declared.view)
                    bound.arrays[declared.name] = desc.permute(inverse)
                elif number:
                    bound.arrays[declared.name] = _canonical_view(declared, pattern, desc, dims)
                break
        else:
            raise _shape_error(contract, bound, declared, desc)


def _canonical_view(declared: Input, pattern: ShapePattern, desc: TensorDesc, dims: Dims) -> TensorDesc:
    # An alternative form differs from the canonical one by unit dimensions only (the declaration is checked for that),
    # so the strides of all other dimensions carry over. A unit dimension's stride is never used.
    canonical = ShapePattern(declared.shape)
    shape = canonical.shape(dims)
    steps = iter([step for token, group in pattern.split(desc.stride) if token not in ("1", UNITS) for step in group])
    stride = tuple(
        desc.numel() if token == "1" else next(steps) for token, group in canonical.split(shape) for _ in group
    )
    return replace(desc, shape=shape, stride=stride, stride_order=stride_order_of(shape, stride))


def _shape_error(contract: Contract, bound: Bound, declared: Input, desc: TensorDesc) -> Exception:
    rules = []
    for pattern in declared.patterns:
        known = {letter: extent for letter, extent in bound.dims.items() if letter in pattern.tokens}
        text = str(pattern)
        if known:
            text += " with " + ", ".join(f"{letter} = {extent}" for letter, extent in known.items())
        rules.append(text)
    rule = "have shape " + " or ".join(rules)
    fix = "Its extents must agree with the other arguments."
    return contract.error("shape")(explain(bound.operation, declared.name, rule, f"shape {tuple(desc.shape)}", fix))


def _check_layouts(contract: Contract, bound: Bound) -> None:
    for declared in contract.inputs:
        desc = bound.arrays.get(declared.name)
        if desc is None or declared.layout.holds(desc.shape, desc.stride):
            continue
        shown = desc.permute(declared.view) if declared.name in bound.transposed else desc
        given = f"shape {tuple(shown.shape)} with strides {tuple(shown.stride)}"
        text = explain(bound.operation, declared.name, declared.layout.rule, given, declared.layout.fix)
        raise contract.error("layout")(text)


def _check_dtypes(contract: Contract, bound: Bound) -> None:
    error = contract.error("dtype")
    for declared in contract.inputs:
        desc = bound.arrays.get(declared.name)
        if desc is None:
            continue
        if desc.dtype not in declared.dtypes:
            rule = f"have dtype {any_of(declared.dtypes)}"
            raise error(explain(bound.operation, declared.name, rule, desc.dtype, "Convert it first."))
        partner = bound.arrays.get(declared.dtype_of) if declared.dtype_of else None
        if partner is not None and partner.dtype != desc.dtype:
            rule, fix = f"have the dtype of {declared.dtype_of} ({partner.dtype})", "Convert one of them."
            raise error(explain(bound.operation, declared.name, rule, desc.dtype, fix))


def _bind_place(contract: Contract, bound: Bound, samples: Mapping[str, Sample]) -> None:
    layouts = {declared.name: declared.layout for declared in contract.inputs}
    framework_of = device_of = ""  # the arguments that fix them
    for name, sample in samples.items():
        desc = bound.arrays[name]
        bound.pointers[name] = sample.alignment
        bound.alignments[name] = row_alignment(sample.alignment, desc, layouts[name])
        if not framework_of or bound.framework == "descriptor":
            framework_of, bound.framework = name, sample.framework
        elif sample.framework not in ("descriptor", bound.framework):
            rule = f"come from the framework of {framework_of} ({bound.framework})"
            fix = "Convert one of them: frameworks cannot be mixed in one call."
            raise InvalidArgumentError(explain(bound.operation, name, rule, sample.framework, fix))
        if not device_of or bound.device.type == "unknown":
            device_of, bound.device = name, desc.device
        elif not bound.same_place(desc.device):
            rule = f"be on the device of {device_of} ({bound.device})"
            raise InvalidArgumentError(explain(bound.operation, name, rule, desc.device, "Move one of them."))


def _check_alignments(contract: Contract, bound: Bound) -> None:
    for declared in contract.inputs:
        desc = bound.arrays.get(declared.name)
        if desc is not None and declared.alignment > 1:
            pointer = bound.pointers[declared.name]
            check_alignment(bound, declared.name, desc, pointer, declared.layout, declared.alignment)


def check_writable(operation: str, name: str, array: object) -> None:
    """Raise ``InvalidArgumentError`` for an array that cannot be written in place."""
    given = "" if is_writable(array) else "a read-only array"
    if is_torch_tensor(array) and array.is_neg():  # type: ignore[attr-defined]
        given = "a lazily negated tensor"
    if given:
        raise InvalidArgumentError(explain(operation, name, "be writable", given, "Pass a copy."))


def is_writable(array: object) -> bool:
    """Whether the array can be written; numpy alone has read-only ones."""
    return bool(getattr(getattr(array, "flags", None), "writeable", True))


def _resolve_options(contract: Contract, bound: Bound) -> None:
    for option in contract.options:
        if bound.options[option.name] is None and option.resolve is not None:
            bound.options[option.name] = option.resolve(bound)


def _check_rules(contract: Contract, bound: Bound) -> None:
    for rule in contract.rules:
        if not rule.holds(bound):
            raise rule.error(explain(bound.operation, rule.argument, rule.rule, rule.given(bound), rule.fix))


def _check_derived(contract: Contract, bound: Bound) -> None:
    """Check the letters that follow from others; name the first input that has one with another extent."""
    known = dict(bound.dims)
    for letter, extent in contract.derived.items():
        if letter in known:
            known[letter] = extent(bound)
    wrong = [letter for letter, extent in known.items() if bound.dims[letter] != extent]
    for declared in contract.inputs:
        if bound.has(declared.name) and any(letter in declared.shape.split() for letter in wrong):
            given = TensorDesc.of(bound.arrays[declared.name].dtype, bound.given[declared.name], device=bound.device)
            bound.dims = known
            raise _shape_error(contract, bound, declared, given)


def _bind_outputs(contract: Contract, bound: Bound) -> None:
    bound.outputs = tuple(output.spec(bound) for output in contract.outputs)
    for output, spec in zip(contract.outputs, bound.outputs, strict=True):
        if spec is None:
            continue
        # A fresh allocation is aligned; its rows are if their length is.
        fresh = TensorDesc.of(spec.dtype, spec.shape, spec.stride, device=bound.device)
        layout = spec.layout or CONTIGUOUS
        bound.alignments[output.name] = row_alignment(MAX_ALIGNMENT, fresh, layout)
        if spec.alignment > 1:
            check_alignment(bound, output.name, fresh, MAX_ALIGNMENT, layout, spec.alignment)
        if bound.framework == "jax" and 0 not in spec.shape and not CONTIGUOUS.holds(spec.shape, spec.stride):
            rule, given = "have row-major results for JAX arrays", f"{output.name} with strides {spec.stride}"
            raise InvalidArgumentError(explain(bound.operation, output.name, rule, given))
