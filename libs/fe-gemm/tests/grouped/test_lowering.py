"""What JAX hands to the kernels on a GPU: shapes and order of operands, by lowering for CUDA without one."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from grouped_arguments import Forward, Gated

from fe_gemm import grouped_gemm_dglu_jax, grouped_gemm_glu_jax, grouped_gemm_jax, grouped_gemm_wgrad_jax
from fe_gemm.planning.grouped import split_config
from fe_runtime.compile import cache
from fe_runtime.jax import lowering


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are asked for; none is compiled."""
    kernels: list[Any] = []

    def target(kernel: Any, run: Any) -> str:
        del run
        kernels.append(kernel)
        return "grouped_kernel"

    monkeypatch.setattr(cache, "load", lambda spec: lambda *operands: None)
    monkeypatch.setattr(lowering, "bridge_problem", lambda: None)
    monkeypatch.setattr(lowering, "ffi_target", target)
    return kernels


def lowered(function: Any, arrays: dict[str, Any], **static: Any) -> tuple[list[str], list[str], str]:
    """Return the types of the operands and the results of the one kernel call, and all of the program."""
    described = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    traced = jax.jit(lambda given: function(**given, **static)).trace(described)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @grouped_kernel" in line]
    operands, results = line.rpartition(" : ")[2].split(" -> ")
    types = [re.findall(r"tensor<([^>]*)>", part) for part in (operands, results)]
    return types[0], types[1], text


def by_name(kernel: Any, operands: list[str], results: list[str]) -> dict[str, str]:
    """Return the types by the kernel's names of its arguments: operands, results with workspaces."""
    names = split_config(dict(kernel.spec.config)).arguments
    tensors = names[: len(operands) + len(results)]
    assert len(names) == len(tensors) + len(kernel.form.scalars)
    return dict(zip(tensors, operands + results, strict=True))


def jax_arrays(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in given.items() if isinstance(x, jax.Array)}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mode", ["dense", "discrete"])
def test_unfused(mode: str, rank: int, seen: list[Any]) -> None:
    p = Forward(n=64, k=64)
    given = jax_arrays(p.arguments("jax", mode, rank=rank)) | {"bias_tensor": p.bias_in("jax")}
    n = 64 if mode == "discrete" else None
    operands, results, _ = lowered(grouped_gemm_jax, given, n=n, generate_c=True, c_dtype="float32")
    types = by_name(seen[0], operands, results)
    weights = {"b": "4x64x64xbf16"} if mode == "dense" else {"addresses": "32xui8"}
    wanted = {"a": "64x64xbf16", "offsets": "4xi32", "alpha": "4xf32", "bias": "4x64xf32", "prob": "64xf32",
              "c": "64x64xbf16", "pre": "64x64xf32", **weights}  # fmt: skip
    assert {name: types[name] for name in wanted} == wanted
    assert set(types) - set(wanted) == {"maps"}


def test_glu(seen: list[Any]) -> None:
    given = jax_arrays(Gated().arguments("jax"))
    operands, results, text = lowered(grouped_gemm_glu_jax, given, generate_c=True, act_func="geglu")
    types = by_name(seen[0], operands, results)
    assert (types["c"], types["pre"]) == ("160x64xbf16", "160x128xbf16")
    assert seen[0].form.scalars == ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")
    assert all(f"{name} = " in text for name in seen[0].form.scalars)


@pytest.mark.parametrize("rank", [2, 3])
def test_dglu_adds_to_zeros(rank: int, seen: list[Any]) -> None:
    p = Gated(n=64)
    given = jax_arrays(p.arguments("jax", rank=rank))
    given |= {"c_tensor": p.rows_like(p.c, "jax", rank), "beta_tensor": jax.numpy.asarray(p.beta)}
    operands, results, text = lowered(grouped_gemm_dglu_jax, given, generate_dbias=True)
    types = by_name(seen[0], operands, results)
    wanted = {"upstream": "160x128xbf16", "c": "160x128xbf16", "old_dprob": "160xf32", "dprob": "160xf32",
              "old_dbias": "3x128xbf16", "dbias": "3x128xbf16", "beta": "3xf32"}  # fmt: skip
    assert {name: types[name] for name in wanted} == wanted
    names = list(types)
    for role in ("dprob", "dbias"):
        at, to = names.index(f"old_{role}"), names.index(role) - len(operands)
        assert f"output_tuple_indices = [{to}], operand_index = {at}" in text


def test_wgrad(seen: list[Any]) -> None:
    arrays = {
        "a_tensor": np.zeros((64, 256), "bfloat16"),
        "b_tensor": np.zeros((256, 32), "bfloat16"),
        "offsets_tensor": np.zeros(2, np.int32),
    }
    operands, results, _ = lowered(grouped_gemm_wgrad_jax, {key: jax.numpy.asarray(x) for key, x in arrays.items()})
    assert operands == ["64x256xbf16", "256x32xbf16", "2xi32"]
    assert results[0] == "2x64x32xbf16"
    table = jax.numpy.zeros(16, "uint8")
    arrays = {key: jax.numpy.asarray(x) for key, x in arrays.items()} | {"wgrad_ptrs": table}
    operands, results, _ = lowered(grouped_gemm_wgrad_jax, arrays, accumulate_on_output=True)
    assert operands == ["64x256xbf16", "256x32xbf16", "2xi32", "16xui8"]
    assert results[0] == "64x32xbf16"
    assert len(seen) == 2
