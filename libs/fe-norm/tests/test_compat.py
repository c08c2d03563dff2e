"""The peer's names stand for the same objects as ours."""

from __future__ import annotations

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fe_norm
from fe_norm import compat

SAME = {
    "RmsNormRhtAmaxSm100": "RmsNormRhtAmax",
    "RmsNormSiluPadSm100": "RmsNormSiluPad",
    "best_num_threads": "best_num_threads",
    "pick_rows_per_cta": "pick_rows_per_cta",
    "rmsnorm_rht_amax_forward": "rmsnorm_rht_amax_wrapper",
    "rmsnorm_rht_amax_jax_forward": "rmsnorm_rht_amax_jax",
    "rmsnorm_rht_amax_wrapper_sm100": "rmsnorm_rht_amax_wrapper",
    "rmsnorm_silu_pad_forward": "rmsnorm_silu_pad_wrapper",
    "rmsnorm_silu_pad_jax_forward": "rmsnorm_silu_pad_jax",
    "rmsnorm_silu_pad_wrapper_sm100": "rmsnorm_silu_pad_wrapper",
}


@pytest.mark.parametrize(("theirs", "ours"), SAME.items())
def test_the_same_object(theirs: str, ours: str) -> None:
    assert getattr(compat, theirs) is getattr(fe_norm, ours)


def test_every_name_is_tested() -> None:
    assert set(compat.__all__) == {*SAME, "jax"}


def test_signatures_are_the_peers() -> None:
    """Names, order and defaults; what we add is keyword-only and comes last."""
    expected = {
        compat.rmsnorm_rht_amax_wrapper_sm100: "x_tensor w_tensor eps num_threads rows_per_cta current_stream",
        compat.RmsNormRhtAmaxSm100: "sample_x sample_w sample_o sample_amax eps num_threads rows_per_cta",
        compat.RmsNormRhtAmaxSm100.execute: "self x_tensor w_tensor o_tensor amax_tensor current_stream",
        compat.rmsnorm_silu_pad_wrapper_sm100: "input gamma input_bias previous residual residual_bias current_stream",
        compat.RmsNormSiluPadSm100: "sample_input sample_gamma sample_padded_output sample_cache_output "
        "sample_input_bias sample_previous sample_residual sample_residual_bias sample_residual_output",
        compat.RmsNormSiluPadSm100.execute: "self input gamma padded_output cache_output input_bias previous residual "
        "residual_bias residual_output current_stream",
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


def test_jax_result_has_names() -> None:
    x, w = jnp.ones((4, 32)), jnp.ones(32)
    for call in (compat.jax.rmsnorm_rht_amax_sm100, jax.jit(compat.jax.rmsnorm_rht_amax_sm100)):
        result = call(x, w)
        assert result.output.shape == (4, 32)
        assert result.amax.shape == (2,)
        output, _ = result
        assert output is result.output


def test_importing_the_names_loads_no_framework() -> None:
    code = "import sys, fe_norm.compat, fe_norm.compat.jax; assert not {'cutlass', 'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
