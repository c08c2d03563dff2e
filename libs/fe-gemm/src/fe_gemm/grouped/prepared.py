"""Prepared calls of the grouped products: what can be checked once is checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fe_gemm import grouped_gemm_glu_wrapper
from fe_runtime.arrays import detect_framework, get_device, get_shape, get_strides, is_torch_tensor
from fe_runtime.dtypes import canonical_dtype
from fe_runtime.errors import InvalidArgumentError, NotSupportedError, explain
from fe_runtime.tuple_dict import TupleDict

__all__ = ["PreparedGroupedGemm", "prepare_grouped_gemm"]

NAME = "prepare_grouped_gemm"
KINDS = ("glu", "quant")
ROW_RESULTS = ("d_tensor", "sfd_row_tensor")
DYNAMIC = ("a_tensor", "sfa_tensor", "prob_tensor")
"""Arrays whose extents follow from the number of rows."""


def prepare_grouped_gemm(kind: str, *, reuse_row_outputs: bool = False, **kwargs: Any) -> PreparedGroupedGemm:
    """Freeze a canonical dense MXFP8 call, so that later ones are checked against it.

    Parameters
    ----------
    kind
        ``"glu"``: of :func:`fe_gemm.grouped_gemm_glu_wrapper`. (``"quant"`` belongs to an operation that is not built
        yet.)
    reuse_row_outputs
        Whether calls with equal M share the memory of D and its row scales.
    **kwargs
        Arguments of the wrapper by name: canonical contiguous float8_e4m3fn operands with e8m0 scales, M > 0, a C in 16
        bits and a float8_e4m3fn D.

    Returns
    -------
    PreparedGroupedGemm
        Nothing is computed yet.

    Raises
    ------
    InvalidArgumentError
        An unknown kind, or a call that cannot be prepared.
    NotSupportedError
        ``"quant"``.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: prepared grouped GEMM.
    """
    if kind not in KINDS:
        raise InvalidArgumentError(explain(NAME, "kind", "be glu or quant", repr(kind), "Pass one of them."))
    if kind == "quant":
        reason = "grouped_gemm_quant is not built yet"
        raise NotSupportedError(explain(NAME, "kind", "be glu", repr(kind), f"{reason}."), reason=reason)
    return PreparedGroupedGemm(reuse_row_outputs, kwargs)


class PreparedGroupedGemm:
    """A call that was prepared by :func:`prepare_grouped_gemm`, on one stream."""

    def __init__(self, reuse_row_outputs: bool, kwargs: Mapping[str, Any]) -> None:
        _check(kwargs)
        self._signature = _signature(kwargs)
        self._reuse = reuse_row_outputs
        self._kept: dict[int, dict[str, Any]] = {}

    def run(self, *, check: bool = True, outputs: Mapping[str, Any] | None = None, **kwargs: Any) -> TupleDict:
        """Make the call with other values, and with any number of rows.

        Parameters
        ----------
        check
            Whether to compare metadata, options and stream with those of the preparation. What is wrong in itself is
            found in any case.
        outputs
            Arrays to write results into, by their keys.
        **kwargs
            Arguments of the wrapper by name. Offsets, alpha, prob and all other arrays are those of this call.

        Raises
        ------
        InvalidArgumentError
            Something differs from the preparation, or an array of ``outputs`` is not as the result.
        """
        if check:
            _compare(self._signature, _signature(kwargs))
        given = {**(outputs or {})}
        rows = get_shape(kwargs["a_tensor"], "a_tensor")[0]
        if self._reuse:
            given = {**self._kept.get(rows, {}), **given}
        result = grouped_gemm_glu_wrapper(**kwargs, outputs=given)
        if self._reuse:
            self._kept = {rows: {key: result[key] for key in ROW_RESULTS}}
        return result


def _check(kwargs: Mapping[str, Any]) -> None:
    a, b = kwargs.get("a_tensor"), kwargs.get("b_tensor")
    for name, array, rank in (("a_tensor", a, 2), ("b_tensor", b, 3)):
        if array is None or len(get_shape(array, name)) != rank:
            rule = f"be a canonical array of rank {rank}"
            given = "None" if array is None else f"shape {get_shape(array, name)}"
            raise InvalidArgumentError(explain(NAME, name, rule, given, "Use the wrapper for other forms."))
    if get_shape(a, "a_tensor")[0] == 0:
        raise InvalidArgumentError(explain(NAME, "a_tensor", "have rows", "M = 0", "Prepare a call with rows."))
    wanted = {"a_tensor": "float8_e4m3fn", "b_tensor": "float8_e4m3fn"}
    for name, dtype in wanted.items():
        found = canonical_dtype(kwargs[name].dtype)
        if found != dtype:
            raise InvalidArgumentError(explain(NAME, name, f"have dtype {dtype}", found, "Use the wrapper."))
    c_dtype, d_dtype = (canonical_dtype(kwargs.get(name) or "bfloat16") for name in ("c_dtype", "d_dtype"))
    if c_dtype not in ("bfloat16", "float16"):
        raise InvalidArgumentError(explain(NAME, "c_dtype", "be bfloat16 or float16", c_dtype, "Use the wrapper."))
    if d_dtype != "float8_e4m3fn":
        raise InvalidArgumentError(explain(NAME, "d_dtype", "be float8_e4m3fn", d_dtype, "Use the wrapper."))
    for name, value in (("b_major", "k"), ("cd_major", "n")):
        if kwargs.get(name, value) != value:
            raise InvalidArgumentError(explain(NAME, name, f"be {value!r}", repr(kwargs[name]), "Leave it out."))


def _signature(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change, by argument: of arrays dtype, form and device, of others the value."""
    found = {name: _described(name, value) for name, value in kwargs.items() if value is not None}
    found["current_stream"] = _stream(kwargs)
    return found


def _described(name: str, value: Any) -> Any:
    if not hasattr(value, "shape"):
        return value
    shape, stride = get_shape(value, name), get_strides(value, name)
    place = detect_framework(value), str(canonical_dtype(value.dtype)), str(get_device(value))
    return (*place, len(shape)) if name in DYNAMIC else (*place, tuple(shape), tuple(stride))


def _stream(kwargs: Mapping[str, Any]) -> Any:
    stream, a = kwargs.get("current_stream"), kwargs.get("a_tensor")
    if stream is None and is_torch_tensor(a) and a is not None and a.is_cuda:
        import torch

        return int(torch.cuda.current_stream(a.device).cuda_stream)
    return int(getattr(stream, "cuda_stream", stream)) if stream is not None else None


def _compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in [*was, *(name for name in now if name not in was)]:
        if was.get(name) != now.get(name):
            rule, fix = f"be as prepared: {was.get(name)}", "Prepare another call."
            raise InvalidArgumentError(explain(NAME, name, rule, now.get(name), fix))
