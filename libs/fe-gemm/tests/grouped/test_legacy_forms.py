"""The legacy and the discrete operations: the same results as the unified ones, and what only they refuse."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from grouped_arguments import FRAMEWORKS, Gated, assert_close
from naive_gemm import E4M3
from naive_grouped import BF16

import fe_gemm
from fe_gemm import (
    DiscreteGroupedGemmDswiglu,
    DiscreteGroupedGemmSwiglu,
    GroupedGemmDswiglu,
    GroupedGemmSwiglu,
    compat,
    discrete_grouped_gemm_dswiglu_jax,
    discrete_grouped_gemm_dswiglu_wrapper,
    discrete_grouped_gemm_swiglu_jax,
    discrete_grouped_gemm_swiglu_wrapper,
    grouped_gemm_dglu_wrapper,
    grouped_gemm_dswiglu_jax,
    grouped_gemm_dswiglu_wrapper,
    grouped_gemm_glu_wrapper,
    grouped_gemm_swiglu_jax,
    grouped_gemm_swiglu_wrapper,
)
from fe_runtime import NotCompiledError
from fe_runtime.testing import to_framework, to_numpy

STRIDED = ("numpy", "torch")
N, K = 128, 64
FORWARD = ("c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")
BACKWARD = ("d_row_tensor", "d_col_tensor", "dprob_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")


def same(got: Any, want: Any, keys: Any) -> None:
    assert list(got.keys()) == list(keys)
    for key in keys:
        assert (got[key] is None) == (want[key] is None)
        assert got[key] is None or to_numpy(got[key]).tobytes() == to_numpy(want[key]).tobytes()


def forward(p: Gated, framework: str = "numpy", mode: str = "dense", rank: int = 2) -> dict[str, Any]:
    """Return the arguments of the unified wrapper."""
    given = p.arguments(framework, mode, rank)
    if p.name.startswith("mxfp8"):
        given |= {"d_dtype": E4M3, "norm_const_tensor": to_framework(p.norm, framework)}
    if framework == "jax":
        given["generate_c"] = True
    return given


def backward(p: Gated, framework: str = "numpy", mode: str = "dense", rank: int = 2) -> dict[str, Any]:
    given = p.arguments(framework, mode, rank)
    given["c_tensor"] = p.rows_like(p.c, framework, rank)
    given["beta_tensor"] = to_framework(p.beta, framework)
    zero = p.rows_like(np.zeros(p.rows, np.float32), framework, rank)
    given["dprob_tensor"] = None if framework == "jax" else zero
    if p.name.startswith("mxfp8"):
        given |= {"d_dtype": E4M3, "norm_const_tensor": to_framework(p.norm, framework)}
    return given


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in ("b_major", "generate_c", *names)}


# --- forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_swiglu(name: str, framework: str) -> None:
    given = forward(Gated(name), framework)
    same(grouped_gemm_swiglu_wrapper(**without(given)), grouped_gemm_glu_wrapper(**given), FORWARD)
    if framework == "jax" and name == "mxfp8_e4m3":
        names = without(given, "sf_vec_size")
        static = {"d_dtype": names.pop("d_dtype")}
        run = jax.jit(lambda arrays: grouped_gemm_swiglu_jax(**arrays, **static))
        same(run(names), grouped_gemm_glu_wrapper(**given), FORWARD)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("act_func", ["swiglu", "geglu"])
@pytest.mark.parametrize("rank", [2, 3])
def test_discrete_swiglu(rank: int, act_func: str, framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    given = forward(p, framework, "discrete", rank)
    bias = to_framework(p.bias, framework)
    want = grouped_gemm_glu_wrapper(**given, act_func=act_func, bias_tensor=bias)
    same(discrete_grouped_gemm_swiglu_wrapper(**without(given), act_func=act_func, bias_tensor=bias), want, FORWARD)


def test_discrete_swiglu_in_jax() -> None:
    p = Gated("mxfp8_e4m3")
    given = without(forward(p, "jax", "discrete", 3), "b_dtype", "sf_vec_size")
    static = {key: given.pop(key) for key in ("d_dtype", "n")}
    other = Gated("mxfp8_e4m3")  # which keeps its weights
    want = grouped_gemm_glu_wrapper(**forward(other, "numpy", "discrete", 3))
    run = lambda arrays: discrete_grouped_gemm_swiglu_jax(**arrays, **static)  # noqa: E731
    assert list(run(given)) == list(FORWARD)
    result = jax.jit(run)(given)
    assert type(result) is dict
    for key in FORWARD:
        assert_close(result[key], want[key], 10**9)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", ["dense", "discrete"])
def test_forward_classes(mode: str, framework: str) -> None:
    p = Gated("mxfp8_e4m3")
    given = forward(p, framework, mode)
    want = grouped_gemm_glu_wrapper(**given)
    c, d, d_col, _, row, col = outputs = [None if x is None else _copy(x) for x in want]
    scales = {"sample_sfd_row": row, "sample_sfd_col": col, "sample_norm_const": given["norm_const_tensor"],
              "sample_prob": given["prob_tensor"], "sf_vec_size": 32}  # fmt: skip
    shared = (c, d, given["sfa_tensor"])
    rest = (given["padded_offsets"], given["alpha_tensor"])
    if mode == "dense":
        op: Any = GroupedGemmSwiglu(
            given["a_tensor"], given["b_tensor"], *shared, given["sfb_tensor"], *rest, d_col, **scales
        )
        arrays = (given["a_tensor"], given["b_tensor"], *shared, given["sfb_tensor"], *rest)
    else:
        op = DiscreteGroupedGemmSwiglu(given["a_tensor"], 3, (N, K), E4M3, *shared, *rest, d_col, **scales)
        arrays = (given["a_tensor"], given["b_ptrs"], *shared, given["sfb_ptrs"], *rest)
    live = {"d_col_tensor": d_col, "sfd_row_tensor": row, "sfd_col_tensor": col,
            "norm_const_tensor": given["norm_const_tensor"], "prob_tensor": given["prob_tensor"]}  # fmt: skip
    with pytest.raises(NotCompiledError):
        op.execute(*arrays, **live)
    assert op.check_support() is True
    op.compile()
    op.execute(*arrays, **live)
    for got, y in zip(outputs, want, strict=True):
        assert got is None or to_numpy(got).tobytes() == to_numpy(y).tobytes()
    assert "reference" in op.explain()
    assert op.scratch_workspace_bytes() == 0


def _copy(x: Any) -> Any:
    return x.clone() if hasattr(x, "clone") else x.copy()


# --- backward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "framework"), [("mxfp8_e4m3", "numpy"), ("mxfp8_e4m3", "torch"), ("nvfp4", "numpy"), ("nvfp4", "jax")]
)
def test_dswiglu(name: str, framework: str) -> None:
    p = Gated(name, n=64)
    given = backward(p, framework)
    want = grouped_gemm_dglu_wrapper(**given)
    got = grouped_gemm_dswiglu_wrapper(**without(given, "dprob_tensor"))
    same(got, want, BACKWARD)
    ones = {**given, "beta_tensor": to_framework(np.ones(3, np.float32), framework)}
    if framework != "jax":
        ones["dprob_tensor"][...] = 0
    unscaled = grouped_gemm_dswiglu_wrapper(**{**without(given, "dprob_tensor"), "beta_tensor": None})
    same(unscaled, grouped_gemm_dglu_wrapper(**ones), BACKWARD)


def test_dswiglu_in_jax() -> None:
    p = Gated("mxfp8_e4m3", n=64)
    given = without(backward(p, "jax"), "dprob_tensor", "sf_vec_size", "d_dtype")
    want = grouped_gemm_dglu_wrapper(**backward(p))
    result = jax.jit(lambda arrays: grouped_gemm_dswiglu_jax(**arrays))(given)
    assert list(result.keys()) == list(BACKWARD)
    assert result["amax_tensor"] is None
    for key in BACKWARD:
        assert_close(result[key], want[key], int(p.off[-1]) if key.startswith("d_") else 10**9)


@pytest.mark.parametrize("framework", STRIDED)
def test_buffers_of_dswiglu(framework: str) -> None:
    p = Gated("nvfp4", n=64)
    given = without(backward(p, framework), "dprob_tensor")
    want = grouped_gemm_dswiglu_wrapper(**given)
    dprob = to_framework(np.full(p.rows, 9, np.float32), framework)
    amax = to_framework(np.full((3, 2, 1), 1e9, np.float32), framework)
    got = grouped_gemm_dswiglu_wrapper(**given, dprob_tensor_buf=dprob, amax_tensor_buf=amax)
    assert got["dprob_tensor"] is dprob
    assert got["amax_tensor"] is amax
    assert to_numpy(dprob).tobytes() == to_numpy(want["dprob_tensor"]).tobytes()
    assert (to_numpy(amax) == 1e9).all()
    wide = grouped_gemm_dswiglu_wrapper(**given, d_dtype="float32", amax_tensor_buf=amax)
    assert wide["amax_tensor"] is None


@pytest.mark.parametrize("framework", STRIDED)
def test_a_refused_call_leaves_the_buffers_alone(framework: str) -> None:
    p = Gated("nvfp4", n=64)
    given = without(backward(p, framework), "dprob_tensor")
    dprob = to_framework(np.full(p.rows, 9, np.float32), framework)
    with pytest.raises(ValueError, match="c_tensor"):
        grouped_gemm_dswiglu_wrapper(**{**given, "c_tensor": given["c_tensor"][:, :64]}, dprob_tensor_buf=dprob)
    assert (to_numpy(dprob) == 9).all()
    for wrong in (dprob[:-1], to_framework(np.zeros(p.rows), framework), np.zeros((p.rows, 1), np.float32)):
        with pytest.raises(ValueError, match="dprob_tensor_buf must be float32"):
            grouped_gemm_dswiglu_wrapper(**given, dprob_tensor_buf=wrong)


def test_no_rows_have_no_scales() -> None:
    p = Gated("mxfp8_e4m3", (0, 0), 0, n=64)
    result = grouped_gemm_dswiglu_wrapper(**without(backward(p), "dprob_tensor"))
    assert result["sfd_row_tensor"] is result["sfd_col_tensor"] is None
    assert result["d_row_tensor"].shape == (0, 128)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("d_dtype", [E4M3, "bfloat16"])
def test_discrete_dswiglu(d_dtype: str, framework: str) -> None:
    p = Gated("mxfp8_e4m3", n=64)
    options: dict[str, Any] = {"generate_dbias": True, "act_func": "dgeglu", "d_dtype": d_dtype}
    given = {**backward(p, framework, "discrete"), **options}
    want = grouped_gemm_dglu_wrapper(**given)
    other = {**backward(p, framework, "discrete"), **options}
    got = discrete_grouped_gemm_dswiglu_wrapper(**without(other))
    same(got, want, list(want.keys()))
    if d_dtype == "bfloat16":
        assert got["d_col_tensor"] is got["sfd_row_tensor"] is got["sfd_col_tensor"] is None


def test_discrete_dswiglu_in_jax() -> None:
    p = Gated("mxfp8_e4m3", n=64)
    given = without(backward(p, "jax", "discrete", 3), "b_dtype", "sf_vec_size", "dprob_tensor")
    static = {key: given.pop(key) for key in ("d_dtype", "n")}
    other = Gated("mxfp8_e4m3", n=64)  # which keeps its weights
    want = grouped_gemm_dglu_wrapper(**backward(other, "numpy", "discrete", 3), generate_dbias=True)
    result = jax.jit(lambda y: discrete_grouped_gemm_dswiglu_jax(**y, **static, generate_dbias=True))(given)
    assert set(result) == set(want.keys())
    assert result["dprob_tensor"].shape == (160, 1, 1)
    for key in ("d_row_tensor", "d_col_tensor", "dbias_tensor", "sfd_row_tensor", "sfd_col_tensor"):
        assert_close(result[key], want[key], 10**9)


@pytest.mark.parametrize("framework", STRIDED)
@pytest.mark.parametrize("mode", ["dense", "discrete"])
def test_backward_classes(mode: str, framework: str) -> None:
    p = Gated("nvfp4", n=64)
    given = backward(p, framework, mode)
    factors = {"geglu_alpha": 1.3, "glu_clamp_max": 1.5} if mode == "discrete" else {}
    act = {"act_func": "dgeglu"} if mode == "discrete" else {}
    want = grouped_gemm_dglu_wrapper(**{**given, **act, **factors})
    d, dprob = _copy(want["d_row_tensor"]), to_framework(np.zeros(p.rows, np.float32), framework)
    amax = to_framework(np.full((3, 2, 1), -np.inf, np.float32), framework)
    rows = (given["padded_offsets"], given["alpha_tensor"], given["beta_tensor"], given["prob_tensor"], dprob)
    shared = {"sf_vec_size": 16, "sample_amax": amax}
    if mode == "dense":
        head = (given["a_tensor"], given["b_tensor"], given["c_tensor"], d, None, given["sfa_tensor"])
        arrays = (*head, given["sfb_tensor"], *rows)
        op: Any = GroupedGemmDswiglu(*arrays, **shared)
    else:
        head = (given["c_tensor"], d, None, given["sfa_tensor"])
        op = DiscreteGroupedGemmDswiglu(
            given["a_tensor"], 3, (64, K), given["b_dtype"], *head, *rows, act_func="dgeglu", **shared
        )
        arrays = (given["a_tensor"], given["b_ptrs"], *head, given["sfb_ptrs"], *rows)
    d[...] = 0
    op(*arrays, amax_tensor=amax, **factors)
    for got, key in ((d, "d_row_tensor"), (dprob, "dprob_tensor"), (amax, "amax_tensor")):
        assert to_numpy(got).tobytes() == to_numpy(want[key]).tobytes()


# --- what only they refuse ------------------------------------------------------------------------------------------


def test_bfloat16_operands() -> None:
    p = Gated()
    common = without(p.arguments(), "sf_vec_size")
    with pytest.raises(ValueError, match="grouped_gemm_swiglu: a_tensor must be fp8 or FP4"):
        grouped_gemm_swiglu_wrapper(**common, sfb_tensor=None)
    with pytest.raises(ValueError, match="grouped_gemm_dswiglu: a_tensor must be fp8 or FP4"):
        grouped_gemm_dswiglu_wrapper(**common, sfb_tensor=None, c_tensor=None, beta_tensor=None)
    discrete = without(p.arguments("numpy", "discrete"))
    with pytest.raises(ValueError, match="discrete_grouped_gemm_swiglu: a_tensor must be fp8 or FP4"):
        discrete_grouped_gemm_swiglu_wrapper(**discrete, sfb_ptrs=discrete["b_ptrs"])
    d = np.zeros((160, 64), BF16)
    op = GroupedGemmSwiglu(p.a, p.b, np.zeros((160, 128), BF16), d, None, None, p.off, p.alpha, None)
    with pytest.raises(ValueError, match="a_tensor must be fp8 or FP4"):
        op.check_support()


def test_missing_arrays() -> None:
    given = without(forward(Gated("mxfp8_e4m3")))
    for name in ("b_tensor", "alpha_tensor"):
        with pytest.raises(ValueError, match=f"grouped_gemm_swiglu: {name} must be an array"):
            grouped_gemm_swiglu_wrapper(**{**given, name: None})
    given = without(backward(Gated("mxfp8_e4m3", n=64)), "dprob_tensor")
    for name in ("b_tensor", "prob_tensor", "alpha_tensor"):
        with pytest.raises(ValueError, match=f"grouped_gemm_dswiglu: {name} must be an array"):
            grouped_gemm_dswiglu_wrapper(**{**given, name: None})
    given = without(backward(Gated("mxfp8_e4m3", n=64), "numpy", "discrete"))
    for name in ("b_ptrs", "sfb_ptrs", "prob_tensor", "dprob_tensor"):
        with pytest.raises(ValueError, match=f"discrete_grouped_gemm_dswiglu: {name} must be an array"):
            discrete_grouped_gemm_dswiglu_wrapper(**{**given, name: None})


def test_activations_of_discrete_forms() -> None:
    given = without(forward(Gated("mxfp8_e4m3"), "numpy", "discrete"))
    with pytest.raises(ValueError, match="act_func must be swiglu or geglu"):
        discrete_grouped_gemm_swiglu_wrapper(**given, act_func="situglu")
    given = without(backward(Gated("mxfp8_e4m3", n=64), "numpy", "discrete"))
    with pytest.raises(ValueError, match="act_func must be dswiglu or dgeglu"):
        discrete_grouped_gemm_dswiglu_wrapper(**given, act_func="dsituglu")


def test_rows_of_weights_behind_addresses() -> None:
    given = {**without(forward(Gated("mxfp8_e4m3", n=96), "numpy", "discrete"))}
    with pytest.raises(ValueError, match="a multiple of 64"):
        discrete_grouped_gemm_swiglu_wrapper(**given)
    with pytest.raises(ValueError, match="a multiple of 32"):
        discrete_grouped_gemm_dswiglu_wrapper(**without(backward(Gated("mxfp8_e4m3", n=48), "numpy", "discrete")))


@pytest.mark.parametrize("tile", [(32, 128), (128, 64)])
def test_tiles_of_dswiglu(tile: Any) -> None:
    given = without(backward(Gated("mxfp8_e4m3", n=64)), "dprob_tensor")
    with pytest.raises(ValueError, match="grouped_gemm_dswiglu: mma_tiler_mn must"):
        grouped_gemm_dswiglu_wrapper(**given, mma_tiler_mn=tile)
    assert grouped_gemm_dswiglu_wrapper(**given, mma_tiler_mn=(64, 128), cluster_shape_mn=(2, 1)) is not None


def test_what_jax_has_no_place_for() -> None:
    given = without(backward(Gated("mxfp8_e4m3", n=64), "jax"), "dprob_tensor")
    for name, value in (("dprob_tensor_buf", jax.numpy.zeros(160)), ("amax_tensor_buf", jax.numpy.zeros((3, 2, 1))),
                        ("epilogue_op", "relu")):  # fmt: skip
        with pytest.raises(ValueError, match=f"grouped_gemm_dswiglu: {name} must be None for JAX"):
            grouped_gemm_dswiglu_wrapper(**given, **{name: value})
    p = Gated("mxfp8_e4m3")
    x = forward(p, "jax")
    c, d = jax.numpy.zeros((160, 128), "bfloat16"), jax.numpy.zeros((160, 64), "bfloat16")
    arrays = (x["a_tensor"], x["b_tensor"], c, d, x["sfa_tensor"], x["sfb_tensor"], x["padded_offsets"])
    with pytest.raises(ValueError, match="grouped_gemm_swiglu: sample_a must be no JAX array"):
        GroupedGemmSwiglu(*arrays, x["alpha_tensor"], None, sf_vec_size=32).check_support()


def test_names_of_the_peer() -> None:
    for name in compat.grouped_gemm.__all__:
        plain = name.removesuffix("_sm100").removesuffix("Sm100")
        assert getattr(compat.grouped_gemm, name) is getattr(fe_gemm, plain)
        if plain != name:
            assert getattr(compat, name) is getattr(fe_gemm, plain)
    for name in compat.discrete_grouped_gemm.__all__:
        plain = name.removesuffix("_sm100").removesuffix("Sm100")
        assert getattr(compat.discrete_grouped_gemm, name) is getattr(fe_gemm, plain)
    assert len(compat.grouped_gemm.__all__) == 39
    assert compat.torch.grouped_gemm_swiglu is grouped_gemm_swiglu_wrapper
    assert compat.torch.grouped_gemm_dswiglu is grouped_gemm_dswiglu_wrapper
    assert compat.jax.grouped_gemm_swiglu is grouped_gemm_swiglu_jax
    assert compat.jax.grouped_gemm_dswiglu is grouped_gemm_dswiglu_jax
