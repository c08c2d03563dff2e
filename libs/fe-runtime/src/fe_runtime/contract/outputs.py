"""Check the output arrays that a caller of the class form allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.strides import inverse_order, ordered_stride
from fe_runtime.tensor_desc import TensorDesc

from .alignment import check_alignment, row_alignment
from .bind import Bound, Sample, is_writable
from .declare import Contract, OutputSpec
from .shapes import CONTIGUOUS

__all__ = ["check_outputs"]

PACKED = "float4_e2m1fn_x2"


def check_outputs(contract: Contract, bound: Bound, outputs: Sequence[object]) -> tuple[Sample | None, ...]:
    """Check the caller's output arrays against what this call produces; describe them.

    Their alignments replace those that ``bound`` assumes for outputs of our own allocation, so a plan made afterwards
    stores no wider than the caller's arrays allow.

    Raises
    ------
    TypeError
        An output that is no array.
    InvalidArgumentError
        Wrong presence, shape, dtype, strides, framework or device, or a read-only array.
    """
    found: list[Sample | None] = []
    for declared, spec, array in zip(contract.outputs, bound.outputs, outputs, strict=True):
        _check_presence(bound, declared.name, spec, array)
        if spec is None or array is None:
            found.append(None)
            continue
        sample = _described(bound, declared.name, spec, array)
        _check_output(contract, bound, declared.name, spec, sample)
        if not is_writable(array):
            raise _error(bound, declared.name, "be writable", "a read-only array")
        layout = spec.layout or CONTIGUOUS
        bound.alignments[declared.name] = row_alignment(sample.alignment, sample.desc, layout)
        if spec.alignment > 1:
            check_alignment(bound, declared.name, sample.desc, sample.alignment, layout, spec.alignment)
        found.append(sample)
    return tuple(found)


def _described(bound: Bound, name: str, spec: OutputSpec, array: object) -> Sample:
    """Describe an output in its canonical form; keep the shape that it came with."""
    is_packed = spec.dtype == PACKED
    sample = Sample.of(bound.operation, name, array, spec.pairs % len(spec.shape) if is_packed else None, False)
    bound.given[name] = tuple(sample.desc.shape)
    bound.transposed.pop(name, None)
    if spec.view and sample.desc.shape == tuple(spec.shape[dim] for dim in spec.view) != spec.shape:
        bound.transposed[name] = inverse = inverse_order(spec.view)
        return replace(sample, desc=sample.desc.permute(inverse))
    return sample


def _check_presence(bound: Bound, name: str, spec: OutputSpec | None, array: object) -> None:
    if spec is None and array is not None:
        rule = "be None: these options produce no such output"
        raise InvalidArgumentError(explain(bound.operation, name, rule, "an array", "Drop it."))
    if spec is not None and array is None:
        rule = f"be an array of shape {spec.shape} and dtype {spec.dtype}"
        raise InvalidArgumentError(explain(bound.operation, name, rule, "None", "Allocate it and pass it."))


def _check_output(contract: Contract, bound: Bound, name: str, spec: OutputSpec, sample: Sample) -> None:
    desc = sample.desc
    wanted, dtypes = _stored(spec, desc.dtype)
    shape = f"shape {bound.given[name]}"
    if tuple(desc.shape) != wanted and not (spec.any_units and _trimmed(desc.shape) == _trimmed(wanted)):
        raise _error(bound, name, f"have shape {_shapes(spec, wanted)}", shape, contract.error("shape"))
    if not _lies_well(spec, desc):
        shown = desc.permute(spec.view) if name in bound.transposed else desc
        given = f"{shape} with strides {tuple(shown.stride)}"
        raise _error(bound, name, _layout_rule(spec), given, contract.error("layout"))
    if desc.dtype not in dtypes:
        raise _error(bound, name, f"have dtype {spec.dtype}", desc.dtype, contract.error("dtype"))
    if bound.framework != "descriptor" and sample.framework not in ("descriptor", bound.framework):
        raise _error(bound, name, f"come from the framework of the inputs ({bound.framework})", sample.framework)
    if not bound.same_place(desc.device):
        raise _error(bound, name, f"be on the device of the inputs ({bound.device})", desc.device)


def _error(
    bound: Bound, name: str, rule: str, given: object, error: type[Exception] = InvalidArgumentError
) -> Exception:
    return error(explain(bound.operation, name, rule, given, "Allocate it so."))


def _stored(spec: OutputSpec, dtype: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape and dtypes by which the arrays that may hold an output are described."""
    if spec.dtype != PACKED:
        return spec.shape, (spec.dtype, *spec.byte_aliases)
    # Packed pairs: torch's own dtype is described by its logical extents, the uint8 container by its bytes.
    packed = spec.pairs % len(spec.shape)
    logical = tuple(2 * extent if dim == packed else extent for dim, extent in enumerate(spec.shape))
    return (logical if dtype == "float4_e2m1fn" else spec.shape), ("float4_e2m1fn", "uint8")


def _trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its trailing ones; a scalar, which has no dimension at all, is like nothing else."""
    extents = list(shape) or [-1]
    while len(extents) > 1 and extents[-1] == 1:
        extents.pop()
    return tuple(extents)


def _shapes(spec: OutputSpec, wanted: tuple[int, ...]) -> str:
    """Return the shapes that an output may have, in words."""
    if spec.view:
        return f"{wanted} or, transposed, {tuple(wanted[dim] for dim in spec.view)}"
    return f"{wanted} (trailing ones aside)" if spec.any_units else str(wanted)


def _lies_well(spec: OutputSpec, desc: TensorDesc) -> bool:
    if spec.layout is not None:
        return spec.layout.holds(desc.shape, desc.stride)
    if len(spec.order) != desc.ndim:
        return CONTIGUOUS.holds(desc.shape, desc.stride)
    steps = zip(desc.shape, desc.stride, ordered_stride(desc.shape, spec.order), strict=True)
    return 0 in desc.shape or all(extent == 1 or step == wanted for extent, step, wanted in steps)


def _layout_rule(spec: OutputSpec) -> str:
    if spec.layout is not None:
        return spec.layout.rule
    return f"have strides {spec.stride}" if spec.order else CONTIGUOUS.rule
