"""Check the output arrays that a caller of the class form allocated."""

from __future__ import annotations

from collections.abc import Sequence

from fe_runtime.errors import InvalidArgumentError, explain

from .bind import Bound, Sample, is_writable, row_alignment
from .declare import Contract, OutputSpec
from .shapes import CONTIGUOUS

__all__ = ["check_outputs"]


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
        sample = Sample.of(bound.operation, declared.name, array)
        _check_output(contract, bound, declared.name, spec, sample)
        if not is_writable(array):
            raise _error(bound, declared.name, "be writable", "a read-only array")
        bound.alignments[declared.name] = row_alignment(sample.alignment, sample.desc)
        found.append(sample)
    return tuple(found)


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
    shape = f"shape {tuple(desc.shape)}"
    if tuple(desc.shape) != wanted:
        raise _error(bound, name, f"have shape {wanted}", shape, contract.error("shape"))
    if not CONTIGUOUS.holds(desc.shape, desc.stride):
        given = f"{shape} with strides {tuple(desc.stride)}"
        raise _error(bound, name, CONTIGUOUS.rule, given, contract.error("layout"))
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
    if spec.dtype != "float4_e2m1fn_x2":
        return spec.shape, (spec.dtype,)
    # Packed pairs: torch's own dtype is described by its logical extents, the uint8 container by its bytes.
    shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if dtype == "float4_e2m1fn" else spec.shape
    return shape, ("float4_e2m1fn", "uint8")
