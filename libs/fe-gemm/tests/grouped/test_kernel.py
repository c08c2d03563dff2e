"""From checked calls of the grouped products to kernels: order and shapes of arguments, what selects a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouped_arguments import Forward, Gated
from naive_gemm import E4M3, STORED
from naive_grouped import BF16

import fe_runtime
from fe_gemm.grouped import dglu, forms, glu, unfused, wgrad
from fe_gemm.planning.grouped import split_config
from fe_runtime.compile import resource_usage
from fe_runtime.contract import Bound
from fe_runtime.launch import kernel_launch
from fe_runtime.operation import Operation
from fe_runtime.plan import HOPPER, Kernel, NoKernel
from fe_runtime.testing import to_framework

MODES = ("dense", "discrete")


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[None]:
    fe_runtime.configure(cache_dir=tmp_path)
    yield
    fe_runtime.configure(cache_dir=None)


def bound_unfused(
    mode: str = "dense", rows: int = 64, rank: int = 2, bias: bool = True, form: str = "canonical"
) -> Bound:
    p = Forward(rows=rows, n=64, k=64)
    given = p.arguments("numpy", mode, form, rank)
    if "b_tensor" in given:
        given["b_tensor"] = forms.weights(given["b_tensor"], given["b_major"])
    given["bias_tensor"] = np.ascontiguousarray(p.bias.T) if bias else None
    return bind(unfused.OPERATION, given, {"generate_c": True, "c_dtype": "float32"})


def bound_glu(mode: str = "dense", rows: int = 160, act_func: str = "swiglu", name: str = "bfloat16") -> Bound:
    given = Gated(name, rows=rows).arguments("numpy", mode)
    return bind(glu.OPERATION, given, {"generate_c": True, "act_func": act_func})


def bound_dglu(mode: str = "dense", rows: int = 160, rank: int = 2, act_func: str = "dswiglu") -> Bound:
    p = Gated(rows=rows, n=64)
    given = p.arguments("numpy", mode, rank)
    given |= {"c_tensor": p.rows_like(p.c, "numpy", rank), "beta_tensor": p.beta}
    keeps = act_func == "dgeglu"
    options = {"with_dprob": True, "generate_dbias": True, "act_func": act_func, "with_activation": keeps}
    return bind(dglu.OPERATION, given, options)


def bind(operation: Operation, given: dict[str, Any], options: dict[str, Any]) -> Bound:
    known = {key: given[key] for key in ("n", "b_dtype", "b_major", "sf_vec_size") if key in given}
    return operation.bind([given.get(name) for name in operation.contract.input_names], {**known, **options})


CALLS = {
    "unfused": (unfused, bound_unfused),
    "glu": (glu, bound_glu),
    "dglu": (dglu, bound_dglu),
}


def kernel_of(name: str, *arguments: Any, **options: Any) -> tuple[Bound, Kernel]:
    module, make = CALLS[name]
    bound = make(*arguments, **options)
    found = module.find_kernel(bound, HOPPER)
    assert isinstance(found, Kernel), found
    return bound, found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_what_the_runtime_passes(name: str, mode: str) -> None:
    bound, kernel = kernel_of(name, mode)
    plan = split_config(dict(kernel.spec.config))
    specs = [spec for spec in bound.outputs if spec is not None]
    held = sum(bool(spec.accumulate) for spec in specs)
    count = len(bound.arrays) + held + len(specs) + len(kernel.form.scratch) + len(kernel.form.scalars)
    assert len(plan.arguments) == count
    assert len(set(plan.arguments)) == count
    assert ("addresses" in plan.arguments) == (mode == "discrete")
    assert set(kernel.form.scalars) <= set(bound.options)
    assert len(kernel.form.inputs) == len(bound.arrays)
    assert len(kernel.form.outputs) == len(bound.outputs)


@pytest.mark.parametrize("name", ["unfused", "dglu"])
def test_kernels_see_both_forms_alike(name: str) -> None:
    two, three = (kernel_of(name, rank=rank)[1] for rank in (2, 3))
    assert two == three
    assert all(shape is None or len(shape) < 4 for shape in (*two.form.inputs, *two.form.outputs))


def test_forms_of_weights_differ_by_their_major_only() -> None:
    kernels = {form: kernel_of("unfused", form=form)[1] for form in ("canonical", "legacy", "by columns")}
    assert kernels["canonical"] == kernels["legacy"]
    configs = [dict(kernel.spec.config) for kernel in kernels.values()]
    assert {key for key in configs[0] if configs[0][key] != configs[2][key]} == {"b_major"}


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_rows_selects_no_kernel(name: str) -> None:
    assert kernel_of(name, rows=200)[1].spec == kernel_of(name, rows=4000)[1].spec


@pytest.mark.parametrize("act_func", ["swiglu", "geglu", "situglu"])
def test_factors_of_activations_are_scalars_of_a_call(act_func: str) -> None:
    bound, kernel = kernel_of("glu", act_func=act_func)
    other = replace(bound, options={**bound.options, "geglu_alpha": 3.0, "situ_beta2": 3.0})
    again = glu.find_kernel(other, HOPPER)
    assert isinstance(again, Kernel)
    assert again.spec == kernel.spec


def test_other_gpus_and_scales_have_no_kernel() -> None:
    bound = bound_glu()
    assert isinstance(glu.find_kernel(bound, replace(HOPPER, capability=(8, 0))), NoKernel)
    scaled = bound_glu(name="mxfp8_e4m3")
    found = glu.find_kernel(scaled, HOPPER)
    assert isinstance(found, (Kernel, NoKernel))


@pytest.mark.parametrize(("value", "count"), [("4", 128), ("", 132), ("0", 132)])
def test_multiprocessors_that_are_kept_free(value: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", value)
    assert dict(kernel_of("unfused")[1].spec.config)["multiprocessors"] == count


@pytest.mark.parametrize("value", ["132", "1000", "some"])
def test_multiprocessors_that_cannot_be_kept_free(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", value)
    with pytest.raises(ValueError, match="CUDNNFE_CLUSTER_OVERLAP_MARGIN must be a number below 132"):
        kernel_of("unfused")


def test_wgrad_has_a_kernel() -> None:
    a, b, off = np.zeros((64, 48), BF16), np.zeros((64, 32), BF16), np.array([10, 64], np.int32)
    bound = wgrad.OPERATION.bind((a.T, b, None, None, None, off, None, None, None), {})
    assert isinstance(wgrad.find_kernel(bound, HOPPER), Kernel)


@pytest.mark.compile
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_without_spills(name: str, mode: str, own_cache: None) -> None:
    for symbol, found in resource_usage(kernel_of(name, mode)[1].spec).items():
        assert found.frame_bytes == 0, symbol


@pytest.mark.compile
@pytest.mark.parametrize("act_func", ["dgeglu", "dsituglu"])
def test_gradients_of_other_activations_compile_without_spills(act_func: str, own_cache: None) -> None:
    for symbol, found in resource_usage(kernel_of("dglu", act_func=act_func)[1].spec).items():
        assert found.frame_bytes == 0, symbol


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["stacked", "addresses", "addresses in JAX", "scaled, added"])
def test_gradients_of_weights_compile_without_spills(kind: str, own_cache: None) -> None:
    a, b, off = np.zeros((256, 64), BF16), np.zeros((256, 32), BF16), np.array([128, 256], np.int32)
    arrays: list[Any] = [a.T, b, None, None, None, off, None, None, None]
    options: dict[str, Any] = {}
    if kind == "addresses":
        arrays[6] = np.ones(2, np.int64)
    if kind == "addresses in JAX":
        arrays = [None if x is None else to_framework(x, "jax") for x in (np.ascontiguousarray(a.T), *arrays[1:])]
        arrays[6] = to_framework(np.ones(16, np.uint8), "jax")
    if kind == "scaled, added":
        fp8 = [x.astype(STORED[E4M3]) for x in (a, b)]
        scales = [np.zeros(128 * 8, np.uint8)] * 2
        arrays = [fp8[0].T, fp8[1], None, *scales, off, None, None, None]
        options = {"sf_vec_size": 32, "accumulate_on_output": True}
    found = wgrad.find_kernel(wgrad.OPERATION.bind(arrays, options), HOPPER)
    assert isinstance(found, Kernel), found
    for symbol, usage in resource_usage(found.spec).items():
        assert usage.frame_bytes == 0, symbol


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("form", ["canonical", "legacy", "by columns", "legacy by columns"])
def test_torch_hands_over_views(form: str, rank: int) -> None:
    """What a kernel gets is the caller's memory, in one shape and with the strides of its major."""
    p = Forward(rows=64, n=64, k=72)
    given = p.arguments("torch", "dense", form, rank)
    weights = forms.weights(given["b_tensor"], given["b_major"])
    bias, n = p.bias_in("torch"), 64
    arrays = (given["a_tensor"], given["padded_offsets"], given["alpha_tensor"], weights, forms.by_expert(bias), None,
              given["prob_tensor"])  # fmt: skip
    bound = unfused.OPERATION.bind(arrays, {"generate_c": True, "b_major": given["b_major"]})
    places = [spec.place("torch") for spec in bound.outputs if spec is not None]
    outputs = [torch.empty_strided(shape, stride, dtype=torch.bfloat16) for shape, stride in places]
    kernel = unfused.find_kernel(bound, HOPPER)
    assert isinstance(kernel, Kernel)
    passed: list[Any] = []
    kernel_launch(unfused.OPERATION, bound, kernel, lambda *operands: passed.extend(operands))(arrays, outputs)
    names = split_config(dict(kernel.spec.config)).arguments
    found = dict(zip(names, passed, strict=True))
    for name, array in (("a", given["a_tensor"]), ("b", given["b_tensor"]), ("bias", bias), ("c", outputs[0]),
                        ("pre", outputs[1]), ("prob", given["prob_tensor"])):  # fmt: skip
        assert found[name].data_ptr() == array.data_ptr()
    by_columns = "columns" in form
    assert found["b"].shape == (4, n, 72)
    assert found["b"].stride() == ((72 * n, 1, n) if by_columns else (72 * n, 72, 1))
    assert (found["bias"].shape, found["bias"].stride()) == ((4, n), (n, 1))
    for name, width in (("a", 72), ("c", n), ("pre", n)):
        assert (found[name].shape, found[name].stride()) == ((64, width), (width, 1))
    assert found["maps"].dtype == torch.uint8


@pytest.mark.parametrize("rank", [2, 3])
def test_torch_hands_over_buffers_that_are_added_to_twice(rank: int) -> None:
    p = Gated(rows=160, n=64)
    given = p.arguments("torch", rank=rank)
    given |= {"c_tensor": p.rows_like(p.c, "torch", rank), "beta_tensor": torch.from_numpy(p.beta)}
    bound = bind(dglu.OPERATION, given, {"with_dprob": True, "generate_dbias": True})
    kernel = dglu.find_kernel(bound, HOPPER)
    assert isinstance(kernel, Kernel)
    specs = bound.outputs
    outputs = [None if x is None else torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for x in specs]
    passed: list[Any] = []
    launch = kernel_launch(dglu.OPERATION, bound, kernel, lambda *operands: passed.extend(operands))
    launch([given.get(name) for name in dglu.OPERATION.contract.input_names], outputs)
    found = dict(zip(split_config(dict(kernel.spec.config)).arguments, passed, strict=True))
    for name, at, shape in (("dprob", 2, (160,)), ("dbias", 3, (3, 128))):
        for role in (name, f"old_{name}"):
            assert found[role].data_ptr() == outputs[at].data_ptr()  # type: ignore[union-attr]
            assert found[role].shape == shape
    assert found["c"].shape == found["upstream"].shape == (160, 128)
