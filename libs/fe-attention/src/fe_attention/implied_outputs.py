"""Class forms whose constructors take samples of the inputs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fe_runtime.api_base import APIBase
from fe_runtime.contract import Bound, Sample
from fe_runtime.operation import Operation
from fe_runtime.plan import Plan
from fe_runtime.tensor_desc import TensorDesc

__all__ = ["ImpliedOutputsAPI"]


class ImpliedOutputsAPI(APIBase):
    """A class form that knows what its outputs are from its inputs; ``execute`` checks those that it gets."""

    def __init__(
        self, operation: Operation, inputs: Sequence[Any], options: Mapping[str, object], backend: str
    ) -> None:
        super().__init__(operation, inputs, [None] * len(operation.output_names), options, backend)

    def _check(self) -> tuple[Bound, Plan]:
        if self._checked is None:
            bound = self._operation.bind(self._inputs, self._options)
            self._outputs = tuple(
                None
                if spec is None
                else Sample.of(
                    bound.operation, name, TensorDesc.of(spec.dtype, spec.shape, spec.stride, device=bound.device)
                )
                for name, spec in zip(self._operation.output_names, bound.outputs, strict=True)
            )
        return super()._check()
