"""Gradients of experts' weights on Hopper: for each expert the product of A and B over its tokens.

The parts are those of the core: a warp fills a ring, two warp groups multiply and finish. What differs: tiles belong to
experts, and the number of slots that a tile takes to the expert's tokens. Each expert has tensor maps of its own, in
which A and B end with its tokens, so what follows in memory arrives as zeros, wherever a group begins and ends. An
expert without tokens takes one slot of zeros.

Every value of W is computed by one thread in one order, whatever the order of the tiles. Where W is added to what is
there, TMA adds it, rounded to its dtype, when it stores: one addition to each value, in which float32 numbers below
2^-126 may count as zeros. The tiles of experts without tokens are then left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from fe_gemm.kernels import expand
from fe_gemm.planning import expand as launch_expand
from fe_gemm.planning.grouped_wgrad import Plan, split_config
from fe_runtime.cute.arguments import fake_stream
from fe_runtime.cute.types import storage

from .arguments import ALIGNMENT, aligned
from .block import dimensions
from .tensor_maps import fake_table
from .wgrad_groups import launch_groups
from .wgrad_kernel import Core, wgrad_kernel
from .wgrad_maps import ExpertMap
from .wgrad_tiles import expert_grid

__all__ = ["build"]


def build(arch: str, **config: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launcher and its fake arguments: those that ``config`` names, in its order, and the stream.

    ``config`` is what :func:`fe_gemm.planning.grouped_wgrad.config` returns.
    """
    wgrad = _Wgrad.of(arch, split_config(config))

    @cute.jit
    def grouped_gemm_wgrad(*arguments: Any) -> None:
        *values, stream = arguments
        wgrad.launch(dict(zip(wgrad.plan.arguments, values, strict=True)), stream)

    fakes = wgrad.fake_arguments()
    return grouped_gemm_wgrad, (*(fakes[name] for name in wgrad.plan.arguments), fake_stream())


@dataclass(frozen=True, slots=True)
class _Wgrad:
    """A plan with the setups of the expansions."""

    plan: Plan
    setups: dict[str, expand.Setup]

    @classmethod
    def of(cls, arch: str, plan: Plan) -> _Wgrad:
        found = plan.problem.workspaces.items()
        return cls(plan, {name: expand.Setup.of(arch, how, launch_expand.choose(how, arch)) for name, how in found})

    def launch(self, arrays: dict[str, Any], stream: Any) -> None:
        """Launch what expands operands, what makes maps and records, and the product."""
        offsets, workspace, how = arrays["offsets"], arrays["groups"], self.plan.launch
        core = Core(self.plan.problem, how, self.plan.dynamic)
        a, b = (self._operand(name, arrays, stream) for name in "ab")
        operands = core.source().atoms(a, b)
        result = core.result_atom(self._result(arrays, a, b))
        self._describe_groups({"a": operands[:2], "b": operands[2:], "c": result}, (a, b), arrays, stream)
        experts = offsets.shape[0]
        tiles = expert_grid(how, a.shape[0], b.shape[0], experts)
        wgrad_kernel(core, operands, result, workspace, experts).launch(
            **dimensions(how, tiles.count, self.plan.multiprocessors), stream=stream
        )

    def _describe_groups(
        self, pairs: dict[str, Any], operands: tuple[cute.Tensor, cute.Tensor], arrays: dict[str, Any], stream: Any
    ) -> None:
        """Launch what fills the workspace: the experts' maps of ``pairs``, and the records."""
        problem, maps = self.plan.problem, []
        for name, (atom, array) in pairs.items():
            if name == "c" and problem.discrete:
                maps.append(ExpertMap("addressed", atom, array, _addresses(arrays)))
            elif name != "c" and name in problem.ragged_maps:
                maps.append(ExpertMap("ragged", atom, array, operands["ab".index(name)].iterator.toint()))
            elif name != "c":
                maps.append(ExpertMap("tokens", atom, array))
        scales = (arrays["scale_a"], arrays["scale_b"]) if problem.factors else ()
        launch_groups(arrays["offsets"], operands[0].shape[1], scales, tuple(maps), arrays["groups"], stream)

    def _operand(self, name: str, arrays: dict[str, Any], stream: Any) -> cute.Tensor:
        """Return A as (M, T, 1), or B as (N, T, 1), after launching their expansion."""
        problem, array = self.plan.problem, arrays[name]
        given = _one_matrix(array, name == "b" and not problem.b_turned, problem.majors[name] == "k")
        setup = self.setups.get(name)
        if setup is None:
            return given
        values = expand.expanded_matrices(setup.problem, given, arrays[f"{name}_values"])
        expand.launch_expand(setup, given, arrays[f"sf{name}"], values, stream, arrays["offsets"])
        return values

    def _result(self, arrays: dict[str, Any], a: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
        """Return W (M, N, E); where it comes with addresses, (M, N, 1) at an address that is replaced."""
        m, n = a.shape[0], b.shape[0]
        if not self.plan.problem.discrete:
            stacked = arrays["c"]
            return aligned(cute.make_tensor(stacked.iterator, cute.select(stacked.layout, mode=[1, 2, 0])), True)
        start = cute.recast_ptr(a.iterator, dtype=storage(self.plan.problem.c_dtype))
        return aligned(cute.make_tensor(start, cute.make_layout((m, n, 1), stride=(Int64(n), 1, Int64(n)))), True)

    def fake_arguments(self) -> dict[str, Any]:
        """Return stand-ins for all arguments by name."""
        problem, make = self.plan.problem, cute.runtime.make_fake_tensor
        experts, m, n, t = (cute.sym_int() for _ in range(4))
        dtype = storage(problem.operands.element or problem.dtype)
        b_first, b_second = (n, t) if problem.b_turned else (t, n)
        stacked = make(
            storage(problem.c_dtype), (experts, m, n), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=ALIGNMENT
        )
        found = {
            "a": _fake_matrix(dtype, m, t, problem.a_major == "k"),
            "b": _fake_matrix(dtype, b_first, b_second, (problem.b_major == "k") == problem.b_turned),
            "offsets": make(Int32, (experts,), (1,), assumed_align=4),
            "c": stacked,
            "old_c": stacked,
            "addresses": make(Int64, (experts,), (1,), assumed_align=8),
            "address_bytes": make(Uint8, (cute.sym_int(),), (1,), assumed_align=8),
            "token": make(storage(problem.c_dtype), (m, n), (cute.sym_int64(), 1)),
            "groups": fake_table(),
        }
        scales = {name: make(Float32, (experts,), (1,), assumed_align=4) for name in ("scale_a", "scale_b")}
        for name, setup in self.setups.items():
            _, found[f"sf{name}"], found[f"{name}_values"], *_ = expand.fake_arguments(setup.problem)
        return found | scales


def _addresses(arrays: dict[str, Any]) -> cute.Tensor:
    """Return the addresses (E,) of W, which may come as bytes."""
    if "addresses" in arrays:
        return arrays["addresses"]
    given = arrays["address_bytes"]
    return cute.make_tensor(cute.recast_ptr(given.iterator, dtype=Int64), cute.make_layout(given.shape[0] // 8))


def _one_matrix(array: cute.Tensor, turned: bool, second_is_contiguous: bool) -> cute.Tensor:
    """Return a matrix, transposed or not, as a batch of one; ``second_is_contiguous``: of the result."""
    first, second = (1, 0) if turned else (0, 1)
    shape = (array.shape[first], array.shape[second], 1)
    stride = (array.stride[first], array.stride[second], 0)
    return aligned(cute.make_tensor(array.iterator, cute.make_layout(shape, stride=stride)), second_is_contiguous)


def _fake_matrix(dtype: type[cutlass.Numeric], first: Any, second: Any, second_is_contiguous: bool) -> cute.Tensor:
    line = cute.sym_int64()
    stride = (line, 1) if second_is_contiguous else (1, line)
    return cute.runtime.make_fake_tensor(dtype, (first, second), stride, assumed_align=ALIGNMENT)
