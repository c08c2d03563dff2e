"""Edges of ``grouped_gemm_glu``: results that a family lacks, addresses without offsets, names of packed weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grouped_arguments import Gated

from fe_gemm import GroupedGemmGlu, grouped_gemm_glu_wrapper


def test_amax_is_no_result_of_bfloat16_operands() -> None:
    p = Gated()
    given = p.arguments("torch")
    arrays = (given["a_tensor"], torch.zeros(160, 128), torch.zeros(160, 64), None)
    more = {"sample_b": given["b_tensor"], "sample_prob": given["prob_tensor"], "sample_amax": torch.zeros(3, 1)}
    with pytest.raises(ValueError, match="amax_tensor must be left out"):
        GroupedGemmGlu(*arrays, given["padded_offsets"], given["alpha_tensor"], None, **more).check_support()


def test_addresses_are_checked_where_the_offsets_are_not() -> None:
    p = Gated("mxfp8_e4m3", (160,))
    given = p.arguments("numpy", "discrete")
    given["b_ptrs"] = np.zeros_like(given["b_ptrs"])
    with pytest.raises(ValueError, match="b_ptrs must"):
        grouped_gemm_glu_wrapper(**given, use_single_group_runtime_offsets=True)


def test_every_name_of_fp4_weights_behind_addresses() -> None:
    p = Gated("nvfp4")
    given = p.arguments("numpy", "discrete")
    want = grouped_gemm_glu_wrapper(**given)["d_tensor"]
    for name in ("float4_e2m1fn_x2", "float4_e2m1fn"):
        assert grouped_gemm_glu_wrapper(**{**given, "b_dtype": name})["d_tensor"].tobytes() == want.tobytes()
