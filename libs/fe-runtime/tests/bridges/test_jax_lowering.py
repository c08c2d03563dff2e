"""What calls lower to on the CPU and for CUDA; lowering for CUDA compiles the kernel and needs no GPU."""

from __future__ import annotations

import re
import warnings

import fe_toy
import jax
import jax.numpy as jnp
import pytest

from fe_runtime import env
from fe_runtime.compile import cache_info
from fe_runtime.errors import FallbackWarning, NotCompiledError, NotSupportedError
from fe_runtime.plan import _warned

X = jax.ShapeDtypeStruct((2, 3, 8), jnp.bfloat16)
BIAS = jax.ShapeDtypeStruct((8,), jnp.bfloat16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory):
    env.configure(cache_dir=tmp_path_factory.getbasetemp() / "bridge-kernels")
    yield
    env.configure(cache_dir=None, strict=None, no_jit=None)


def lowered(function, *arrays, platforms=("cuda",)):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=platforms).as_text()


def custom_calls(text):
    return re.findall(r"custom_call @(fe_toy\.scale_clamp\.[0-9a-f]{16})\(", text)


def test_cuda_calls_the_kernel_in_its_own_form():
    text = lowered(lambda x, b: fe_toy.scale_clamp_jax(x, b, scale=2.0, out_dtype="float8_e4m3fn")[0], X, BIAS)
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    assert "(tensor<6x8xbf16>, tensor<8xbf16>) -> tensor<6x8xui8>" in line
    assert "limit = 1.000000e+00 : f32, scale = 2.000000e+00 : f32" in line
    assert "operand_layouts = [dense<[1, 0]>" in line
    assert re.search(r"bitcast_convert .*tensor<2x3x8xui8>.* -> tensor<2x3x8xf8E4M3FN>", text)


def test_cpu_has_no_custom_call():
    text = lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], X, platforms=("cpu",))
    assert not custom_calls(text)


def test_one_program_for_both_platforms():
    text = lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], X, platforms=("cpu", "cuda"))
    assert len(custom_calls(text)) == 1
    assert "stablehlo.case" in text


def test_wrappers_lower_alike():
    (direct,) = custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x, scale=2.0)[0], X))
    (wrapped,) = custom_calls(lowered(lambda x: fe_toy.scale_clamp(x, scale=3.0)["y"], X))
    assert direct == wrapped


def test_rows_and_scalars_compile_nothing_new():
    lowered(lambda x: fe_toy.scale_clamp_jax(x, scale=2.0)[0], X)
    before = cache_info()["fe_toy.scale_clamp"]
    for rows, scale in ((1, 2.0), (64, -3.5)):
        lowered(lambda x, s=scale: fe_toy.scale_clamp_jax(x, scale=s)[0], jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16))
    after = cache_info()["fe_toy.scale_clamp"]
    assert (after.compiles, after.hits) == (before.compiles, before.hits + 2)


def test_tracing_compiles_nothing():
    env.configure(no_jit=True)
    x = jax.ShapeDtypeStruct((2, 24), jnp.float16)
    jax.eval_shape(lambda x: fe_toy.scale_clamp_jax(x)[0], x)
    jax.make_jaxpr(lambda x: fe_toy.scale_clamp_jax(x)[0])(x)
    with pytest.raises(NotCompiledError):
        lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], x)


def test_gradients_lower():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the backward has no kernel
        text = lowered(jax.value_and_grad(lambda x: fe_toy.scale_clamp_jax(x)[0].astype(jnp.float32).sum()), X)
    assert len(custom_calls(text)) == 1


def test_a_missing_kernel_lowers_the_reference_and_warns_at_the_callers_line():
    _warned.discard(("scale_clamp", "the toy kernel writes no mask"))
    with pytest.warns(FallbackWarning, match="the toy kernel writes no mask") as caught:
        text = lowered(lambda x: fe_toy.scale_clamp_jax(x, mask=True), X)
    assert not custom_calls(text)
    assert caught[0].filename == __file__


def test_strict_mode_raises():
    env.configure(strict=True)
    with pytest.raises(NotSupportedError, match="the toy kernel writes no mask"):
        lowered(lambda x: fe_toy.scale_clamp_jax(x, mask=True), X)


def test_an_explicit_backend_is_honoured():
    assert not custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x, backend="reference")[0], X))
    assert custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x, backend="sm90")[0], X))
    with pytest.raises(NotSupportedError, match="the toy kernel writes no mask"):
        lowered(lambda x: fe_toy.scale_clamp_jax(x, mask=True, backend="sm90"), X)


def test_without_the_ffi_bridge_the_reference_is_lowered(monkeypatch):
    from fe_runtime.jax import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(FallbackWarning, match=r"jax-tvm-ffi.*is not installed"):
        assert not custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], X))
    with pytest.raises(NotSupportedError, match="pip install"):
        lowered(lambda x: fe_toy.scale_clamp_jax(x, backend="sm90")[0], X)


def test_empty_calls_launch_nothing():
    assert not custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], jax.ShapeDtypeStruct((0, 8), jnp.bfloat16)))


def test_export():
    check = jax.export.DisabledSafetyCheck.custom_call
    name = custom_calls(lowered(lambda x: fe_toy.scale_clamp_jax(x)[0], X))[0]
    exported = jax.export.export(
        jax.jit(lambda x: fe_toy.scale_clamp_jax(x)[0]), platforms=["cuda"], disabled_checks=[check(name)]
    )(X)
    assert exported.out_avals[0].shape == X.shape
