"""The matrices of partial sums that a caller hands to the gradient of LMSD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fe_runtime.arrays import is_jax_array, overlap
from fe_runtime.contract import Bound, Sample
from fe_runtime.contract.bind import is_writable
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.workspace import record_stream

from .lmsd_contract import ALIGNMENT

__all__ = ["Workspaces"]

NAMES = ("dweight_workspace", "dbias_workspace")
OPERATION = "hstu_lmsd_backward"


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces, or what is known of sample ones; ``dweight`` is ``None`` where that gradient is not wanted."""

    dweight: Any
    dbias: Any

    @staticmethod
    def described(dweight: Any, dbias: Any) -> Workspaces:
        """Keep the metadata of samples."""
        arrays = zip(NAMES, (dweight, dbias), strict=True)
        return Workspaces(*(None if array is None else Sample.of(OPERATION, name, array) for name, array in arrays))

    def check(self, bound: Bound, rows: int) -> None:
        """Raise ``InvalidArgumentError`` unless there is what the call needs, each with at least ``rows`` rows."""
        wanted = bool(bound.options["compute_dweight"]), True
        for name, array, is_wanted in zip(NAMES, (self.dweight, self.dbias), wanted, strict=True):
            if (array is not None) != is_wanted:
                rule = "be an array" if is_wanted else "be None: no gradient of the weight is wanted"
                given = "None" if array is None else "an array"
                raise InvalidArgumentError(explain(OPERATION, name, rule, given, "Allocate workspace_rows rows of D."))
            if array is not None:
                _check(bound, name, array, rows)

    def check_overlap(self, bound: Bound, operands: Iterable[tuple[str, Any]]) -> None:
        """Raise ``InvalidArgumentError`` if a workspace shares a byte with another operand."""
        others = [(name, operand) for name, operand in operands if operand is not None]
        for name, array in self._present():
            for other, operand in others:
                if overlap(array, operand):
                    rule, fix = f"not share memory with {other}", "Allocate it separately."
                    raise InvalidArgumentError(explain(bound.operation, name, rule, "overlapping arrays", fix))
            others.append((name, array))

    def record_stream(self) -> None:
        """Tell torch's allocator that the current stream uses the workspaces."""
        for _, array in self._present():
            record_stream(array)

    def cut(self, shapes: Sequence[tuple[int, ...]], bound: Bound) -> list[Any]:
        """Return the first rows of checked workspaces, as many as a kernel writes."""
        index = bound.device.index or 0
        return [_first_rows(array, shape, index) for (_, array), shape in zip(self._present(), shapes, strict=True)]

    def _present(self) -> Iterator[tuple[str, Any]]:
        yield from (
            (name, array) for name, array in zip(NAMES, (self.dweight, self.dbias), strict=True) if array is not None
        )


def _first_rows(array: Any, shape: tuple[int, ...], index: int) -> Any:
    if is_jax_array(array):
        from fe_runtime.jax.in_place import BufferView

        return BufferView(array, shape, "float32", index)
    return array[: shape[0]]


def _check(bound: Bound, name: str, array: Any, rows: int) -> None:
    sample = Sample.of(OPERATION, name, array)
    desc, columns = sample.desc, bound.dim("D")
    fix = f"Allocate ({rows}, {columns}) float32."

    def reject(rule: str, given: object) -> InvalidArgumentError:
        return InvalidArgumentError(explain(OPERATION, name, rule, given, fix))

    if desc.ndim != 2 or desc.shape[0] < rows or desc.shape[1] != columns:
        raise reject(f"have shape (R, D) with R >= {rows} and D = {columns}", f"shape {tuple(desc.shape)}")
    if not desc.is_contiguous():
        raise reject("be contiguous (row-major)", f"strides {tuple(desc.stride)}")
    if desc.dtype != "float32":
        raise reject("have dtype float32", desc.dtype)
    if sample.framework not in ("descriptor", bound.framework) and bound.framework != "descriptor":
        raise reject(f"come from the framework of the inputs ({bound.framework})", sample.framework)
    if not bound.same_place(desc.device):
        raise reject(f"be on the device of the inputs ({bound.device})", desc.device)
    if not isinstance(array, Sample) and not is_writable(array):
        raise reject("be writable", "a read-only array")
    if bound.device.type == "cuda" and sample.alignment < ALIGNMENT:
        raise reject(
            f"start at an address that is a multiple of {ALIGNMENT} bytes", f"a multiple of {sample.alignment}"
        )
