"""Prepared calls: the wrapper's results, and what must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grouped_arguments import Gated
from naive_gemm import E4M3

from fe_gemm import PreparedGroupedGemm, grouped_gemm_glu_wrapper, prepare_grouped_gemm
from fe_runtime import NotSupportedError
from fe_runtime.testing import to_framework, to_numpy


def arguments(framework: str = "torch", rows: int = 160, **others: Any) -> dict[str, Any]:
    p = Gated("mxfp8_e4m3", rows=rows, **others)
    norm = to_framework(np.ones(1, np.float32), framework)
    return {**p.arguments(framework), "d_dtype": E4M3, "norm_const_tensor": norm}


def same(got: Any, want: Any) -> None:
    assert list(got.keys()) == list(want.keys())
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or to_numpy(x).tobytes() == to_numpy(y).tobytes()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_results_are_the_wrappers(framework: str) -> None:
    given = arguments(framework)
    plan = prepare_grouped_gemm("glu", **given)
    assert isinstance(plan, PreparedGroupedGemm)
    for rows in (160, 300, 160):
        live = arguments(framework, rows)
        same(plan.run(**live), grouped_gemm_glu_wrapper(**live))
        same(plan.run(check=False, **live), grouped_gemm_glu_wrapper(**live))


def test_row_outputs_are_shared_between_calls_of_equal_rows() -> None:
    given = arguments()
    plan = prepare_grouped_gemm("glu", reuse_row_outputs=True, **given)
    first, second = plan.run(**given), plan.run(**given)
    for key in first.keys():  # noqa: SIM118 - a TupleDict iterates over its values
        shared = first[key] is not None and first[key].data_ptr() == second[key].data_ptr()
        assert shared == (key in ("d_tensor", "sfd_row_tensor"))
    other = plan.run(**arguments(rows=300))
    assert other["d_tensor"].shape[0] == 300
    assert plan.run(**given)["d_tensor"].shape[0] == 160
    unshared = prepare_grouped_gemm("glu", **given)
    assert unshared.run(**given)["d_tensor"].data_ptr() != unshared.run(**given)["d_tensor"].data_ptr()


def test_outputs_of_the_caller() -> None:
    given = arguments()
    plan, want = prepare_grouped_gemm("glu", **given), grouped_gemm_glu_wrapper(**given)
    own = {key: want[key].clone() for key in ("c_tensor", "d_tensor", "sfd_col_tensor")}
    got = plan.run(**given, outputs=own)
    assert all(got[key] is own[key] for key in own)
    same(got, want)
    with pytest.raises(ValueError, match="outputs must have keys among"):
        plan.run(**given, outputs={"nonsense": own["c_tensor"]})
    with pytest.raises(ValueError, match="d_tensor must have shape"):
        plan.run(**given, outputs={"d_tensor": own["d_tensor"][:5]})


@pytest.mark.parametrize("changed", [
    {"sf_vec_size": 16}, {"act_func": "geglu"}, {"c_dtype": "float16"}, {"prob_tensor": None}, {"geglu_alpha": 2.0},
])  # fmt: skip
def test_what_must_not_change(changed: dict[str, Any]) -> None:
    given = arguments()
    plan = prepare_grouped_gemm("glu", **given)
    with pytest.raises(ValueError, match=r"prepare_grouped_gemm: .* must be as prepared"):
        plan.run(**{**given, **changed})
    with pytest.raises(ValueError, match="prepare_grouped_gemm: b_tensor must be as prepared"):
        plan.run(**arguments(n=64))


def test_what_can_be_prepared() -> None:
    given = arguments()
    with pytest.raises(ValueError, match="kind must be glu or quant"):
        prepare_grouped_gemm("swiglu", **given)
    with pytest.raises(NotSupportedError, match="quant"):
        prepare_grouped_gemm("quant", **given)
    rank3 = Gated("mxfp8_e4m3").arguments("torch", rank=3)
    for name, changed in [
        ("a_tensor", {"a_tensor": rank3["a_tensor"]}), ("a_tensor", {"a_tensor": given["a_tensor"][:0]}),
        ("a_tensor", {"a_tensor": Gated("mxfp8_e5m2").arguments("torch")["a_tensor"]}),
        ("b_tensor", {"b_tensor": None}),
        ("c_dtype", {"c_dtype": "float32"}), ("d_dtype", {"d_dtype": "bfloat16"}), ("b_major", {"b_major": "n"}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"prepare_grouped_gemm: {name} must"):
            prepare_grouped_gemm("glu", **{**given, **changed})
