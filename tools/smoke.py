"""Use an installed library the way its first user does, and compare with a formula written here.

    python tools/smoke.py fe_norm numpy|torch|jax

Needs the library, numpy and (for the last two) the framework, nothing else; it imports nothing of the repository.
With ``numpy`` it also makes sure that the call has loaded no framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["OPERATIONS", "main"]

FRAMEWORKS = {"torch", "jax", "cutlass", "triton", "tvm_ffi", "cuda"}


def main(arguments: list[str] | None = None) -> int:
    """Import one library and call its operations on arrays of one framework; raise if anything is wrong."""
    library, framework = sys.argv[1:] if arguments is None else arguments
    module = importlib.import_module(library)
    installed = importlib.metadata.version(library.replace("_", "-"))
    if module.__version__ != installed:
        raise RuntimeError(f"{library}.__version__ is {module.__version__}; the installed version is {installed}")
    for operation in OPERATIONS.get(library, []):
        operation(module, _array_maker(framework))
    if framework == "numpy" and FRAMEWORKS & set(sys.modules):
        raise RuntimeError(f"{library} loaded {sorted(FRAMEWORKS & set(sys.modules))} for numpy arrays")
    print(f"{library} {installed} works with {framework}; operations tried: {len(OPERATIONS.get(library, []))}")
    return 0


def _normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _compare(name: str, result: Any, given: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Raise unless a result is an array of the framework and close; fp32 math rounds values below 100 a few times."""
    if type(result) is not type(given):
        raise TypeError(f"{name} returned {type(result)} for {type(given)}")
    values = np.asarray(result.astype(np.float32) if isinstance(result, np.ndarray) else _as_float32(result))
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def _as_float32(array: Any) -> Any:
    return array.float() if hasattr(array, "float") else array.astype("float32")


def _normalised(x: Any, w: Any) -> Any:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * w


def _rmsnorm_silu(fe_norm: Any, array: Callable[[Any], Any]) -> None:
    x, w = _normal(5, 96), _normal(96)
    z = _normalised(x, w)
    result = fe_norm.rmsnorm_silu_wrapper(array(x), array(w))["o_tensor"]
    _compare("rmsnorm_silu", result, array(x), z / (1 + np.exp(-z)))


def _rms_norm(fe_norm: Any, array: Callable[[Any], Any]) -> None:
    x, w = _normal(5, 96), _normal(96)
    _compare("rms_norm", fe_norm.rms_norm(array(x), array(w)), array(x), _normalised(x, w))


def _rmsnorm_rht_amax(fe_norm: Any, array: Callable[[Any], Any]) -> None:
    x, w = _normal(8, 64), _normal(64)
    order = np.arange(16)
    rotation = np.array([[(-1) ** bin(i & j).count("1") for j in order] for i in order]) / 4
    rotated = (_normalised(x, w).reshape(8, 4, 16) @ rotation).reshape(8, 64)
    result = fe_norm.rmsnorm_rht_amax_wrapper(array(x), array(w), rows_per_cta=2)
    _compare("rmsnorm_rht_amax", result["o_tensor"], array(x), rotated)
    _compare("rmsnorm_rht_amax", result["amax_tensor"], array(x), np.abs(rotated).reshape(4, -1).max(axis=1))


def _causal_conv1d(fe_conv: Any, array: Callable[[Any], Any]) -> None:
    x, weight = _normal(2, 6, 9), _normal(6, 4)
    history = np.concatenate([np.zeros((2, 6, 3)), x], axis=2)
    expected = sum(weight[:, j, None] * history[:, :, j : j + 9] for j in range(4))
    _compare("causal_conv1d", fe_conv.causal_conv1d(array(x), array(weight)), array(x), expected)


def _causal_conv1d_update(fe_conv: Any, array: Callable[[Any], Any]) -> None:
    x, state, weight = _normal(3, 6), _normal(3, 6, 4), _normal(6, 4)
    expected = (np.concatenate([state, x[:, :, None]], axis=2)[:, :, 1:] * weight).sum(axis=2)
    given = array(x)
    if type(given).__module__.startswith("jax"):
        result, _ = fe_conv.causal_conv1d_update_jax(given, array(state), array(weight))
    else:
        result = fe_conv.causal_conv1d_update(given, array(state), array(weight))
    _compare("causal_conv1d_update", result, given, expected)


def _tail_rope(fe_rope: Any, array: Callable[[Any], Any]) -> None:
    bfloat16 = _bfloat16()
    x, angle = _normal(3, 2, 128).astype(bfloat16), _normal(3, 32)
    wide, cosine, sine = x.astype(np.float64), np.cos(angle)[:, None], np.sin(angle)[:, None]
    expected = wide.copy()
    a, b = wide[..., 64::2], wide[..., 65::2]
    expected[..., 64::2], expected[..., 65::2] = a * cosine - b * sine, b * cosine + a * sine
    given = _in_bfloat16(array, x)
    result = fe_rope.tail_rope(given, array(np.cos(angle)), array(np.sin(angle)))["out"]
    _compare("tail_rope", result, given, expected, 2.0**-7)


def _vision_rope_backward(fe_rope: Any, array: Callable[[Any], Any]) -> None:
    bfloat16, tokens = _bfloat16(), 5
    angle = _normal(tokens, 1, 32)
    q, k, v = (_normal(16, tokens, 64 + n)[:, :, :64].astype(bfloat16) for n in range(3))
    cosine, sine = np.cos(angle), np.sin(angle)

    def rotated(gradient: Any) -> Any:
        wide = gradient.astype(np.float64).transpose(1, 0, 2)
        a, b = wide[..., :32], wide[..., 32:]
        return np.concatenate([a * cosine + b * sine, b * cosine - a * sine], axis=-1).reshape(tokens, 1024)

    expected = np.concatenate([rotated(q), rotated(k), v.astype(np.float64).transpose(1, 0, 2).reshape(tokens, -1)], 1)
    tables = array(cosine), array(sine)
    given = [_in_bfloat16(array, a) for a in (q, np.ascontiguousarray(k.transpose(0, 2, 1)), v)]
    if type(given[0]).__module__.startswith("jax"):
        result = fe_rope.vision_rope_backward_jax(*given, *tables)
    else:
        views = given[0].swapaxes(0, 1), given[1].swapaxes(1, 2).swapaxes(0, 1), given[2].swapaxes(0, 1)
        result = fe_rope.vision_rope_backward_wrapper(*views, *tables)["grad_qkv"]
    _compare("vision_rope_backward", result, given[0], expected, 2.0**-6)


def _rope_qdq(fe_rope: Any, array: Callable[[Any], Any]) -> None:
    bfloat16 = _bfloat16()
    x = np.full((2, 1, 128), 3.0).astype(bfloat16)  # with these angles every value is one that the format holds
    cache = np.concatenate([np.ones((4, 32)), np.zeros((4, 32))], axis=1).astype(np.float32)
    given, positions = _in_bfloat16(array, x), array(np.array([3, 1], np.int32))
    if type(given).__module__.startswith("jax"):
        result = fe_rope.rope_qdq_jax(given, array(cache), positions, quantization="fp4")
    else:
        result = fe_rope.rope_qdq_inplace(given, array(cache), positions, quantization="fp4")["out"]
    _compare("rope_qdq", result, given, x.astype(np.float32), 0.0)


def _bfloat16() -> Any:
    return importlib.import_module("ml_dtypes").bfloat16


def _in_bfloat16(array: Callable[[Any], Any], values: Any) -> Any:
    """Return a bfloat16 numpy array as an array of the framework; torch takes none from numpy."""
    torch = sys.modules.get("torch")
    if torch is not None and array is torch.from_numpy:
        return torch.from_numpy(values.astype(np.float32)).bfloat16()
    return array(values)


def _array_maker(framework: str) -> Callable[[Any], Any]:
    if framework == "torch":
        return importlib.import_module("torch").from_numpy  # type: ignore[no-any-return]
    if framework == "jax":
        return importlib.import_module("jax.numpy").asarray  # type: ignore[no-any-return]
    return np.asarray


def _gemm_swiglu(fe_gemm: Any, array: Callable[[Any], Any]) -> None:
    a, b = _normal(16, 64), _normal(128, 64)
    x = a.astype(np.float64) @ b.T / 8
    up, gate = x.reshape(16, 2, 2, 32).transpose(2, 0, 1, 3).reshape(2, 16, 64)
    result = fe_gemm.gemm_swiglu_wrapper(array(a[..., None]), array(b[..., None]), alpha=0.125)
    _compare("gemm_swiglu", result["ab12_tensor"], array(a), x[..., None], 2.0**-9)
    _compare("gemm_swiglu", result["c_tensor"], array(a), (up * gate / (1 + np.exp(-gate)))[..., None], 2.0**-8)


def _grouped_gemm(fe_gemm: Any, array: Callable[[Any], Any]) -> None:
    a, b, ends = _normal(5, 8), _normal(2, 8, 8), np.array([2, 5], np.int32)
    one, prob = np.ones(2, np.float32), np.ones(5, np.float32)
    bf16 = (a.view(np.uint32) >> 16 << 16).view(np.float32), (b.view(np.uint32) >> 16 << 16).view(np.float32)
    want = np.concatenate([bf16[0][:2] @ bf16[1][0].T, bf16[0][2:] @ bf16[1][1].T])
    given = [array(x) for x in (ends, one, prob)]
    operands = [_as_bfloat16(array(x)) for x in bf16]
    result = fe_gemm.grouped_gemm_wrapper(
        operands[0], given[0], given[1], operands[1], prob_tensor=given[2], d_dtype="float32"
    )["d_tensor"]
    _compare("grouped_gemm", result, given[1], want, 2.0**-18)


def _as_bfloat16(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16)
    return x.bfloat16() if hasattr(x, "bfloat16") else x.astype("bfloat16")


def _mhc_projection_backward(fe_gemm: Any, array: Callable[[Any], Any]) -> None:
    x, weight, grad = _normal(24, 64).astype(_bfloat16()), _normal(8, 64), _normal(24, 8)
    grad_r, r = _normal(24, 1), np.abs(_normal(24, 1)) + 1
    wide = x.astype(np.float64)
    given = _in_bfloat16(array, x)
    arrays = (given, array(weight), array(grad), array(grad_r), array(r))
    dx, dweight = fe_gemm.mhc_projection_backward(*arrays, allow_tf32=True)
    _compare("mhc_projection_backward", dx, given, grad_r / (r * 64) * wide + grad @ weight, 2.0**-6)
    _compare("mhc_projection_backward", dweight, array(weight), grad.T @ wide, 2.0**-7)


def _hstu_lmsd(fe_attention: Any, array: Callable[[Any], Any]) -> None:
    x, u = (_normal(12, width)[:, :64].astype(_bfloat16()) for width in (64, 65))
    one, zero = (np.full(64, value, _bfloat16()) for value in (1, 0))
    given = [_in_bfloat16(array, operand) for operand in (x, u, one, zero)]
    options = {"dropout_ratio": 0.0, "concat_u": False, "concat_x": False}
    wide, gate = x.astype(np.float64), u.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6) * gate / (1 + np.exp(-gate))
    _compare(
        "hstu_lmsd_forward", fe_attention.hstu_lmsd_forward(*given, **options)["y_tensor"], given[0], want, 2.0**-6
    )


OPERATIONS: dict[str, list[Callable[[Any, Callable[[Any], Any]], None]]] = {
    "fe_attention": [_hstu_lmsd],
    "fe_gemm": [_gemm_swiglu, _mhc_projection_backward, _grouped_gemm],
    "fe_norm": [_rmsnorm_silu, _rms_norm, _rmsnorm_rht_amax],
    "fe_conv": [_causal_conv1d, _causal_conv1d_update],
    "fe_rope": [_tail_rope, _rope_qdq, _vision_rope_backward],
}

if __name__ == "__main__":
    sys.exit(main())
