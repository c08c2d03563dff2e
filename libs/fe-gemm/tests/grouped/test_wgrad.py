"""The front door of ``grouped_gemm_wgrad`` on the CPU: outputs, contract, class, registered op, JAX entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from grouped_arguments import FRAMEWORKS, address, table
from naive_gemm import E2M1, E4M3, E5M2, FORMATS, STORED, cast, operand, value_of
from naive_grouped import BF16, ends, expert_scales, members, plain

import fe_gemm
from fe_gemm import (
    GroupedGemmWgrad,
    WGradInputOrder,
    compat,
    get_grouped_gemm_wgrad_workspace_size,
    grouped_gemm_wgrad_jax,
    grouped_gemm_wgrad_wrapper,
)
from fe_gemm.grouped.wgrad import OPERATION
from fe_gemm.grouped.wgrad_contract import CONTRACT, check_values
from fe_runtime import InvalidArgumentError, NotCompiledError, NotSupportedError, TensorDesc
from fe_runtime.plan import HOPPER
from fe_runtime.testing import Call, assert_rejected, invalid_calls, to_framework, to_numpy

STRIDED = ("numpy", "torch")
M, N, T = 24, 40, 64
SIZES = [5, 0, 33, 2, 0]


def expected(a: Any, b: Any, off: Any) -> Any:
    found = np.zeros((len(off), a.shape[0], b.shape[1]))
    for e in range(len(off)):
        for t in members(off, e):
            found[e] += a[:, t, None] * b[None, t]
    return found


class Plain:
    """A bf16 problem of whole numbers; the tail is NaN."""

    def __init__(self, sizes: Any = SIZES, tokens: int = T, m: int = M, n: int = N) -> None:
        rng, self.off = np.random.default_rng(0), ends(list(sizes))
        self.a, self.b = plain(rng, (m, tokens), True), plain(rng, (tokens, n), True)
        last = self.off[-1] if len(self.off) else 0
        self.a[:, last:], self.b[last:] = np.nan, np.nan
        self.want = expected(value_of(self.a), value_of(self.b), self.off)

    def arguments(self, framework: str = "numpy", a_major: str = "k", b_major: str = "n") -> dict[str, Any]:
        def stored(x: Any, turn: bool) -> Any:
            made = to_framework(np.ascontiguousarray(x.T) if turn else x, framework)
            return made.T if turn else made

        return {
            "a_tensor": stored(self.a, a_major == "m"),
            "b_tensor": stored(self.b, b_major == "k"),
            "sfa_tensor": None,
            "sfb_tensor": None,
            "offsets_tensor": to_framework(self.off, framework),
        }


class Scaled:
    """A block-scaled problem of whole numbers; scales of the tail are NaN."""

    def __init__(self, name: str, sizes: Any = (0, 128, 0, 256, 128, 0), tokens: int = 640, n: int = 144) -> None:
        self.name, self.off, self.tokens = name, ends(list(sizes)), tokens
        self.element, self.scale, self.vec = FORMATS[name]
        rng = np.random.default_rng(2)
        self.sides = [operand(rng, rows, tokens, 1, name, whole=True) for rows in (M, n)]
        for side in self.sides:
            side.scales[:, -(-self.off[-1] // self.vec) :] = 0x7F if self.scale == E4M3 else 0xFF
        exact = [np.nan_to_num(side.exact()[..., 0]) for side in self.sides]
        self.want = expected(exact[0], exact[1].T, self.off)
        count = len(self.off)
        self.globals = np.resize(np.array([0.5, 2, -1], np.float32), count), np.resize(np.float32([2, 4]), count)

    def arguments(self, framework: str = "numpy", shape: Any = (-1,)) -> dict[str, Any]:
        a, b = (to_framework(np.ascontiguousarray(side.elements()[..., 0]), framework) for side in self.sides)
        scales = [
            expert_scales(side.scales[..., 0], self.off, self.tokens, self.vec, np.random.default_rng(3))
            for side in self.sides
        ]
        sfa, sfb = (to_framework(x.view(STORED[self.scale]).reshape(shape), framework) for x in scales)
        given = {
            "a_tensor": a,
            "b_tensor": b if self.element == E2M1 and framework == "jax" else b.T,
            "sfa_tensor": sfa,
            "sfb_tensor": sfb,
            "offsets_tensor": to_framework(self.off, framework),
            "sf_vec_size": self.vec,
        }
        if self.name == "nvfp4":
            for key, x in zip(("global_scale_a", "global_scale_b"), self.globals, strict=True):
                given[key] = to_framework(x, framework)
        return given

    @property
    def result(self) -> Any:
        if self.name != "nvfp4":
            return self.want
        return self.want * (self.globals[0] * self.globals[1])[:, None, None]


def call(framework: str = "numpy", **changed: Any) -> Any:
    return grouped_gemm_wgrad_wrapper(**{**Plain().arguments(framework), **changed})


def refused(match: str, error: type[Exception] = ValueError, framework: str = "numpy", **changed: Any) -> None:
    with pytest.raises(error, match=f"grouped_gemm_wgrad: {match}"):
        call(framework, **changed)


def refused_scaled(match: str, name: str = "mxfp8_e4m3", **changed: Any) -> None:
    with pytest.raises(ValueError, match=f"grouped_gemm_wgrad: {match}"):
        grouped_gemm_wgrad_wrapper(**{**Scaled(name).arguments(), **changed})


def assert_is(got: Any, want: Any) -> None:
    values = to_numpy(got)
    np.testing.assert_array_equal(value_of(values), cast(want, str(values.dtype)))


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_framework(dtype: str, framework: str) -> None:
    p = Plain()
    result = grouped_gemm_wgrad_wrapper(**p.arguments(framework), wgrad_dtype=dtype)
    assert list(result.keys()) == ["wgrad_tensor"]
    (w,) = result
    assert tuple(w.shape) == (5, M, N)
    assert_is(w, p.want)
    for e, size in enumerate(SIZES):
        assert size or to_numpy(w[e]).tobytes() == bytes(to_numpy(w[e]).nbytes)  # exactly +0


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["n", "k"])
def test_majors(b_major: str, a_major: str, framework: str) -> None:
    p = Plain()
    assert_is(grouped_gemm_wgrad_wrapper(**p.arguments(framework, a_major, b_major))[0], p.want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", FORMATS)
def test_block_scaled_formats(name: str, framework: str) -> None:
    p = Scaled(name)
    assert_is(grouped_gemm_wgrad_wrapper(**p.arguments(framework), wgrad_dtype="float32")[0], p.result)


@pytest.mark.parametrize("framework", STRIDED)
def test_containers_of_scales(framework: str) -> None:
    p = Scaled("mxfp8_e4m3")
    for sfa_shape, sfb_shape in [((128, 20), (256, 20)), ((1, 1, 5, 32, 4, 4), (1, 2, 5, 32, 4, 4))]:
        given = p.arguments(framework)
        for key, shape in (("sfa_tensor", sfa_shape), ("sfb_tensor", sfb_shape)):
            given[key] = given[key].reshape(shape)
        assert_is(grouped_gemm_wgrad_wrapper(**given, wgrad_dtype="float32")[0], p.want)
    order = (3, 4, 1, 5, 2, 0)
    views = {k: given[k].permute(order) if framework == "torch" else given[k].transpose(order)
             for k in ("sfa_tensor", "sfb_tensor")}  # fmt: skip
    assert_is(grouped_gemm_wgrad_wrapper(**{**given, **views}, wgrad_dtype="float32")[0], p.want)
    for dtype in (np.uint8, np.int8):
        given = p.arguments(framework)
        for key in ("sfa_tensor", "sfb_tensor"):
            given[key] = to_framework(to_numpy(given[key]).view(dtype), framework)
        assert_is(grouped_gemm_wgrad_wrapper(**given, wgrad_dtype="float32")[0], p.want)


def test_fp4_in_torchs_own_dtype() -> None:
    p = Scaled("mxfp4")
    given = p.arguments("torch")
    given["a_tensor"] = given["a_tensor"].view(torch.float4_e2m1fn_x2)
    given["b_tensor"] = given["b_tensor"].T.view(torch.float4_e2m1fn_x2).T
    assert_is(grouped_gemm_wgrad_wrapper(**given, wgrad_dtype="float32")[0], p.want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("sizes", [[0, 0], [T, 0], [0, T], [1, T - 2]], ids=str)
def test_groups_of_any_size(sizes: Any, framework: str) -> None:
    p = Plain(sizes)
    assert_is(grouped_gemm_wgrad_wrapper(**p.arguments(framework))[0], p.want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_tokens(framework: str) -> None:
    (w,) = grouped_gemm_wgrad_wrapper(**Plain([0, 0], tokens=0).arguments(framework))
    assert tuple(w.shape) == (2, M, N)
    assert not value_of(to_numpy(w)).any()


@pytest.mark.parametrize("framework", STRIDED)
def test_last_group_of_scaled_operands_may_have_any_size(framework: str) -> None:
    p = Scaled("mxfp8_e4m3", (128, 0, 96), tokens=256)
    assert_is(grouped_gemm_wgrad_wrapper(**p.arguments(framework), wgrad_dtype="float32")[0], p.want)


def ragged(x: Any, off: Any) -> Any:
    parts = np.split(x, off, axis=1)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in parts]).reshape(x.shape)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("order", [WGradInputOrder.TensorRagged, "tensor_ragged"])
def test_ragged_order(order: Any, framework: str) -> None:
    p = Plain()
    given = p.arguments(framework)
    given["a_tensor"] = to_framework(ragged(p.a, p.off), framework)
    if framework != "jax":
        given["b_tensor"] = to_framework(ragged(np.ascontiguousarray(p.b.T), p.off), framework).T
    assert_is(grouped_gemm_wgrad_wrapper(**given, input_order=order)[0], p.want)


# --- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", ["dense", "discrete"])
def test_stacked_tensor_of_the_caller(mode: str, framework: str) -> None:
    p = Plain()
    w = to_framework(np.full((5, M, N), 3, np.float32), framework)
    result = grouped_gemm_wgrad_wrapper(**p.arguments(framework), output_mode=mode, wgrad_tensor=w)
    assert result["wgrad_tensor"] is w
    assert_is(w, p.want)


@pytest.mark.parametrize("framework", STRIDED)
def test_accumulation(framework: str) -> None:
    p = Plain()
    old = np.random.default_rng(1).standard_normal((5, M, N)).astype(BF16)
    old[1, 0, 0] = -0.0
    w = to_framework(old, framework)
    grouped_gemm_wgrad_wrapper(**p.arguments(framework), wgrad_tensor=w, accumulate_on_output=True)
    want = cast(np.float32(value_of(old)) + np.float32(cast(p.want, "bfloat16")), "bfloat16")
    for e, size in enumerate(SIZES):
        if size:
            np.testing.assert_array_equal(value_of(to_numpy(w[e])), want[e])
        else:
            assert to_numpy(w[e]).tobytes() == old[e].tobytes()
    fresh = grouped_gemm_wgrad_wrapper(**p.arguments(framework), accumulate_on_output=True)[0]
    assert_is(fresh, p.want)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("accumulates", [False, True])
def test_results_through_addresses(accumulates: bool, framework: str) -> None:
    p = Plain()
    memory = [to_framework(np.full((M, N), 2, np.float32), framework) for _ in SIZES]
    result = grouped_gemm_wgrad_wrapper(
        **p.arguments(framework), output_mode="discrete", wgrad_ptrs=table(memory, framework),
        wgrad_dtype="float32", accumulate_on_output=accumulates,
    )  # fmt: skip
    assert dict(result) == {"wgrad_tensor": None}
    for e, got in enumerate(memory):
        assert_is(got, p.want[e] + 2 * accumulates)


def test_jax_writes_through_no_address_on_the_cpu() -> None:
    p = Plain()
    memory = [to_framework(np.zeros((M, N), np.float32), "jax") for _ in SIZES]
    given = {"output_mode": "discrete", "wgrad_ptrs": table(memory, "jax"), "wgrad_dtype": "float32"}
    with pytest.raises(NotImplementedError, match="addresses"):
        grouped_gemm_wgrad_wrapper(**p.arguments("jax"), **given)
    token = jax.eval_shape(
        lambda a, b, off, at: grouped_gemm_wgrad_jax(a, b, off, at, "float32"),
        *(p.arguments("jax")[key] for key in ("a_tensor", "b_tensor", "offsets_tensor")), given["wgrad_ptrs"],
    )  # fmt: skip
    assert token.shape == (M, N)


# --- what is refused ------------------------------------------------------------------------------------------------


def example(name: str) -> Call:
    given = Plain().arguments() if name == "plain" else Scaled(name).arguments()
    if name == "plain":
        return Call(tuple(given.get(key) for key in CONTRACT.input_names), {"wgrad_dtype": "float32"})
    packed = name in ("mxfp4", "nvfp4")
    given["bt_tensor"] = np.ascontiguousarray(given["b_tensor"].T) if packed else None
    arrays = tuple(None if packed and key == "b_tensor" else given.get(key) for key in CONTRACT.input_names)
    return Call(arrays, {"sf_vec_size": given["sf_vec_size"]})


def _is_told_by_another_rule(name: str, bad: Any) -> bool:
    """Dtypes of operands decide what their scales are, and of FP4 how many tokens there are."""
    of_operands = bad.argument in ("a_tensor", "b_tensor", "bt_tensor")
    return of_operands and (
        "float8" in bad.id or (name == "nvfp4" and bad.id.startswith("a_tensor-") and "extent" not in bad.id)
    )


@pytest.mark.parametrize(
    "bad",
    [
        bad
        for name in ("plain", "mxfp8_e4m3", "nvfp4")
        for bad in invalid_calls(CONTRACT, example(name))
        if not _is_told_by_another_rule(name, bad)
    ],
    ids=lambda bad: bad.id,
)
def test_invalid_call_is_rejected(bad: Any) -> None:
    assert_rejected(lambda arrays, options: OPERATION(arrays, options), "grouped_gemm_wgrad", bad)


@pytest.mark.parametrize("name", ["sfa_tensor", "sfb_tensor", "global_scale_a", "global_scale_b"])
def test_bfloat16_operands_have_no_scales(name: str) -> None:
    array = np.ones(5, np.float32) if "global" in name else np.zeros(128 * 4, np.uint8)
    refused(f"{name} must be left out for bfloat16", **{name: array})


def test_bfloat16_operands_have_no_scale_controls() -> None:
    refused("sf_vec_size must be left at 16", sf_vec_size=32)
    refused("sf_fp8_dtype_override must be None", sf_fp8_dtype_override="e5m3")
    workspace = np.zeros(4096, np.uint8)
    refused("descriptor_workspace must be None for bfloat16", descriptor_workspace=workspace)


def test_scaled_operands_need_both_scales() -> None:
    for name in ("sfa_tensor", "sfb_tensor"):
        refused_scaled(f"{name} must be given for fp8", **{name: None})


def test_nvfp4_needs_both_global_scales() -> None:
    refused_scaled("global_scale_a must be given for NVFP4", "nvfp4", global_scale_a=None, global_scale_b=None)
    refused_scaled("global_scale_a must be given together", "nvfp4", global_scale_b=None)
    refused_scaled("global_scale_a must be given together", global_scale_a=np.ones(6, np.float32))
    p = Scaled("mxfp8_e4m3")
    scales = {f"global_scale_{side}": np.full(6, 2, np.float32) for side in "ab"}
    assert_is(grouped_gemm_wgrad_wrapper(**p.arguments(), **scales, wgrad_dtype="float32")[0], 4 * p.want)


def test_formats() -> None:
    e4m3 = Scaled("nvfp4").arguments()["sfa_tensor"].dtype
    given = Scaled("mxfp8_e4m3").arguments()
    scales = {key: given[key].view(np.uint8).view(e4m3) for key in ("sfa_tensor", "sfb_tensor")}
    refused_scaled("sfa_tensor must hold e8m0 scales for fp8", **scales)
    refused_scaled("sfb_tensor must have the dtype of sfa_tensor", sfa_tensor=scales["sfa_tensor"])
    refused_scaled("sf_vec_size must be", sf_vec_size=64)


def test_dtypes_of_operands_agree() -> None:
    refused_scaled("b_tensor must have the dtype of a_tensor", b_tensor=Scaled("mxfp8_e5m2").arguments()["b_tensor"])
    refused_scaled("b_tensor must have", b_tensor=Scaled("mxfp4").arguments()["b_tensor"])
    refused("b_tensor must have the dtype of a_tensor", b_tensor=np.zeros((T, N), STORED[E5M2]))
    refused("a_tensor must have dtype", a_tensor=np.zeros((M, T), np.float32))


def test_fp4_lies_along_the_tokens() -> None:
    given = Scaled("mxfp4").arguments()
    refused_scaled("a_tensor must have", "mxfp4", a_tensor=np.asfortranarray(given["a_tensor"]))
    refused_scaled("bt_tensor must have|packed FP4|grouped", "mxfp4", b_tensor=np.ascontiguousarray(given["b_tensor"]))


def test_scales_have_the_right_number_of_bytes() -> None:
    given = Scaled("mxfp8_e4m3").arguments()
    refused_scaled(r"sfa_tensor must have shape \(SA,\)", sfa_tensor=given["sfa_tensor"][:-16])
    refused_scaled(r"sfb_tensor must have shape \(SB,\)", sfb_tensor=given["sfa_tensor"])


def test_missing_tensors() -> None:
    refused("b_tensor must be given", b_tensor=None)
    for name in ("a_tensor", "offsets_tensor"):
        refused(f"{name} must be an array", **{name: None})


def test_output_modes() -> None:
    ptrs, w = np.ones(5, np.int64), np.zeros((5, M, N), np.float32)
    refused('output_mode must be "dense" or "discrete"', output_mode="sparse")
    refused('wgrad_ptrs must be None for output_mode="dense"', wgrad_ptrs=ptrs)
    refused("wgrad_tensor must be None with wgrad_ptrs", output_mode="discrete", wgrad_ptrs=ptrs, wgrad_tensor=w)
    refused("wgrad_ptrs must have shape", output_mode="discrete", wgrad_ptrs=ptrs[:4])
    refused("wgrad_ptrs must hold addresses that are not null", output_mode="discrete", wgrad_ptrs=0 * ptrs)


def test_stacked_tensors_must_be_as_the_result() -> None:
    refused("wgrad_tensor must have shape", wgrad_tensor=np.zeros((4, M, N), np.float32))
    refused("wgrad_tensor must be contiguous", wgrad_tensor=np.zeros((5, N, M), np.float32).transpose(0, 2, 1))
    refused("wgrad_tensor must have dtype", wgrad_tensor=np.zeros((5, M, N), np.float32), wgrad_dtype="float16")
    refused("wgrad_dtype must be", wgrad_tensor=np.zeros((5, M, N), np.float64))
    refused("wgrad_tensor must be None for JAX", framework="jax", wgrad_tensor=jax.numpy.zeros((5, M, N)))


def test_strides() -> None:
    refused("a_tensor must be contiguous along T or along M", a_tensor=np.zeros((M, 2 * T), BF16)[:, :T])
    refused("b_tensor must be contiguous along N or along T", b_tensor=np.zeros((T, 2 * N), BF16)[:, :N])


def test_extents() -> None:
    for changed in ({"m": 0}, {"n": 0}):
        with pytest.raises(ValueError, match=r"grouped_gemm_wgrad: [ab]_tensor must"):
            grouped_gemm_wgrad_wrapper(**Plain(**changed).arguments())
    refused("b_tensor must have shape", b_tensor=np.zeros((T + 8, N), BF16))
    with pytest.raises(ValueError, match=r"a_tensor must have a contiguous extent .*multiple of 16 bytes"):
        grouped_gemm_wgrad_wrapper(**Plain(tokens=60).arguments())
    with pytest.raises(ValueError, match=r"b_tensor must have a contiguous extent .*multiple of 16 bytes"):
        grouped_gemm_wgrad_wrapper(**Plain(n=36).arguments())
    with pytest.raises(ValueError, match="b_tensor must have N > 0 with results' rows"):
        grouped_gemm_wgrad_wrapper(**Plain(n=36).arguments(b_major="k"))
    assert grouped_gemm_wgrad_wrapper(**Plain(n=36).arguments(b_major="k"), wgrad_dtype="float32") is not None
    for count in (0, 1025):
        refused("offsets_tensor must have from 1 to 1024", offsets_tensor=np.zeros(count, np.int32))


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int32", "nonsense"])
def test_dtypes_of_results(dtype: str) -> None:
    refused("wgrad_dtype must be", wgrad_dtype=dtype)
    refused("acc_dtype must be", acc_dtype="float16")


@pytest.mark.parametrize(("hint", "value", "error"), [
    ("mma_tiler_mn", (64, 128), ValueError), ("mma_tiler_mn", (128, 96), ValueError),
    ("cluster_shape_mn", (3, 1), ValueError), ("cluster_shape_mn", (4, 8), ValueError),
    ("cluster_shape_mn", (1, 1), ValueError), ("mma_tiler_mn", None, TypeError),
])  # fmt: skip
def test_hints_are_checked(hint: str, value: Any, error: type[Exception]) -> None:
    refused(f"{hint} must", error=error, **{hint: value})


def test_hints_of_scaled_operands() -> None:
    refused_scaled("mma_tiler_mn must have 128 or 256 rows and 128 or 256 columns", mma_tiler_mn=(128, 64))
    assert call(mma_tiler_mn=(128, 64), cluster_shape_mn=(8, 2)) is not None


def test_input_orders() -> None:
    refused("input_order must be", input_order="ragged")
    assert WGradInputOrder("tensor_ragged") is WGradInputOrder.TensorRagged


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_malformed_offsets_are_named(framework: str) -> None:
    for off, text in [([5, 4, 40, 48, 48], "never decrease"), ([5, 6, 7, 8, T + 1], "end within the 64 tokens")]:
        offsets = to_framework(np.array(off, np.int32), framework)
        refused(f"offsets_tensor must .*{text}", framework=framework, offsets_tensor=offsets)


def test_groups_of_scaled_operands_are_whole_tiles() -> None:
    off = np.array([0, 96, 128, 384, 512, 512], np.int32)
    refused_scaled("offsets_tensor must be multiples of 128.*96 at entry 1", offsets_tensor=off)


def test_what_jax_has_no_place_for() -> None:
    refused("current_stream must be None", framework="jax", current_stream=0)
    given = Plain().arguments("jax")
    arrays = [given[key] for key in ("a_tensor", "b_tensor", "offsets_tensor")]
    with pytest.raises(ValueError, match="accumulate_on_output must be False without wgrad_ptrs"):
        grouped_gemm_wgrad_jax(*arrays, accumulate_on_output=True)
    workspace = jax.numpy.zeros(4096, "uint8")
    with pytest.raises(ValueError, match="descriptor_workspace must be None"):
        grouped_gemm_wgrad_wrapper(**Scaled("mxfp8_e4m3").arguments("jax"), descriptor_workspace=workspace)


# --- workspace ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "mode", "size"), [
    (1, "dense", 512), (8, "dense", 4096), (1, "discrete", 640), (1024, "discrete", 655360),
])  # fmt: skip
def test_size_of_the_workspace(experts: int, mode: str, size: int) -> None:
    for order in (WGradInputOrder.Tensor2D, "tensor_ragged"):
        assert get_grouped_gemm_wgrad_workspace_size(experts, output_mode=mode, input_order=order) == size


def test_sizes_of_nonsense() -> None:
    for arguments in ({"num_experts": 0}, {"output_mode": "x"}, {"input_order": "x"}):
        with pytest.raises(ValueError, match="get_grouped_gemm_wgrad_workspace_size: "):
            get_grouped_gemm_wgrad_workspace_size(**{"num_experts": 1, **arguments})
    for experts in (1.5, True):
        with pytest.raises(TypeError):
            get_grouped_gemm_wgrad_workspace_size(experts)  # type: ignore[arg-type]


def test_a_workspace_is_checked_and_has_no_effect() -> None:
    p = Scaled("mxfp8_e4m3")
    given = p.arguments("torch")
    size = get_grouped_gemm_wgrad_workspace_size(6)
    workspace = torch.zeros(size, dtype=torch.uint8)
    result = grouped_gemm_wgrad_wrapper(**given, wgrad_dtype="float32", descriptor_workspace=workspace)[0]
    assert_is(result, p.want)
    for wrong in (workspace[1:], workspace.to(torch.int8), workspace.view(8, -1), torch.zeros(2 * size)[::2], [1]):
        with pytest.raises(ValueError, match="grouped_gemm_wgrad: descriptor_workspace must be a contiguous uint8"):
            grouped_gemm_wgrad_wrapper(**given, descriptor_workspace=wrong)


# --- the class ------------------------------------------------------------------------------------------------------


KEYS = ("a_tensor", "b_tensor", "sfa_tensor", "sfb_tensor", "offsets_tensor")


def an_object(given: dict[str, Any], **results: Any) -> Any:
    scales = {f"sample_{key}": given[key] for key in ("global_scale_a", "global_scale_b") if key in given}
    return GroupedGemmWgrad(
        *(given[key] for key in KEYS), sf_vec_size=given.get("sf_vec_size", 16), **scales, **results
    )


def execute(op: Any, given: dict[str, Any], **results: Any) -> None:
    scales = {key: given[key] for key in ("global_scale_a", "global_scale_b") if key in given}
    op.execute(*(given[key] for key in KEYS), **scales, **results)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("name", ["plain", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_class_writes_what_the_wrapper_returns(accumulates: bool, name: str, framework: str) -> None:
    p = Plain() if name == "plain" else Scaled(name)
    want = p.want if isinstance(p, Plain) else p.result
    given = p.arguments(framework)
    w = to_framework(np.full(want.shape, 2, np.float32), framework)
    op = an_object(given, sample_wgrad=w, accumulate_on_output=accumulates)
    with pytest.raises(NotCompiledError):
        execute(op, given, wgrad_tensor=w)
    assert op.check_support() is True
    op.compile()
    execute(op, given, wgrad_tensor=w)
    assert_is(w, want + 2 * accumulates)


@pytest.mark.parametrize("framework", STRIDED)
def test_class_writes_through_addresses(framework: str) -> None:
    p = Plain()
    given = p.arguments(framework)
    op = an_object(given, num_experts=5, wgrad_shape=(M, N), wgrad_dtype="float32")
    op.compile()
    memory = [to_framework(np.zeros((M, N), np.float32), framework) for _ in SIZES]
    execute(op, given, wgrad_ptrs=table(memory, framework))
    for e, got in enumerate(memory):
        assert_is(got, p.want[e])
    stacked = to_framework(np.zeros((5, M, N), np.float32), framework)
    execute(op, given, wgrad_tensor=stacked)
    assert_is(stacked, p.want)
    assert address(stacked)
    with pytest.raises(ValueError, match="wgrad_tensor must be contiguous"):
        execute(op, given, wgrad_tensor=stacked[:4])


def test_tokens_are_dynamic_and_majors_are_not() -> None:
    p = Plain()
    w = np.zeros((5, M, N), np.float32)
    op = an_object(p.arguments(), sample_wgrad=w)
    op.compile()
    for tokens in (48, 400, 0):
        other = Plain([5, 0, 33, 2, 0] if tokens else [0] * 5, tokens)
        execute(op, other.arguments(), wgrad_tensor=w)
        assert_is(w, other.want)
    for majors in (("m", "n"), ("k", "k")):
        with pytest.raises(ValueError, match="compiled order"):
            execute(op, p.arguments("numpy", *majors), wgrad_tensor=w)
    with pytest.raises(ValueError, match="compiled extent"):
        execute(op, Plain(n=48).arguments(), wgrad_tensor=w)


def test_class_needs_one_description_of_the_results() -> None:
    given, w = Plain().arguments(), np.zeros((5, M, N), np.float32)
    for results, name in [
        ({}, "sample_wgrad"),
        ({"sample_wgrad": w, "num_experts": 5, "wgrad_shape": (M, N), "wgrad_dtype": "float32"}, "sample_wgrad"),
        ({"num_experts": 5, "wgrad_shape": (M, N)}, "wgrad_dtype"),
        ({"num_experts": 5, "wgrad_shape": (N, M), "wgrad_dtype": "float32"}, "wgrad_shape"),
        ({"num_experts": 4, "wgrad_shape": (M, N), "wgrad_dtype": "float32"}, "wgrad_ptrs"),
    ]:
        with pytest.raises(ValueError, match=f"grouped_gemm_wgrad: {name} must"):
            an_object(given, **results).check_support()
    op = an_object(given, num_experts=5, wgrad_shape=(M, N), wgrad_dtype="float32", sample_wgrad_expert=w[0])
    assert op.check_support()
    with pytest.raises(ValueError, match="sample_wgrad_expert must"):
        an_object(
            given, num_experts=5, wgrad_shape=(M, N), wgrad_dtype="float32", sample_wgrad_expert=w
        ).check_support()


def test_class_takes_descriptors() -> None:
    a, b = (TensorDesc.of("bfloat16", shape, stride, "cuda:0") for shape, stride in (((M, T), (1, M)), ((T, N), None)))
    off, w = TensorDesc.of("int32", (5,), device="cuda:0"), TensorDesc.of("float32", (5, M, N), device="cuda:0")
    assert GroupedGemmWgrad(a, b, None, None, off, w, backend="reference").check_support()


# --- torch, JAX and names -------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    p = Plain([5, 0, 33, 26])
    arrays = tuple(p.arguments("torch").get(key) for key in CONTRACT.input_names)
    torch.library.opcheck(torch.ops.fe_gemm.grouped_gemm_wgrad.default, arrays, {"wgrad_dtype": "float32"})


@pytest.mark.parametrize("name", ["plain", "mxfp8_e4m3", "mxfp4"])
def test_compiles_as_one_graph(name: str) -> None:
    p = Plain() if name == "plain" else Scaled(name)
    given = p.arguments("torch")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(a: Any, b: Any, sfa: Any, sfb: Any, off: Any) -> Any:
        vec = given.get("sf_vec_size", 16)
        return grouped_gemm_wgrad_wrapper(a, b, sfa, sfb, off, wgrad_dtype="float32", sf_vec_size=vec)[0]

    assert_is(model(*(given[key] for key in KEYS)), p.want)


def test_compiled_programs_write_through_no_address() -> None:
    given = Plain().arguments("torch")
    memory = [torch.zeros(M, N) for _ in SIZES]
    options = {"output_mode": "discrete", "wgrad_ptrs": table(memory, "torch"), "wgrad_dtype": "float32"}
    with pytest.raises(Exception, match=r"wgrad_ptrs must be None under torch\.compile"):
        torch.compile(lambda: grouped_gemm_wgrad_wrapper(**given, **options), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("name", ["plain", "mxfp8_e4m3", "nvfp4", "mxfp4"])
def test_jax_entry_eager_and_jit(name: str) -> None:
    p = Plain() if name == "plain" else Scaled(name)
    want = p.want if isinstance(p, Plain) else p.result
    given = p.arguments("jax")
    static = {"sf_vec_size": given.pop("sf_vec_size", 32), "wgrad_dtype": "float32"}
    arrays = {key: x for key, x in given.items() if x is not None}
    run = lambda arrays: grouped_gemm_wgrad_jax(**arrays, **static)  # noqa: E731
    for function in (run, jax.jit(run)):
        result = function(arrays)
        assert list(result.keys()) == ["wgrad_tensor"]
        assert_is(result["wgrad_tensor"], want)


def test_bytes_of_scales_in_jax() -> None:
    p = Scaled("mxfp8_e4m3")
    given = p.arguments("jax")
    for key in ("sfa_tensor", "sfb_tensor"):
        given[key] = to_framework(to_numpy(given[key]).view(np.uint8), "jax")
    assert_is(grouped_gemm_wgrad_wrapper(**given, wgrad_dtype="float32")[0], p.want)


def test_plan_and_names() -> None:
    plan = OPERATION.plan(OPERATION.bind(*example("plain")), target=HOPPER)
    assert plan.kernel is not None or plan.missing is not None
    with pytest.raises(NotSupportedError, match="grouped_gemm_wgrad: backend"):
        call(backend="sm90")
    assert grouped_gemm_wgrad_wrapper.supports_canonical_layouts is True
    assert grouped_gemm_wgrad_wrapper.supports_bf16_canonical_layouts is True
    for name in ("grouped_gemm_wgrad_wrapper", "GroupedGemmWgrad", "grouped_gemm_wgrad_jax"):
        peer = f"{name}Sm100" if name[0].isupper() else f"{name}_sm100"
        assert getattr(compat, peer) is getattr(fe_gemm, name)
    assert compat.get_grouped_gemm_wgrad_workspace_size_sm100 is get_grouped_gemm_wgrad_workspace_size
    assert compat.WGradInputOrder is WGradInputOrder


@pytest.mark.parametrize(("majors", "free"), [("mn", True), ("kn", False), ("mk", False), ("kk", False)])
def test_on_a_gpu_groups_of_contiguous_tokens_begin_at_multiples_of_16_bytes(majors: str, free: bool) -> None:
    problem = Plain()
    given = {**dict.fromkeys(CONTRACT.input_names), **problem.arguments("torch", *majors)}
    bound = OPERATION.bind([given[name] for name in CONTRACT.input_names], {})
    known = {name: getattr(bound, name) for name in ("arrays", "dim", "has", "dtype", "operation", "options")}
    on_a_gpu: Any = SimpleNamespace(**known, device=SimpleNamespace(type="cuda"))

    def check(*offsets: int) -> None:
        check_values(on_a_gpu, lambda _name: np.array(offsets, np.int32))

    check(8, 8, 40, 45, 45)
    check_values(bound, lambda _name: problem.off)  # the reference takes any
    if free:
        check(5, 5, 38, 40, 40)
    else:
        with pytest.raises(InvalidArgumentError, match="multiples of 8"):
            check(5, 5, 38, 40, 40)
