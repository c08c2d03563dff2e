"""What the CSA compressor and its gradient accept and return, and the plans of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fe_attention.planning import csa as launch
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.errors import InvalidArgumentError, explain
from fe_runtime.plan import Form, Kernel, NoKernel, Target
from fe_runtime.values import Read

__all__ = [
    "ACCUMULATING",
    "BACKWARD",
    "COMPRESSOR",
    "FORWARD",
    "check_prefixes",
    "find_accumulating_kernel",
    "find_backward_kernel",
    "find_kernel",
]

ALIGNMENT = 16
BF16 = ("bfloat16",)
LARGEST_RATIO = 2**20


def _number(bound: Bound, name: str) -> int:
    value: Any = bound.options[name]  # perhaps symbolic, while torch traces
    return value  # type: ignore[no-any-return]


def _positive(name: str, doc: str, default: int | None, **more: Any) -> Option:
    return Option(
        name,
        int,
        default,
        holds=lambda value: isinstance(value, int) and 0 < value <= LARGEST_RATIO,
        rule=f"be positive, at most {LARGEST_RATIO}",
        invalid=(0, -1),
        doc=doc,
        **more,
    )


_OPTIONS = (
    _positive("ratio", "tokens of a block", 4),
    _positive(
        "head_dim",
        "channels of a result; None: the columns of kv / coff",
        None,
        resolve=lambda bound: max(1, bound.dim("W") // _number(bound, "coff")),
    ),
    Option("coff", int, 2, choices=(1, 2), doc="2: windows reach back over the block before; 1: they do not"),
)


def _tokens(name: str, doc: str) -> Input:
    return Input(name, "T W", BF16, alignment=ALIGNMENT, doc=doc)


_OPERANDS = (
    _tokens("kv", "values of all tokens: W = coff * head_dim"),
    _tokens("score", "their scores"),
    Input("ape", "R W", ("float32",), alignment=ALIGNMENT, doc="added to the scores by place in the block: R = ratio"),
    Input("cu_seqlens", "P", ("int32",), alignment=4, doc="where the tokens of each sequence start, and the last end"),
    Input("cu_seqlens_comp", "P", ("int32",), alignment=4, doc="the same of their blocks: P = B + 1"),
)


def _without_columns(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, **{name: call[name][:, :-1].copy() for name in ("kv", "score", "ape")}}


def _without_offsets(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, **{name: call[name][:0] for name in ("cu_seqlens", "cu_seqlens_comp")}}


def _with_one_token(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, **{name: call[name][:1] for name in ("kv", "score")}}


def _with_fewer_channels(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "grad_out": call["grad_out"][:, :-1].copy()}


def _rows(bound: Bound) -> int:
    return bound.dim("M") if "M" in bound.dims else _number(bound, "total_comp")


_RULES = (
    Rule(
        "kv",
        "have coff * head_dim columns",
        holds=lambda bound: bound.dim("W") == _number(bound, "coff") * _number(bound, "head_dim"),
        given=lambda bound: f"shape {bound.given['kv']} with coff {bound.options['coff']}",
        fix="Leave head_dim out, or pad the columns to a multiple of coff.",
        violation=lambda call: {**_without_columns(call), "head_dim": None, "coff": 2},
    ),
    Rule(
        "cu_seqlens",
        "have at least one offset",
        holds=lambda bound: bound.dim("P") > 0,
        given=lambda bound: f"shape {bound.given['cu_seqlens']}",
        fix="Pass B + 1 offsets, the first 0.",
        violation=_without_offsets,
    ),
    Rule(
        "kv",
        "have at least ratio tokens where there are rows of the result",
        holds=lambda bound: _rows(bound) == 0 or bound.dim("T") >= _number(bound, "ratio"),
        given=lambda bound: f"{bound.dim('T')} tokens, ratio {bound.options['ratio']} and {_rows(bound)} rows",
        fix="A sequence shorter than a block has no row: total_comp is 0.",
        violation=_with_one_token,
    ),
)
_DERIVED: Mapping[str, Callable[[Bound], int]] = {"R": lambda bound: _number(bound, "ratio")}
_DYNAMIC = ("T", "P", "M")

FORWARD = Contract(
    operation="csa_compressor_forward",
    inputs=_OPERANDS,
    options=(
        *_OPTIONS,
        Option(
            "total_comp",
            int,
            0,
            holds=lambda value: isinstance(value, int) and value >= 0,
            rule="be at least 0",
            invalid=(-1,),
            doc="rows of the result; a bound on cu_seqlens_comp[-1]",
        ),
    ),
    outputs=(
        Output(
            "out",
            lambda bound: OutputSpec(
                (_number(bound, "total_comp"), _number(bound, "head_dim")), "bfloat16", alignment=ALIGNMENT
            ),
            doc="a row for each block",
        ),
    ),
    rules=_RULES,
    dynamic=_DYNAMIC,
    derived=_DERIVED,
)

COMPRESSOR = replace(FORWARD, operation="csa_compressor")
"""The same as an operation that is differentiated."""


def _like(name: str, accumulate: str = "") -> Callable[[Bound], OutputSpec]:
    def spec(bound: Bound) -> OutputSpec:
        array = bound.arrays[name]
        return OutputSpec(tuple(array.shape), array.dtype, alignment=ALIGNMENT, accumulate=accumulate)

    return spec


BACKWARD = Contract(
    operation="csa_compressor_backward",
    inputs=(Input("grad_out", "M D", BF16, alignment=ALIGNMENT, doc="gradient of out: D = head_dim"), *_OPERANDS),
    options=_OPTIONS,
    outputs=(
        Output("grad_kv", _like("kv"), doc="gradient of kv"),
        Output("grad_score", _like("score"), doc="gradient of score"),
        Output("grad_ape", _like("ape"), doc="gradient of ape"),
    ),
    rules=(
        *_RULES,
        Rule(
            "grad_out",
            "have head_dim columns",
            holds=lambda bound: bound.dim("D") == _number(bound, "head_dim"),
            given=lambda bound: f"shape {bound.given['grad_out']} with head_dim {bound.options['head_dim']}",
            fix="It has the shape of out.",
            violation=_with_fewer_channels,
        ),
    ),
    dynamic=_DYNAMIC,
    derived=_DERIVED,
)

ACCUMULATING = replace(
    BACKWARD,
    operation="csa_compressor_backward_accumulating",
    outputs=(*BACKWARD.outputs[:2], Output("grad_ape", _like("ape", "add"), doc="the gradient of ape is added to it")),
)
"""The gradient that adds to ``grad_ape`` by atomics and needs no scratch memory: the class form without determinism."""


def check_prefixes(bound: Bound, read: Read) -> None:
    """Raise for offsets that decrease or leave the tokens, and for blocks that are not those of the tokens.

    Raises
    ------
    InvalidArgumentError
        Naming the first offset that is wrong.
    """
    tokens, ratio = bound.dim("T"), _number(bound, "ratio")
    starts, blocks = (read(name).astype(np.int64) for name in ("cu_seqlens", "cu_seqlens_comp"))
    wrong = (starts < 0) | (starts > tokens) | (np.diff(starts, prepend=starts[:1]) < 0)
    rule, fix = f"hold offsets from 0 to T = {tokens} that never decrease", "Pass the cumulative lengths."
    _reject(bound, "cu_seqlens", rule, starts, wrong, fix)
    wanted = np.concatenate([[0], np.cumsum(np.diff(starts) // ratio)])
    rule = f"hold the cumulative numbers of whole blocks of {ratio} tokens, from 0"
    _reject(bound, "cu_seqlens_comp", rule, blocks, blocks != wanted, "A sequence of n tokens has n // ratio blocks.")
    rows = _rows(bound)
    _reject(bound, "cu_seqlens_comp", f"end at most at the number of rows, {rows}", blocks, blocks > rows, "Raise it.")


def _reject(bound: Bound, name: str, rule: str, values: Any, wrong: Any, fix: str) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidArgumentError(explain(bound.operation, name, rule, f"{values[at]} at index {at}", fix))


# ---- kernels


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the forward's kernel: one for each ratio, width and overlap, for any tokens and sequences."""
    problem = _problem(bound)
    if problem.entries > launch.MOST_ENTRIES:
        return _too_long(problem)
    config = launch.config(problem, launch.choose_forward(problem))
    builder = "fe_attention.kernels.csa_forward:build"
    spec = KernelSpec.of("fe_attention.csa_compressor_forward", builder, target.arch, **config)
    return Kernel(spec, _form(bound))


def find_backward_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the gradient's kernels, which also depend on the number of multiprocessors."""
    return _backward(bound, target, atomic=False)


def find_accumulating_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the kernels of the gradient that adds to ``grad_ape``."""
    return _backward(bound, target, atomic=True)


def _backward(bound: Bound, target: Target, *, atomic: bool) -> Kernel | NoKernel:
    problem = _problem(bound)
    if problem.entries > launch.MOST_ENTRIES:
        return _too_long(problem)
    how = launch.choose_backward(problem, target.sm_count)
    config = {**launch.config(problem, how), "atomic": atomic}
    builder = "fe_attention.kernels.csa_backward:build"
    spec = KernelSpec.of("fe_attention.csa_compressor_backward", builder, target.arch, **config)
    if atomic:
        return Kernel(spec, _form(bound))
    sums = ((launch.partial_rows(how, bound.dim("M")), problem.ratio * problem.columns), "float32")
    return Kernel(spec, _form(bound, scratch=(sums,)))


def _problem(bound: Bound) -> launch.Problem:
    return launch.Problem(*(_number(bound, name) for name in ("head_dim", "ratio", "coff")))


def _too_long(problem: launch.Problem) -> NoKernel:
    reason = f"the kernel serves windows of up to {launch.MOST_ENTRIES} tokens, not {problem.entries}"
    return NoKernel(reason, "Choose a smaller ratio.")


def _form(bound: Bound, **more: Any) -> Form:
    inputs = tuple(tuple(array.shape) for array in bound.arrays.values())
    outputs = tuple(None if spec is None else spec.shape for spec in bound.outputs)
    return Form(inputs, outputs, related=True, **more)
