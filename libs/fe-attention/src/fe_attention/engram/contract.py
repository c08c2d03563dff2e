"""What the Engram gate and its gradient accept and return, and the plans of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fe_attention import epsilon
from fe_attention.planning import engram as launch
from fe_runtime import KernelSpec
from fe_runtime.contract import Bound, Contract, Input, Option, Output, OutputSpec, Rule
from fe_runtime.plan import Form, Kernel, NoKernel, Target

__all__ = ["BACKWARD", "FORWARD", "GATE", "find_backward_kernel", "find_kernel"]

ALIGNMENT = 16
BF16 = ("bfloat16",)
FP32 = ("float32",)

EPS = Option(
    "eps",
    float,
    1e-20,
    holds=epsilon.holds,
    rule=epsilon.RULE,
    invalid=(0.0, -1.0, float("nan"), float("inf"), 1e-50),
    runtime=True,
    doc="added to the mean squares",
)


def _like(name: str) -> Callable[[Bound], OutputSpec]:
    """Return the specification of an output like an input."""

    def spec(bound: Bound) -> OutputSpec:
        return OutputSpec(tuple(bound.arrays[name].shape), bound.arrays[name].dtype, alignment=ALIGNMENT)

    return spec


def _saved(bound: Bound) -> OutputSpec:
    return OutputSpec((bound.dim("N"), bound.dim("H"), 4), "float32", alignment=ALIGNMENT)


def _input(name: str, shape: str, dtypes: tuple[str, ...], doc: str) -> Input:
    return Input(name, shape, dtypes, alignment=ALIGNMENT, doc=doc)


def _cut(letter: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what cuts a valid call down to no streams, or to no values in a stream."""

    def cut(call: Mapping[str, Any]) -> dict[str, Any]:
        streams, width = call["weight"].shape
        streams, width = (0, width) if letter == "H" else (streams, 0)
        shapes = {"x": (streams, width), "grad_out": (streams, width), "saved": (streams, 4)}
        found = {name: call[name][:, : s[0], : s[1]].copy() for name, s in shapes.items() if name in call}
        kv = call["kv"][:, : (streams + 1) * width].copy()
        return {**call, **found, "kv": kv, "weight": call["weight"][:streams, :width].copy()}

    return cut


def _some(letter: str, what: str) -> Rule:
    return Rule(
        "x",
        f"have at least one {what}",
        holds=lambda bound: bound.dim(letter) > 0,
        given=lambda bound: f"shape {bound.given['x']}",
        fix="There is nothing to take the mean square of.",
        violation=_cut(letter),
    )


_RULES = (_some("H", "stream"), _some("D", "value in a stream"))
_DERIVED = {"E": lambda bound: (bound.dim("H") + 1) * bound.dim("D")}

FORWARD = Contract(
    operation="engram_gate_saved_forward",
    inputs=(
        _input("x", "N H D", BF16, "streams of each token"),
        _input("kv", "N E", BF16, "a key of each stream, then the value: E = (H + 1) * D"),
        _input("weight", "H D", FP32, "product of the weights of both norms"),
        Input("token_mask", "N", ("bool",), doc="False: the token's gates are 0"),
    ),
    options=(EPS,),
    outputs=(
        Output("out", _like("x"), doc="x + gate * value"),
        Output("saved", _saved, doc="gate, dot, rx, rk of each stream, for the gradient"),
    ),
    rules=_RULES,
    dynamic=("N",),
    derived=_DERIVED,
)

GATE = replace(FORWARD, operation="engram_gate")
"""The same as an operation that is differentiated."""

BACKWARD = Contract(
    operation="engram_gate_saved_backward",
    inputs=(
        _input("grad_out", "N H D", BF16, "gradient of out"),
        _input("x", "N H D", BF16, "as given to the forward"),
        _input("kv", "N E", BF16, "as given to the forward: E = (H + 1) * D"),
        _input("weight", "H D", FP32, "as given to the forward"),
        _input("saved", "N H 4", FP32, "as the forward returned it"),
    ),
    outputs=(
        Output("grad_x", _like("x"), doc="gradient of x"),
        Output("grad_kv", _like("kv"), doc="gradient of kv"),
        Output("grad_weight", _like("weight"), doc="gradient of weight"),
    ),
    rules=_RULES,
    dynamic=("N",),
    derived=_DERIVED,
)


def find_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the forward's kernel: one for each number of streams and width, for any number of tokens."""
    problem = launch.Problem(bound.dim("H"), bound.dim("D"))
    config = launch.config(problem, launch.choose_forward(problem))
    builder = "fe_attention.kernels.engram_forward:build"
    spec = KernelSpec.of("fe_attention.engram_gate_saved_forward", builder, target.arch, **config)
    return Kernel(spec, _form(bound, scalars=("eps",)))


def find_backward_kernel(bound: Bound, target: Target) -> Kernel | NoKernel:
    """Plan the gradient's kernels: with whole tokens in shared memory where they fit, else with two passes over them.

    They also depend on the number of multiprocessors.
    """
    problem = launch.Problem(bound.dim("H"), bound.dim("D"))
    if problem.streams > launch.MOST_STREAMS:
        reason = f"the kernel serves up to {launch.MOST_STREAMS} streams, not {problem.streams}"
        return NoKernel(reason, "Split the streams: they share the gradient of the value only.")
    whole = launch.choose_whole(problem, target.arch, target.sm_count)
    how = whole or launch.choose_backward(problem, target.sm_count)
    builder = f"fe_attention.kernels.engram_{'backward' if whole is None else 'whole'}:build"
    config = launch.config(problem, how)
    spec = KernelSpec.of("fe_attention.engram_gate_saved_backward", builder, target.arch, **config)
    tokens = bound.dim("N")
    coefficients = ((tokens, problem.streams, 4), "float32")
    sums = ((launch.partial_rows(how, tokens), problem.streams * problem.width), "float32")
    return Kernel(spec, _form(bound, scratch=(coefficients, sums) if whole is None else (sums,)))


def _form(bound: Bound, **more: Any) -> Form:
    inputs = tuple(tuple(array.shape) for array in bound.arrays.values())
    return Form(inputs, tuple(None if spec is None else spec.shape for spec in bound.outputs), related=True, **more)
