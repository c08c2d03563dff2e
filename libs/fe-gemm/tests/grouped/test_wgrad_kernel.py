"""The kernel that ``grouped_gemm_wgrad`` plans takes the arguments that the runtime passes, and refuses others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from device_arrays import ADDRESS, DeviceArray

import fe_runtime
from fe_gemm.grouped.wgrad import OPERATION
from fe_gemm.grouped.wgrad_contract import scale_bytes
from fe_gemm.grouped.wgrad_kernel import find_wgrad
from fe_gemm.planning.grouped_wgrad import split_config
from fe_runtime.arrays import Device, capability
from fe_runtime.compile import load
from fe_runtime.contract import Bound
from fe_runtime.dtypes import bits
from fe_runtime.plan import HOPPER, Kernel, NoKernel, Target
from fe_runtime.tensor_desc import TensorDesc

E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
E, M, N = 3, 144, 208


@dataclass(frozen=True)
class Call:
    """A call: operands' dtype and majors, scales, and what becomes of W."""

    element: str = "bfloat16"
    majors: str = "mn"
    scale: str | None = None
    vec: int = 16
    c_dtype: str = "bfloat16"
    accumulates: bool = False
    discrete: bool = False
    ragged: bool = False
    factors: bool = False
    m: int = M
    tokens: int = 640

    def bound(self) -> Bound:
        made = {"offsets_tensor": TensorDesc.of("int32", (E,), device="cuda")}
        made["a_tensor"] = self._operand(self.m, self.majors[0] == "k", True)
        b_name = "bt_tensor" if self.element == E2M1 else "b_tensor"
        made[b_name] = self._operand(N, self.majors[1] == "k", self.element == E2M1)
        if self.scale is not None:
            for name, rows in (("sfa_tensor", self.m), ("sfb_tensor", N)):
                size = scale_bytes(rows, self.tokens, self.vec)
                made[name] = TensorDesc.of(self.scale, (size,), device="cuda")
        if self.factors:
            made |= {
                name: TensorDesc.of("float32", (E,), device="cuda") for name in ("global_scale_a", "global_scale_b")
            }
        if self.discrete:
            made["wgrad_ptrs"] = TensorDesc.of("int64", (E,), device="cuda")
        options = {
            "wgrad_dtype": self.c_dtype,
            "sf_vec_size": self.vec,
            "accumulate_on_output": self.accumulates,
            "input_order": "tensor_ragged" if self.ragged else "tensor2d",
        }
        return OPERATION.bind([made.get(entry.name) for entry in OPERATION.contract.inputs], options)

    def _operand(self, rows: int, tokens_contiguous: bool, rows_first: bool) -> TensorDesc:
        tokens, dtype = (self.tokens // 2, "uint8") if self.element == E2M1 else (self.tokens, self.element)
        stride = (tokens, 1) if tokens_contiguous else (1, rows)
        shape = (rows, tokens)
        if not rows_first:
            shape, stride = shape[::-1], stride[::-1]
        return TensorDesc.of(dtype, shape, stride, device="cuda")

    def plan(self) -> Kernel:
        plan = find_wgrad(self.bound(), HOPPER)
        assert isinstance(plan, Kernel)
        return plan


CALLS = {
    "plain": (Call(), "a b offsets c groups"),
    "added": (Call(accumulates=True, c_dtype="float32"), "a b offsets old_c c groups"),
    "addresses": (Call(discrete=True, majors="kk", ragged=True), "a b offsets addresses groups"),
    "mxfp8": (
        Call(E4M3, "mn", E8M0, 32, factors=True),
        "a b sfa sfb offsets scale_a scale_b c groups a_values b_values",
    ),
    "nvfp4": (
        Call(E2M1, "kk", E4M3, 16, "float32", factors=True, ragged=True),
        "a b sfa sfb offsets scale_a scale_b c groups a_values b_values",
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


@pytest.mark.parametrize(("call", "names"), CALLS.values(), ids=list(CALLS))
def test_the_plan_says_what_is_computed(call: Call, names: str) -> None:
    plan = split_config(dict(call.plan().spec.config))
    problem = plan.problem
    assert plan.arguments == tuple(names.split())
    assert (problem.a_major, problem.b_major) == tuple(call.majors)
    assert (problem.accumulates, problem.discrete, problem.ragged) == (call.accumulates, call.discrete, call.ragged)
    assert (problem.c_dtype, problem.factors) == (call.c_dtype, call.factors)
    assert problem.operands.form == (None if call.scale is None else (call.element, call.scale, call.vec))
    assert problem.b_turned == (call.element == E2M1)
    assert problem.is_consistent


def test_neither_tokens_nor_sizes_select_a_kernel() -> None:
    assert Call(tokens=64).plan().spec == Call(tokens=100_000).plan().spec


def test_other_gpus_have_no_kernel() -> None:
    assert isinstance(find_wgrad(Call().bound(), Target((8, 0), 108)), NoKernel)


def test_a_single_row_or_column_lies_along_the_tokens() -> None:
    plan = split_config(dict(Call(majors="kn", m=1).plan().spec.config))
    assert (plan.problem.a_major, plan.problem.b_major) == ("k", "n")


# ---- arguments


@pytest.fixture
def no_gpu() -> None:
    try:
        capability(Device("cuda", 0))
    except RuntimeError:
        return
    pytest.skip("a GPU would run kernels on arrays that are not there")


def stored(dtype: str) -> str:
    return "uint8" if bits(dtype) <= 8 else dtype


def arrays_of(call: Call) -> dict[str, DeviceArray]:
    """Return what the runtime would pass, by the names of the arguments."""
    bound, plan = call.bound(), call.plan()
    found = []
    for shape, desc in zip(plan.form.inputs, bound.arrays.values(), strict=True):
        assert shape is not None
        stride = desc.stride if shape == tuple(desc.shape) else (shape[1], 1)
        found.append(DeviceArray(shape, stored(desc.dtype), stride))
    specs = [spec for spec in bound.outputs if spec is not None]
    results = [DeviceArray(spec.shape, spec.dtype) for spec in specs]
    found += [array for array, spec in zip(results, specs, strict=True) if spec.accumulate] + results
    found += [DeviceArray(*known) for known in plan.form.scratch]
    return dict(zip(split_config(dict(plan.spec.config)).arguments, found, strict=True))


def refuses(run: Any, arrays: dict[str, DeviceArray]) -> bool:
    """Call a function; where it takes its arguments, it ends where the driver is needed."""
    import tvm_ffi

    with pytest.raises((TypeError, ValueError, RuntimeError)) as found:
        run(*(tvm_ffi.from_dlpack(array) for array in arrays.values()))
    return not (found.type is RuntimeError and "CUDA" in str(found.value))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("call", [call for call, _ in CALLS.values()], ids=list(CALLS))
def test_arguments(call: Call) -> None:
    run = load(call.plan().spec)
    right = arrays_of(call)
    assert not refuses(run, right)
    assert not refuses(run, arrays_of(replace(call, tokens=64, m=1040)))
    for name, array in right.items():
        wrong = [
            DeviceArray(array.shape, "float16" if array.dtype != "float16" else "uint8", array.stride),
            DeviceArray((1, 1, 1, 1), array.dtype),
            DeviceArray(array.shape, array.dtype, array.stride, ADDRESS + 2),
        ]
        for other in wrong:
            assert refuses(run, right | {name: other}), f"{name}: {other.dtype} {other.shape}"
