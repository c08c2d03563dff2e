"""The class form of ``gemm_swiglu`` on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dense_calls import pairs, scaled
from naive_gemm import E4M3, accumulation_error, product
from swiglu_calls import L, M, N, blocks, check, floats, run, to

from fe_gemm import GemmSwiglu
from fe_runtime import NotCompiledError, TensorDesc
from fe_runtime.testing import to_numpy


def outputs(
    m: int = M, ab12: Any = torch.float32, c: Any = torch.float16, major: str = "n", batch: int = L
) -> list[Any]:
    found = []
    for columns, dtype in ((N, ab12), (N // 2, c)):
        shape = (batch, m, columns) if major == "n" else (batch, columns, m)
        found.append(torch.full(shape, 77.0).to(dtype).permute((1, 2, 0) if major == "n" else (2, 1, 0)))
    return found


@pytest.mark.parametrize("major", ["n", "m"])
def test_class_without_scales(major: str) -> None:
    arrays, x, error = floats(m=48)
    given, results = to("torch", arrays), outputs(48, torch.bfloat16, torch.bfloat16, major)
    op = GemmSwiglu(*given, *results)
    assert op.check_support() is True
    op.compile()
    assert op.execute(*given, *results) is None
    check((*results, None, None), x, error)


def test_execute_uses_its_own_alpha() -> None:
    arrays, x, error = floats()
    given, results = to("torch", arrays), outputs()
    op = GemmSwiglu(*given, *results, alpha=100.0)
    op.compile()
    for alpha in (None, 2.0, 0.5, 2.0):
        op.execute(*given, *results, **({} if alpha is None else {"alpha": alpha}))
        check((*results, None, None), (alpha or 1.0) * x, (alpha or 1.0) * error)
    with pytest.raises(TypeError, match="alpha must be a Python float"):
        op.execute(*given, *results, alpha="2")  # type: ignore[arg-type]


def test_class_with_an_fp8_c() -> None:
    a, b = blocks()
    arrays = scaled(a, b, "torch")
    norm = torch.ones(1, 1)
    want = run(arrays, norm, c_dtype=E4M3, ab12_dtype="bfloat16", sf_vec_size=32)
    for form in (lambda s: s, lambda s: s.permute(5, 2, 4, 0, 1, 3), lambda s: s.view(torch.uint8)):
        ab12, c = outputs(ab12=torch.bfloat16, c=torch.float8_e4m3fn)
        sfc = form(torch.empty_strided(want[2].shape, want[2].stride(), dtype=want[2].dtype))
        keywords = {"sfa": arrays[2], "sfb": arrays[3], "sfc": sfc, "norm_const": norm}
        op = GemmSwiglu(*arrays[:2], ab12, c, sf_vec_size=32, **{f"sample_{n}": v for n, v in keywords.items()})
        op(*arrays[:2], ab12, c, **{f"{n}_tensor": v for n, v in keywords.items()})
        assert torch.equal(ab12, want[0])
        assert torch.equal(c.view(torch.uint8), want[1].view(torch.uint8))
        found, expected = to_numpy(sfc).view(np.uint8), to_numpy(want[2]).view(np.uint8)
        np.testing.assert_array_equal(found, expected.transpose(5, 2, 4, 0, 1, 3) if sfc.shape[0] == L else expected)


def test_class_with_an_fp8_c_needs_sfc() -> None:
    arrays, (ab12, c) = scaled(*blocks(), "torch"), outputs(c=torch.float8_e4m3fn)
    scales = {"sample_sfa": arrays[2], "sample_sfb": arrays[3], "sf_vec_size": 32}
    with pytest.raises(ValueError, match="sfc_tensor must be an array of shape"):
        GemmSwiglu(*arrays[:2], ab12, c, sample_norm_const=torch.ones(1), **scales).check_support()
    with pytest.raises(ValueError, match="norm_const_tensor must be given"):
        GemmSwiglu(*arrays[:2], ab12, c, **scales).check_support()


def test_class_of_fp4_and_bf16_needs_amax() -> None:
    a, b = blocks("nvfp4")
    arrays, (ab12, c) = pairs(scaled(a, b, "torch")), outputs(c=torch.bfloat16)
    scales = {"sample_sfa": arrays[2], "sample_sfb": arrays[3]}
    with pytest.raises(ValueError, match="amax_tensor must be given for FP4 operands with a bfloat16 C"):
        GemmSwiglu(*arrays[:2], ab12, c, **scales).check_support()
    amax = torch.full((1,), -torch.inf)
    op = GemmSwiglu(*arrays[:2], ab12, c, **scales, sample_amax=amax)
    op(*arrays[:2], ab12, c, arrays[2], arrays[3], amax)
    x, error = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    check((ab12, c, None, amax.reshape(1, 1, 1)), x, error)
    amax.fill_(1e9)
    op(*arrays[:2], ab12, c, arrays[2], arrays[3], amax)
    assert amax.item() == 1e9


def test_class_may_ask_for_amax_of_any_scaled_product() -> None:
    a, b = blocks()
    arrays, (ab12, c) = scaled(a, b, "torch"), outputs(c=torch.float32)
    amax = torch.zeros(1, 1)
    scales = {"sample_sfa": arrays[2], "sample_sfb": arrays[3], "sf_vec_size": 32}
    GemmSwiglu(*arrays[:2], ab12, c, **scales, sample_amax=amax)(*arrays[:2], ab12, c, arrays[2], arrays[3], amax)
    x, error = product(a.exact(), b.exact()), accumulation_error(a.exact(), b.exact())
    check((ab12, c, None, amax.reshape(1, 1, 1)), x, error)


def test_class_accepts_any_number_of_rows() -> None:
    given, results = to("torch", floats(m=48)[0]), outputs(48)
    op = GemmSwiglu(*given, *results)
    op.compile()
    for m in (16, 300, 1, 0):
        arrays, x, error = floats(m=m)
        results = outputs(m)
        op.execute(*to("torch", arrays), *results)
        check((*results, None, None), x, error)


def test_class_checks_the_live_operands() -> None:
    given, results = to("torch", floats(m=48)[0]), outputs(48)
    op = GemmSwiglu(*given, *results)
    with pytest.raises(NotCompiledError):
        op.execute(*given, *results)
    op.compile()
    scales = scaled(*blocks(m=48), "torch")
    for arrays, out, more, match in [
        (to("torch", floats(m=48, majors="mk")[0]), results, {}, "a_tensor must have its dimensions"),
        (to("torch", floats(m=48, n=192)[0]), results, {}, "b_tensor must have the compiled extent N"),
        (to("torch", floats("float16", m=48)[0]), results, {}, "a_tensor must have the compiled dtype bfloat16"),
        (given, outputs(32), {}, "ab12_tensor must have shape"),
        (given, outputs(48, c=torch.bfloat16), {}, "c_tensor must have dtype float16"),
        (given, outputs(48, major="m"), {}, "ab12_tensor must have its columns of stride 1"),
        (scales[:2], results, {"sfa_tensor": scales[2], "sfb_tensor": scales[3]}, "sf_vec_size must be 32"),
        (given, results, {"amax_tensor": torch.zeros(1)}, "amax_tensor must be None"),
    ]:
        with pytest.raises(ValueError, match=f"gemm_swiglu: {match}"):
            op.execute(*arrays, *out, **more)


def test_class_takes_descriptors() -> None:
    given, results = to("torch", floats()[0]), outputs()
    descs = [TensorDesc.of(x.dtype, x.shape, x.stride()) for x in (*given, *results)]
    GemmSwiglu(*descs)(*given, *results)
    check((*results, None, None), *floats()[1:])
