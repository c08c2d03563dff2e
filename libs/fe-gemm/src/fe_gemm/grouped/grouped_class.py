"""The class form of the grouped products: one form of operands, weights by sample or by address."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fe_runtime.api_base import APIBase
from fe_runtime.arrays import get_device, is_jax_array
from fe_runtime.contract import Bound, Contract, OutputSpec, check_outputs
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.operation import Operation
from fe_runtime.tensor_desc import TensorDesc

from . import forms

__all__ = ["GroupedAPI", "Weights", "address_table", "check_buffer", "given_outputs"]


class Weights:
    """The weights of a class: a sample of dense ones, or number, shape and dtype of those behind addresses."""

    def __init__(
        self, operation: str, sample: Any, num_experts: Any, b_shape: Any, b_dtype: Any, b_major: Any, like: Any
    ) -> None:
        self.form = forms.weight_form(sample, b_major)
        self.major = forms.dense_major(sample, b_major)
        self.dense = forms.weights(sample, b_major)
        self._operation, self._asked_major = operation, b_major
        self._discrete = {"num_experts": num_experts, "b_shape": b_shape, "b_dtype": b_dtype}
        self._like = like

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` unless exactly one of the two modes is described completely."""
        given = [name for name, value in self._discrete.items() if value is not None]
        if (self.dense is not None and given) or (self.dense is None and len(given) < len(self._discrete)):
            rule = "be given, or num_experts, b_shape and b_dtype: one of the two"
            found = ", ".join([*(["sample_b"] if self.dense is not None else []), *given]) or "neither"
            fix = "Describe dense weights or those behind addresses."
            raise InvalidArgumentError(explain(self._operation, "sample_b", rule, found, fix))
        shape = self._discrete["b_shape"]
        if shape is not None and (len(shape) not in (2, 3) or tuple(shape[2:]) not in ((), (1,))):
            raise InvalidArgumentError(explain(self._operation, "b_shape", "be (N, K) or (N, K, 1)", repr(shape)))

    def check_depth(self, bound: Bound) -> None:
        """Raise unless the weights behind addresses are as deep as A."""
        shape = self._discrete["b_shape"]
        if shape is not None and shape[1] != bound.dim("K"):
            rule, fix = f"have K = {bound.dim('K')} as a_tensor has", "K counts values, also of packed pairs."
            raise InvalidArgumentError(explain(self._operation, "b_shape", rule, repr(shape), fix))

    @property
    def options(self) -> dict[str, Any]:
        """The operation's options that describe weights."""
        shape = self._discrete["b_shape"]
        n = None if shape is None else shape[0]
        return {"n": n, "b_dtype": self._discrete["b_dtype"], "b_major": self.major}

    def table(self) -> TensorDesc | None:
        """Return the descriptor of a table of addresses, ``None`` for dense weights."""
        count = self._discrete["num_experts"]
        return None if count is None else address_table(self._like, count)

    def live(self, b: Any) -> Any:
        """Return live dense weights as the operation takes them.

        Raises
        ------
        InvalidArgumentError
            They come in another form than the sample.
        """
        form = forms.weight_form(b, self._asked_major)
        if form != self.form and form and self.form:
            rule = f"come in the compiled form ({self.form})"
            raise InvalidArgumentError(explain(self._operation, "b_tensor", rule, form, _ANOTHER))
        return forms.weights(b, self._asked_major)


class GroupedAPI(APIBase):
    """A class form whose live operands have the rank of the samples."""

    def __init__(
        self,
        operation: Operation,
        weights: Weights,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        options: Mapping[str, object],
        backend: str,
    ) -> None:
        self._weights = weights
        super().__init__(operation, inputs, outputs, options, backend)

    def _check(self) -> Any:
        if self._checked is None:
            self._weights.check()
        return super()._check()

    def _admit(
        self,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        run: Callable[..., object],
        stream: object,
        runtime: Mapping[str, object] = MappingProxyType({}),
    ) -> Callable[..., None]:
        names = self._operation.contract.input_names
        for name, sample, array in zip(names, self._inputs, arrays, strict=True):
            shape = getattr(array, "shape", None)
            if sample is not None and shape is not None and len(shape) != sample.desc.ndim:
                rule = f"have the compiled rank {sample.desc.ndim}"
                text = explain(self._operation.name, name, rule, f"shape {tuple(shape)}", _ANOTHER)
                raise InvalidArgumentError(text)
        return super()._admit(arrays, outputs, run, stream, runtime)


def check_buffer(contract: Contract, bound: Bound, name: str, spec: OutputSpec, buffer: Any) -> None:
    """Check an array that the peer may use as scratch, and that this call does not write.

    Raises
    ------
    TypeError, InvalidArgumentError
        It is not as ``spec`` says, or missing.
    """
    if buffer is None:
        rule = f"be an array of shape {spec.shape} and dtype {spec.dtype}"
        raise InvalidArgumentError(explain(contract.operation, name, rule, "None", "Allocate it and pass it."))
    alone = [spec if output.name == name else None for output in contract.outputs]
    held = replace(bound, outputs=tuple(alone), alignments={}, given=dict(bound.given), transposed={})
    check_outputs(contract, held, [None if made is None else buffer for made in alone])


def given_outputs(contract: Contract, outputs: Mapping[str, Any] | None, own: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the caller's arrays in the order of the contract's outputs: ``outputs`` by key, others by arguments.

    Raises
    ------
    InvalidArgumentError
        A key that no result has, or that is an argument of its own.
    """
    known = {**(outputs or {})}
    allowed = [name for name in contract.output_names if name not in own]
    wrong = next((name for name in known if name not in allowed), None)
    if wrong is not None:
        rule = f"have keys among {', '.join(allowed)}"
        raise InvalidArgumentError(explain(contract.operation, "outputs", rule, repr(wrong), "Leave it out."))
    known |= own
    return tuple(known.get(name) for name in contract.output_names)


def address_table(like: Any, count: int) -> TensorDesc:
    """Return the descriptor of a table of ``count`` addresses beside an array: bytes in JAX without 64-bit types."""
    device = like.device if isinstance(like, TensorDesc) else get_device(like)
    if is_jax_array(like) and not _has_wide_integers():
        return TensorDesc.of("uint8", (8 * count,), device=device)
    return TensorDesc.of("int64", (count,), device=device)


_ANOTHER = "Build another object from samples like it."


def _has_wide_integers() -> bool:
    jax: Any = sys.modules["jax"]
    return bool(jax.config.jax_enable_x64)
